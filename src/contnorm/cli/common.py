"""What the commands share: printing of text and tables on a terminal of any width, and imports without collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.columns import Columns
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from contnorm.errors import escape_terminal, shorten

_at_terminal = sys.stdout is not None and sys.stdout.isatty()  # stdout is None if it was closed, as by `>&-`
console = Console(width=None if _at_terminal else 200)  # wide enough that tables in files and pipes do not wrap
INDENT = 4
LONGEST_MESSAGE = 4000  # characters; a very long typed value would hide the error message

RunsFolder = Annotated[
    Path, typer.Option("--runs", help="Folder of records and checkpoints; to read, also an archive.")
]
DataRoot = Annotated[
    Path | None, typer.Option("--data-root", help="Folder of data sets. Default: $CONTNORM_DATA, or ./data.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help="Select runs by settings: norm=cn, lr<=0.03, strategy=er,derpp, seed!=3; repeatable, all must hold.",
    ),
]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Context for imports, which create many objects that are never freed: the garbage collector would only scan them.

    It scans them neither during the import nor afterwards. A terminal shows that something happens: the first import of
    torch takes seconds.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with Console(stderr=True).status("importing"):
            yield
    finally:
        if enabled:
            gc.freeze()
            gc.enable()


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


def print_text(sentence: str, to: Console = console, style: str = "") -> None:
    """Print a sentence: wrapped between words on a terminal, as one searchable line in a file or pipe."""
    to.print(safe_text(sentence), style=style, soft_wrap=not to.is_terminal)


def print_lines(lines: Sequence[str], to: Console = console) -> None:
    """Print lines as they are, such as commands and paths to copy."""
    for line in lines:
        to.print(safe_text(line), soft_wrap=True)


def show_rows(
    heads: Sequence[str], rows: Sequence[Sequence[str]], to: Console = console, named: int = 1, wrap_last: bool = False
) -> None:
    """Print rows as a table; if the terminal is too narrow, print each row as its name and its cells with headings.

    Args:
        heads: Column headings.
        rows: Cells of each row.
        to: Terminal to print to.
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
    widths = [max(cell_len(escape_terminal(cell)) for cell in column) for column in zip(heads, *rows, strict=True)]
    if wrap_last:
        widths[-1] = max(cell_len(word) for row in (heads, *rows) for word in [*escape_terminal(row[-1]).split(), ""])
    if sum(widths) + 2 * (len(heads) - 1) <= to.width:
        columns = [Column(head, no_wrap=True, min_width=width) for head, width in zip(heads, widths, strict=True)]
        columns[-1].no_wrap = not wrap_last
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*map(safe_text, row))
        to.print(table)
        return
    before = ""
    for row in rows:
        if (name := " ".join(row[:named])) != before:
            to.print(safe_text(name))
        before = name
        cells = [safe_text(f"{head} {cell}") for head, cell in zip(heads[named:], row[named:], strict=True) if cell]
        to.print(Padding(Columns(cells, padding=(0, 2)), (0, 0, 0, INDENT)))
