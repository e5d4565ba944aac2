"""Runs of a recipe: their settings, data sets, records and execution. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.execution import RunInterrupted, run_missing
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig, merge_settings
from contnorm.bench.data.registry import SOURCES, describe_layouts, find_layout
from contnorm.bench.data.store import find_stored
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import Store
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError
from contnorm.paper.cells import RecipeCell, source_of
from contnorm.paper.measured import (
    NUMERICS,
    MeasuredCell,
    Numerics,
    Seeds,
    measure_cells,
    numerics_of,
    table_numerics,
    with_numerics,
)
from contnorm.paper.recipe import Recipe
from contnorm.paper.selection import Selection, find_selection, read_selection

__all__ = [
    "Execution",
    "RecipeRecords",
    "TableError",
    "TableInterrupted",
    "config_of",
    "is_present",
    "missing_data_message",
    "run_jobs",
    "runs_folder",
    "selection_file",
    "selection_of",
    "sources_of",
]


class TableError(UserError):
    """Some runs of a table failed.

    Attributes:
        result: Result of the other runs.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class TableInterrupted(RunInterrupted):
    """The runs of a table were stopped by a signal, after saving what can be saved.

    Attributes:
        signal: Number of the signal.
        result: Result of the finished runs; None if there are none.
    """

    def __init__(self, message: str, number: int, result: Any) -> None:
        super().__init__(message, number)
        self.result = result


@dataclass(frozen=True)
class Execution:
    """How the execution of some runs ended: completely, with failed runs, or by a signal."""

    failure: str = ""
    stopped: RunInterrupted | None = None

    def raise_with(self, result: Any) -> None:
        """Raise an error if not all runs were executed, with the result of the others."""
        if self.failure:
            raise TableError(self.failure, result)
        if self.stopped is not None:
            raise TableInterrupted(str(self.stopped), self.stopped.signal, result)


def run_jobs(jobs: Sequence[Run], environment: RunOptions, console: Console | None) -> Execution:
    """Execute the missing jobs. Failures do not raise, so that the other results can still be used."""
    try:
        if jobs:
            run_missing(jobs, environment, console)
    except RunInterrupted as stopped:
        return Execution(stopped=stopped)
    except UserError as error:
        return Execution(failure=str(error))
    return Execution()


def selection_file(recipe: Recipe, runs: Path) -> Path:
    """File that `contnorm tune` writes and `contnorm paper` reads first."""
    return runs / "selected" / f"{recipe.name}.toml"


def selection_of(recipe: Recipe, runs: Path, file: Path | None = None, *, refined: bool = False) -> Selection | None:
    """Learning rates chosen for a recipe: from the typed file, the runs' folder or the package, in this order.

    ``refined`` prefers the package's selection from a refined grid, which fresh seeds use.
    """
    if file is not None:
        return read_selection(file, recipe.name)
    return find_selection(recipe.name, [selection_file(recipe, runs)], refined=refined)


def runs_folder(recipe: Recipe, runs: Path) -> Path:
    """Folder of a recipe's records."""
    return runs / recipe.name if recipe.alone else runs


def missing_data_message(recipe: Recipe, source: str, root: Path) -> str:
    """Message for a data set that is absent: what to put where."""
    spec = SOURCES[source]
    how = f"build it with {spec.built_with}" if spec.built_with else f"put {describe_layouts(spec)} there"
    streams = [find_stream(stream) for grid in recipe.runs for stream in grid.streams]
    others = [one for spec in streams if source in spec.sources for one in spec.sources if one != source]
    other = f", or use other data with --set stream.source={others[0]}" if others else ""
    return (
        f"{recipe.name} needs {source}, which is not under {root}: {how}, or set --data-root{other}. See "
        f"`contnorm data {source}`."
    )


def is_present(source: str, root: Path) -> bool:
    """Whether a data set is present; one that comes with a package always is."""
    if source not in SOURCES:  # a user's data set
        return find_stored(source, root) is not None
    return not SOURCES[source].layouts or find_layout(SOURCES[source], root) is not None


def sources_of(cells: Sequence[RecipeCell]) -> list[str]:
    """Data sets of some cells, each once."""
    return list(dict.fromkeys(source_of(cell) for cell in cells))


def config_of(cell: RecipeCell, root: Path, typed: Mapping[str, Any] | None = None) -> RunConfig:
    """Configuration of a cell's run; typed settings override the cell's."""
    overrides = typed or {}
    source = overrides.get("stream", {}).get("source") or source_of(cell)
    return resolve(merge_settings(merge_settings(cell.values, overrides), {"stream": {"source": source}}), root)


@dataclass(frozen=True)
class RecipeRecords:
    """The records of a recipe's runs under a folder.

    Attributes:
        store: Store of the records.
        seeds: Seeds that are wanted.
        problems: Errors of the records that `measured` could not read.
    """

    store: Store
    seeds: range
    problems: list[str] = field(default_factory=list)

    def diverged(self, config: RunConfig) -> dict[int, str]:
        """Diverged seeds of a run, and the reasons; they have no record, and would diverge again."""
        return {seed: reason for seed, reason in self.store.diverged_seeds(config).items() if seed in self.seeds}

    def count(self, config: RunConfig) -> int:
        """Number of seeds of a run that are recorded or diverged and need no run."""
        return len(self.store.seeds(config, self.seeds)) + len(self.diverged(config))

    def complete(self, config: RunConfig) -> bool:
        """Whether no seed of a run is missing."""
        return self.count(config) == len(self.seeds)

    def has_any(self, configs: Iterable[RunConfig]) -> bool:
        """Whether any seed of any run is recorded or diverged, in whatever precision."""
        return any(self.count(with_numerics(c, one)) for c in dict.fromkeys(configs) for one in NUMERICS)

    def choose_numerics(self, configs: Sequence[RunConfig], typed: Mapping[str, Any]) -> Numerics:
        """Precision of the table: the one with the most seeds among those that the typed settings allow.

        Without records it is the precision of ``configs``.
        """
        train = typed.get("train", {})
        allowed = [one for one in NUMERICS if all(train.get(k) in (None, v) for k, v in one._asdict().items())]
        counts = ({one: self.count(with_numerics(c, one)) for one in allowed} for c in dict.fromkeys(configs))
        return table_numerics(counts, numerics_of(configs[0]))

    def jobs(self, configs: Iterable[RunConfig]) -> list[Run]:
        """All jobs of some runs, finished ones included."""
        return [Run(config, seed) for config in dict.fromkeys(configs) for seed in self.seeds]

    def finished(self, jobs: Sequence[Run]) -> int:
        """Number of jobs that are recorded or diverged."""
        return sum(self.count(config) for config in dict.fromkeys(job.config for job in jobs))

    def measured(self, configs: Mapping[RecipeCell, RunConfig], numerics: Numerics) -> list[MeasuredCell]:
        """Cells with their records in one precision, which may be none."""
        return measure_cells(configs, self._load, self.diverged, numerics)

    def _load(self, config: RunConfig) -> dict[Numerics, Seeds]:
        """Records of a run by precision and seed."""
        loaded: dict[Numerics, Seeds] = {}
        for numerics in NUMERICS:
            run = with_numerics(config, numerics)
            matches = self.store.load_seeds(run, sorted(self.store.seeds(run, self.seeds)))
            self.problems.extend(problem for problem in matches.problems if problem not in self.problems)
            loaded[numerics] = {record.seed: record for record in matches.records}
        return loaded
