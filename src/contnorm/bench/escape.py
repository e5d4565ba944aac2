"""Escape text for an output format: terminal, HTML, Markdown, LaTeX and CSV.

Names, notes and messages can come from records, data sets, recipes and settings of other people. Every writer passes
such text through the function of its format, at the point of output. All of them first replace invisible characters by
escape sequences: control characters, bidirectional overrides, line separators and surrogates.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable, Sequence

__all__ = [
    "code_fence",
    "escape_csv",
    "escape_html",
    "escape_latex",
    "escape_latex_comment",
    "escape_markdown",
    "escape_markdown_line",
    "escape_terminal",
    "html_table",
    "shorten",
]

# Control, format, surrogate, line and paragraph separator.
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # Cf characters that Indic and Persian spelling and emoji need
_LATEX = {
    "\\": r"\textbackslash{}",
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "`": r"\textasciigrave{}",
}
_MARKDOWN = str.maketrans({"<": "&lt;", ">": "&gt;", **{c: f"\\{c}" for c in "\\`*|~$"}})
_UNDERSCORE = re.compile(r"(?<![^\W_])_|_(?![^\W_])")  # not within a word, where it means no emphasis
_ENTITY = re.compile(r"&(?=[#\w])")
_LINK = re.compile(r"\](?=[(\[:])")  # of a link, an image or a definition
_BLOCK_START = re.compile(r"^(\s*|\s*\d+(?=[.)]))([#+=.)-])")  # heading, list or rule at the start of a line
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf)")
_FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # also the fullwidth forms, which spreadsheets accept


def escape_terminal(text: str) -> str:
    r"""Replace invisible characters, so that text can't move the cursor, set the title or reorder other text.

    Example:
        >>> print(escape_terminal("cn\x1b[2J\n"))
        cn\x1b[2J\n
    """
    if text.isprintable():
        return text
    return "".join(_visible(letter) for letter in text)


def _visible(letter: str) -> str:
    if unicodedata.category(letter) in _INVISIBLE and letter not in _JOINERS:
        return letter.encode("unicode_escape").decode("ascii")
    return letter


def shorten(text: str, limit: int) -> str:
    """Cut the middle of a text that is longer than the limit.

    Example:
        >>> shorten("0123456789", 7)
        '01...89'
    """
    if len(text) <= limit:
        return text
    half = (limit - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def escape_html(text: str) -> str:
    """Escape text for the content or a quoted attribute of an HTML or SVG element.

    Example:
        >>> escape_html('<b title="x">')
        '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(escape_terminal(text))


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in HTML, for notebooks, with the text of every cell escaped.

    Example:
        >>> html_table(["seeds", "mean"], [(8, "<1")])
        '<table><tr><th>seeds</th><th>mean</th></tr><tr><td>8</td><td>&lt;1</td></tr></table>'
    """
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{escape_html(str(cell))}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"


def escape_markdown(text: str) -> str:
    r"""Escape text within a line of Markdown, such as a table cell or a heading.

    Example:
        >>> print(escape_markdown("BN* <b> a|b bn_gn _x_"))
        BN\* &lt;b&gt; a\|b bn_gn \_x\_
        >>> print(escape_markdown("[60.0] ![x](http://example.org)"))
        [60.0] ![x\](http://example.org)
    """
    escaped = _ENTITY.sub("&amp;", escape_terminal(text)).translate(_MARKDOWN)
    return _LINK.sub(r"\\]", _UNDERSCORE.sub(r"\\_", escaped))


def escape_markdown_line(text: str) -> str:
    r"""Escape text at the start of a line of Markdown, such as a paragraph or a list item.

    Example:
        >>> print(escape_markdown_line("# x"), escape_markdown_line("1. x"))
        \# x 1\. x
    """
    return _BLOCK_START.sub(r"\1\\\2", escape_markdown(text))


def code_fence(text: str, language: str) -> str:
    """Fenced Markdown block of one line of code; the fence is longer than any run of backticks in the code.

    Example:
        >>> code_fence("contnorm ls", "bash").splitlines()
        ['```bash', 'contnorm ls', '```']
    """
    runs = re.findall(r"`+", text)
    fence = "`" * max([3, *(len(run) + 1 for run in runs)])
    return f"{fence}{language}\n{escape_terminal(text)}\n{fence}"


def escape_latex(text: str) -> str:
    r"""Escape text for a cell of a LaTeX tabular.

    Example:
        >>> print(escape_latex("bn_gn ^^41 50 %"))
        bn\_gn \textasciicircum{}\textasciicircum{}41 50 \%
    """
    escaped = "".join(_LATEX.get(letter, letter) for letter in escape_terminal(text))
    # TeX reads a bracket or a star after the \\ of the previous row as an argument of \\.
    return f"{{}}{escaped}" if escaped.startswith(("[", "*")) else escaped


def escape_latex_comment(text: str) -> str:
    """Escape text for a one-line LaTeX comment; TeX's ``^^`` notation for characters is broken up.

    Example:
        >>> escape_latex_comment("a^^Mb")
        'a^ ^Mb'
    """
    return re.sub(r"\^(?=\^)", "^ ", escape_terminal(text))


def escape_csv(value: object) -> object:
    """Escape a cell of a CSV file: text that a spreadsheet would read as a formula is prefixed with an apostrophe.

    Numbers are unchanged, including those that are given as text.

    Example:
        >>> escape_csv("=1+1"), escape_csv("-0.5"), escape_csv(-0.5)
        ("'=1+1", '-0.5', -0.5)
    """
    if not isinstance(value, str):
        return value
    text = escape_terminal(value)
    formula = text.lstrip().startswith(_FORMULA) or value.startswith(("\t", "\r", "\n"))
    return f"'{text}" if formula and not _NUMBER.fullmatch(text) else text
