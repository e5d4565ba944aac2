"""Writes tables as text: a sheet of tables as Markdown or LaTeX, and rows as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from contnorm.bench.escape import (
    code_fence,
    escape_csv,
    escape_latex,
    escape_latex_comment,
    escape_markdown,
    escape_markdown_line,
)

__all__ = ["Link", "TextDocument", "TextTable", "csv_text", "latex", "markdown"]


class Link(str):
    """Text of a cell that links to another file in formats with links."""

    target: str

    def __new__(cls, text: str, target: str) -> Link:
        link = super().__new__(cls, text)
        link.target = target
        return link


@dataclass(frozen=True)
class TextTable:
    """One table of a sheet, with notes below; without rows it is only a title and notes."""

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    below: Sequence[str] = ()


@dataclass(frozen=True)
class TextDocument:
    """Content of one file.

    Attributes:
        name: Name of the file, without its suffix.
        command: Command that reproduces the content; one line for each if there are several.
    """

    name: str
    title: str
    blocks: Sequence[TextTable]
    notes: Sequence[str] = ()
    command: str = ""


def markdown(sheet: TextDocument) -> str:
    """Write a sheet as Markdown.

    Example:
        >>> print(markdown(TextDocument("runs", "Runs", [TextTable("", ["norm", "ACC"], [["a|b", "1.00"]])])))
        # Runs
        <BLANKLINE>
        | norm | ACC |
        |---|---|
        | a\\|b | 1.00 |
        <BLANKLINE>
    """
    parts = [f"# {escape_markdown(sheet.title)}", *map(escape_markdown_line, sheet.notes)]
    parts += [code_fence(line, "bash") for line in sheet.command.splitlines()]
    for block in sheet.blocks:
        parts += [f"## {escape_markdown(block.title)}"] if block.title else []
        parts += [_table(block)] if block.rows else []
        parts += ["\n".join(f"- {escape_markdown_line(text)}" for text in block.below)] if block.below else []
    return "\n\n".join(parts) + "\n"


def _table(block: TextTable) -> str:
    lines = [_row(block.heads), "|" + "---|" * len(block.heads), *map(_row, block.rows)]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_markdown_cell, cells)) + " |"


def _markdown_cell(cell: str) -> str:
    if isinstance(cell, Link):
        return f"[{escape_markdown(cell)}]({quote(cell.target)})"
    return escape_markdown(cell)


def latex(sheet: TextDocument) -> str:
    """Write a sheet as LaTeX tables that need the booktabs package; titles and notes become comments.

    Example:
        >>> print(latex(TextDocument("runs", "Runs", [TextTable("", ["norm", "95 %"], [["bn_gn", "1 +- 2"]])])))
        % Runs
        \\begin{tabular}{ll}
        \\toprule
        norm & 95 \\% \\\\
        \\midrule
        bn\\_gn & 1 $\\pm$ 2 \\\\
        \\bottomrule
        \\end{tabular}
        <BLANKLINE>
    """
    lines = [_comment(text) for text in (sheet.title, *sheet.notes, *sheet.command.splitlines()) if text]
    for block in sheet.blocks:
        lines += ["", _comment(block.title)] if block.title else []
        lines += _tabular(block) if block.rows else []
        lines += map(_comment, block.below)
    return "\n".join(lines) + "\n"


def _tabular(block: TextTable) -> list[str]:
    begin = [rf"\begin{{tabular}}{{{'l' * len(block.heads)}}}", r"\toprule", _set(block.heads), r"\midrule"]
    return [*begin, *map(_set, block.rows), r"\bottomrule", r"\end{tabular}"]


def _comment(text: str) -> str:
    return f"% {escape_latex_comment(text)}"


def _set(cells: Sequence[str]) -> str:
    return " & ".join(escape_latex(cell).replace("+-", r"$\pm$") for cell in cells) + r" \\"


def csv_text(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write rows as CSV.

    Example:
        >>> csv_text(["norm", "ACC"], [["=cn", -1.5]])
        "norm,ACC\\n'=cn,-1.5\\n"
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([escape_csv(cell) for cell in row] for row in rows)
    return buffer.getvalue()
