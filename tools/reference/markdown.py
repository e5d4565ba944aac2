"""Parts of Markdown pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["cell", "code", "notice", "table"]


def cell(text: str) -> str:
    """Text of one cell of a table: in one line, with vertical bars escaped and code as in Markdown.

    Example:
        >>> cell("a | b")
        'a \\\\| b'
    """
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def code(text: object) -> str:
    """Text as inline code."""
    return f"`{text}`"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table.

    Example:
        >>> table(("a", "b"), [("1", "2")])
        ['| a | b |', '|---|---|', '| 1 | 2 |']
    """
    lines = [heads, *rows]
    first, *rest = [f"| {' | '.join(cell(text) for text in row)} |" for row in lines]
    return [first, "|" + "---|" * len(heads), *rest]


def notice(source: str) -> str:
    """Sentence that says what a page is generated from."""
    return f"This page is generated from {source}; `python -m tools.reference` writes it."
