"""Prints tables on a terminal of any width: as a table if it fits, otherwise as lines. Values are never truncated."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from contnorm.bench.escape import escape_terminal, shorten

__all__ = [
    "column_widths",
    "needed_width",
    "print_columns",
    "print_error",
    "print_indented",
    "print_table",
    "print_text",
    "safe_text",
    "show_rows",
]

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


def show_rows(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console, named: int = 1) -> None:
    """Print rows as a table; if the terminal is too narrow, print each row as its name and its cells with headings.

    Args:
        heads: Column headings.
        rows: Cells of each row.
        console: Terminal to print to.
        named: Number of leading columns that form a row's name; consecutive rows with the same name print it once.

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
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(safe_text, row))
    if needed_width(table, console) <= console.width:
        console.print(table)
        return
    before = ""
    for row in rows:
        name = " ".join(row[:named])
        if name != before:
            console.print(safe_text(name))
        before = name
        cells = [f"{head} {cell}" for head, cell in zip(heads[named:], row[named:], strict=True)]
        for line in _lines(cells, console.width - INDENT):
            print_indented(line, console)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Like `show_rows`, and fast for thousands of rows if they fit.

    Example:
        >>> print_table(("norm", "lr"), [("bn", "0.1")], Console(width=40))
        norm  lr
        bn    0.1
    """
    widths = column_widths(heads, [[escape_terminal(cell) for cell in row] for row in rows])
    if sum(widths) + 2 * (len(widths) - 1) <= console.width:
        print_columns(heads, rows, console)
    else:
        show_rows(heads, rows, console)


def column_widths(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Minimum width of each column, in terminal cells, for its content to fit.

    Example:
        >>> column_widths(("norm", "ACC"), [("bn", "64.75")])
        [4, 5]
    """
    return [max(map(cell_len, column)) for column in zip(heads, *rows, strict=True)]


def print_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str]], console: Console, wrap_last: bool = False
) -> None:
    """Print rows in columns, separated by two spaces. A table of rich takes seconds for thousands of rows.

    Args:
        heads: Column headings.
        rows: Cells of each row.
        console: Terminal to print to.
        wrap_last: Whether the last column wraps between words if the terminal is too narrow.

    Example:
        >>> print_columns(("norm", "settings"), [("bn", "lr=0.1 batch=9")], Console(width=14), wrap_last=True)
        norm  settings
        bn    lr=0.1
              batch=9
    """
    rows = [[escape_terminal(cell) for cell in row] for row in rows]
    widths = column_widths(heads, rows)
    if wrap_last:
        widths[-1] = max(min(widths[-1], console.width - sum(widths[:-1]) - 2 * len(widths) + 2), 1)
    lines: list[str] = []
    for row in (heads, *rows):
        *cells, last = row
        start = "".join(cell + " " * (width - cell_len(cell) + 2) for cell, width in zip(cells, widths, strict=False))
        parts = _wrapped(last, widths[-1]) if wrap_last else [last]
        lines += [(start if number == 0 else " " * len(start)) + part for number, part in enumerate(parts)]
    text = Text("\n".join(line.rstrip() for line in lines), no_wrap=True, overflow="ignore")
    text.stylize("table.header", 0, len(lines[0]))
    console.print(text, soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a text between words; a word that is longer than a line gets its own line."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and cell_len(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


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
