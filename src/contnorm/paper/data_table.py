"""The paper's table of data sets: what it publishes, compared with what is on disk. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from contnorm.bench.config.schema import StreamConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import SOURCES, data_root, describe_layouts, find_layout, load_with_progress
from contnorm.bench.streams.tasks import build_stream, find_stream
from contnorm.errors import UserError
from contnorm.paper.published import DataRow, data_rows

__all__ = ["ComparedData", "compare_data", "measure_data"]


@dataclass(frozen=True)
class ComparedData:
    """A data set as published and as measured on disk.

    Attributes:
        published: The numbers of the paper.
        measured: The numbers on disk; None if it could not be measured.
        missing: Why it could not be measured.
    """

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


def _compared(row: DataRow, root: Path, bars: Progress, allow_missing: bool) -> ComparedData:
    spec = SOURCES[find_stream(row.stream).sources[0]]
    if find_layout(spec, root) is None:
        return ComparedData(row, None, f"{row.stream}: put {describe_layouts(spec)} under {root}.")
    try:
        source = load_with_progress(spec.name, root, bars, allow_missing)
        return ComparedData(row, measure_data(row.stream, source))
    except UserError as error:  # the other data sets are still shown
        return ComparedData(row, None, str(error))


def compare_data(
    streams: Sequence[str], root: Path | None = None, *, allow_missing: bool = False, console: Console | None = None
) -> list[ComparedData]:
    """Compare data sets on disk with the numbers that the paper publishes.

    Args:
        streams: Streams whose data sets are compared.
        root: Folder of data sets; None for the default one.
        allow_missing: Accept a published data set with other image counts than published.
        console: Terminal to show the progress of decoding on; None for no output.

    Raises:
        UserError: If none of the data sets is there.
    """
    folder = data_root(root)
    terminal = console or Console(quiet=True)
    with Progress(console=terminal, transient=True, disable=not terminal.is_terminal) as bars:
        rows = [_compared(row, folder, bars, allow_missing) for row in data_rows() if row.stream in streams]
    if not any(row.measured for row in rows):
        raise UserError(f"none of the data sets is under {folder}. {rows[0].missing}")
    return rows
