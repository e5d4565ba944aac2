"""Escape text of records, data sets, recipes and settings, which may come from other people, at the point of output."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

_JOINERS = "\u200c\u200d"  # invisible letters that Indic and Persian spelling and emoji need


def escape_terminal(text: str) -> str:
    r"""Replace invisible characters, so that text can't move the cursor, set the title or reorder other text.

    Example:
        >>> print(escape_terminal("cn\x1b[2J\n"))
        cn\x1b[2J\n
    """
    if text.isprintable():
        return text
    letters = (
        letter if letter.isprintable() or letter in _JOINERS else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )
    return "".join(letters)


def shorten(text: str, limit: int) -> str:
    """Cut the middle of a text that is longer than the limit.

    Example:
        >>> shorten("0123456789", 7)
        '01...89'
    """
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in HTML, for notebooks, with the text of every cell escaped.

    Example:
        >>> html_table(["seeds", "mean"], [(8, "<1")])
        '<table><tr><th>seeds</th><th>mean</th></tr><tr><td>8</td><td>&lt;1</td></tr></table>'
    """
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
