"""Prints text and tables on a terminal of any width. Values are never truncated."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from contnorm.bench.escape import escape_terminal, shorten

__all__ = ["needed_width", "print_error", "print_indented", "print_text", "safe_text", "show_rows"]

UNLIMITED = 10_000  # console width at which no table is truncated
INDENT = 4
LONGEST_MESSAGE = 4000  # characters; a very long typed value would hide the error message


def safe_text(text: str) -> Text:
    r"""One line of text for the terminal: markup is not interpreted, and invisible characters are shown as escapes.

    Example:
        >>> print(safe_text("[red]a\x1b[2J"))
        [red]a\x1b[2J
    """
    return Text(escape_terminal(text))


def print_error(text: str) -> None:
    """Print a warning or an error to stderr, as one line."""
    print(f"contnorm: {shorten(escape_terminal(text), LONGEST_MESSAGE)}", file=sys.stderr)


def show_rows(
    heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console, named: int = 1, wrap_last: bool = False
) -> None:
    """Print rows as a table; if the terminal is too narrow, print each row as its name and its cells with headings.

    Args:
        heads: Column headings.
        rows: Cells of each row.
        console: Terminal to print to.
        named: Number of leading columns that form a row's name; consecutive rows with the same name print it once.
        wrap_last: Whether the last column may wrap between words.

    Example:
        >>> heads, rows = ("norm", "ACC", "FM"), [("bn", "64.75 +- 3.44", "8.48 +- 3.34")]
        >>> show_rows(heads, rows, Console(width=40))
        norm  ACC            FM
        bn    64.75 +- 3.44  8.48 +- 3.34
        >>> show_rows(heads, rows, Console(width=24))
        bn
            ACC 64.75 +- 3.44
            FM 8.48 +- 3.34
    """
    shown = [[escape_terminal(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
    if wrap_last:
        widths[-1] = max(cell_len(word) for row in shown for word in row[-1].split() or [""])
    if sum(widths) + 2 * (len(widths) - 1) <= console.width:
        last = len(heads) - 1 if wrap_last else None
        columns = [
            Column(head, no_wrap=number != last, min_width=width)
            for number, (head, width) in enumerate(zip(heads, widths, strict=True))
        ]
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*map(safe_text, row))
        console.print(table)
        return
    before = ""
    for row in rows:
        name = " ".join(row[:named])
        if name != before:
            console.print(safe_text(name))
        before = name
        cells = [f"{head} {cell}" for head, cell in zip(heads[named:], row[named:], strict=True) if cell]
        for line in _lines(cells, console.width - INDENT):
            print_indented(line, console)


def print_text(sentence: str, console: Console, style: str = "") -> None:
    """Print a sentence: wrapped between words on a terminal, as one searchable line in a file or pipe."""
    console.print(safe_text(sentence), style=style, soft_wrap=not console.is_terminal)


def print_indented(line: str, console: Console) -> None:
    """Print an indented line; its continuation lines are indented too."""
    console.print(Padding(safe_text(line), (0, 0, 0, INDENT), expand=False))


def needed_width(table: Table, console: Console) -> int:
    """Width at which nothing in a table is truncated or wrapped."""
    return console.measure(table, options=console.options.update(width=UNLIMITED)).maximum


def _lines(parts: Sequence[str], width: int) -> list[str]:
    """Join parts into lines, with as many parts per line as fit.

    Example:
        >>> _lines(["ACC 64.75", "FM 8.48", "LA 71.50"], 20)
        ['ACC 64.75  FM 8.48', 'LA 71.50']
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines
