"""Table 7: the data sets as the paper describes them, compared with those on disk. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from contnorm.bench.api.progress import load_with_progress
from contnorm.bench.config.schema import StreamConfig
from contnorm.bench.data.registry import SOURCES, Source, find_layout, looked_for
from contnorm.bench.streams.tasks import build_stream, find_stream
from contnorm.cli.tables import safe_text
from contnorm.errors import UserError
from contnorm.paper.published import DataRow, data_rows
from contnorm.paper.recipe import Recipe

__all__ = ["measure_data", "show_data_table"]

COLUMNS = ("tasks", "shape", "train", "test", "classes")


@dataclass(frozen=True)
class Compared:
    """A data set as published, and as measured on disk or the reason why it was not."""

    published: DataRow
    measured: DataRow | None
    missing: str = ""


def measure_data(name: str, source: Source) -> DataRow:
    """Count the tasks, samples and classes of a stream, validation tasks included."""
    spec = find_stream(name)
    defaults = spec.defaults["stream"]
    per_task = defaults.get("train_per_task")
    config = StreamConfig(name, part="all", scenario=defaults["scenario"], train_per_task=per_task)
    stream = build_stream(config, source, 0)
    shape = tuple(source.train_images.shape[1:])
    return DataRow(name, stream.tasks, shape, len(stream.train), len(stream.test), source.classes)


def show_data_table(recipe: Recipe, root: Path, console: Console, allow_missing: bool = False) -> None:
    """Print one row per data set on disk; for the others, what to put where."""
    rows = [_compared(row, root, console, allow_missing) for row in data_rows() if row.stream in recipe.streams]
    if not any(row.measured for row in rows):
        raise UserError(f"{recipe.name}: none of its data sets is under {root}. {rows[0].missing}")
    table = Table(*(Column(head, no_wrap=True) for head in ("stream", *COLUMNS, "verdict")), box=None, pad_edge=False)
    for row in rows:
        if row.measured is not None:
            table.add_row(*map(safe_text, (row.measured.stream, *_cells(row), _verdict(row))))
    console.print(table, "")
    console.print(safe_text("Found, with the paper's in brackets where it is another."))
    notes = [row.missing for row in rows if row.missing]
    notes += [f"{row.published.stream}: {row.published.flag}." for row in rows if row.published.flag]
    for line in notes:
        console.print(safe_text(line), soft_wrap=True)


def _compared(row: DataRow, root: Path, console: Console, allow_missing: bool) -> Compared:
    spec = SOURCES[find_stream(row.stream).sources[0]]
    if find_layout(spec, root) is None:
        return Compared(row, None, f"{row.stream}: put {looked_for(spec)} under {root}.")
    try:
        source = load_with_progress(spec.name, root, console, allow_missing=allow_missing)
        return Compared(row, measure_data(row.stream, source))
    except UserError as error:  # the other data sets are still shown
        return Compared(row, None, str(error))


def _cells(row: Compared) -> list[str]:
    return [_cell(getattr(row.measured, name), getattr(row.published, name)) for name in COLUMNS]


def _cell(ours: object, theirs: object) -> str:
    return _word(ours) if ours == theirs else f"{_word(ours)} ({_word(theirs)})"


def _word(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else f"{value:,}"


def _verdict(row: Compared) -> str:
    apart = [name for name in COLUMNS if getattr(row.measured, name) != getattr(row.published, name)]
    return f"differs in {', '.join(apart)}" if apart else "agrees"
