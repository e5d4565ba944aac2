"""Escape text for an output format: terminal, HTML and CSV.

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
    "escape_csv",
    "escape_html",
    "escape_terminal",
    "html_table",
    "shorten",
]

# Control, format, surrogate, line and paragraph separator.
_INVISIBLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_JOINERS = "\u200c\u200d"  # Cf characters that Indic and Persian spelling and emoji need
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
