"""Choose a learning rate for each norm and strategy of a recipe, on the validation tasks. Needs torch.

Each learning rate is an ordinary run with an ordinary record. On a GPU all runs of one norm and strategy share a CUDA
graph. The tasks that a table reports on are never used. As in a table, all runs have one precision.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from contnorm.atomic_files import write_atomically
from contnorm.bench.config.schema import RunConfig, check_seeds
from contnorm.bench.data.registry import data_root
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.grid import LineSearch, Refine
from contnorm.bench.records import Store
from contnorm.bench.streams.tasks import STREAMS, find_stream
from contnorm.errors import UserError, usable
from contnorm.paper.cells import RecipeCell, cells_of, filter_cells, source_of
from contnorm.paper.measured import numerics_of, with_numerics
from contnorm.paper.recipe import Recipe, find_recipe
from contnorm.paper.recipe_runs import (
    Execution,
    RecipeRecords,
    config_of,
    is_present,
    missing_data_message,
    run_jobs,
    selection_file,
    selection_of,
)
from contnorm.paper.selection import (
    RATES,
    RateResult,
    SelectedRate,
    Selection,
    best_rate,
    merge_selections,
    read_selection,
    selection_text,
)

__all__ = ["RATES", "GridResult", "RateGrid", "TuneOptions", "TuneResult", "tune"]

log = logging.getLogger("contnorm")

GRID_KEYS = (
    "stream", "strategy", "norm", "groups", "momentum", "schedule", "freeze_after", "layers", "buffer", "forward",
    "batch", "replay", "moments", "weights",
)  # fmt: skip
UNTUNED_MOMENTS = ("running", "oracle")  # evaluated with running moments in a search, which needs no past data
TUNABLE = "`contnorm tune` takes table2, table8, table9, table10, table12, panel, and recipes of your own"


@dataclass(frozen=True)
class TuneOptions:
    """Options of `tune`.

    Attributes:
        seeds: Number of seeds, counted from 0.
        only: Filters for cells, in the form of ``--only`` of `contnorm paper`.
        rates: Learning rates to try.
        extensions: Largest number of learning rates beyond these, for each norm and strategy, while the best one is the
            smallest or the largest; 0 for the fixed grid of the protocol.
        refine: Whether to refine the grid once: ``"between"`` the best rate and its better neighbor, ``"around"`` the
            best rate, or None.
        execution: Options that control how runs are executed.
        max_steps: Number of steps of a smoke test; None for whole runs.
        precision: Precision of all runs; None for the one with the most records.
        data_root: Folder of data sets; None for the default one.
        runs: Folder of records.
        out: File to write; None for the one that `contnorm paper` reads by default.
    """

    seeds: int = 3
    only: Sequence[str] = ()
    rates: Sequence[float] = RATES
    execution: RunOptions = field(default_factory=RunOptions)
    max_steps: int | None = None
    precision: str | None = None
    data_root: Path | None = None
    runs: Path = Path("runs")
    out: Path | None = None
    extensions: int = 0
    refine: Refine | None = None


@dataclass(frozen=True)
class RateGrid:
    """Runs among which one learning rate is chosen, and the cells that it applies to."""

    cell: RecipeCell
    where: dict[str, object]
    configs: dict[float, RunConfig]

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of the stream, the strategy and the norm, for tables."""
        place = self.cell.place
        buffer = f" buffer {place['buffer']}" if place["buffer"] is not None else ""
        return place["stream"], f"{place['strategy']}{buffer}", self.cell.norm.replace("*", "")


@dataclass(frozen=True)
class GridResult:
    """A grid with the results of its learning rates; ``seeds`` is the number of seeds that each must have."""

    grid: RateGrid
    rates: list[RateResult]
    seeds: int

    @property
    def complete(self) -> bool:
        """Whether no run of the grid is missing."""
        return all(rate.seeds + rate.diverged == self.seeds for rate in self.rates)

    @property
    def best(self) -> RateResult | None:
        """Chosen learning rate; None if runs are missing or each learning rate has a diverged seed."""
        return best_rate(self.rates) if self.complete else None


@dataclass(frozen=True)
class TuneResult:
    """Learning rates tried and chosen for a recipe.

    Attributes:
        recipe: The recipe.
        grids: The learning rates of each norm and strategy, with their results.
        selection: The chosen learning rates, merged over earlier ones; None if none is chosen, or for a smoke test.
        path: File that the selection was written to.
    """

    recipe: Recipe
    grids: Sequence[GridResult]
    selection: Selection | None = None
    path: Path | None = None


def tune(recipe: str | Recipe, options: TuneOptions | None = None, *, console: Console | None = None) -> TuneResult:
    """Choose a learning rate for each norm and strategy of a table, on the validation tasks.

    Runs that are recorded are not repeated. The chosen rates are written to a file that `contnorm.paper.run_table`
    reads.

    Args:
        recipe: Name of a recipe, such as ``table2``; a TOML file; or a recipe.
        options: Seeds, rates, filters, device and folders; None for the defaults.
        console: Terminal or notebook to show progress on; None for no output.

    Raises:
        TableError: If runs failed; it has the result of the others.
        TableInterrupted: If a signal stopped the runs, after they were saved; it has the result of the finished ones.
        UserError: If no cell of the recipe can be tuned, or an option is invalid.

    Example:
        >>> tune("table2", TuneOptions(rates=[-1.0]))
        Traceback (most recent call last):
        contnorm.errors.UserError: rates -1.0: use learning rates above 0, such as 0.03,0.1.
    """
    options = options or TuneOptions()
    return _tune(find_recipe(recipe) if isinstance(recipe, str) else recipe, options, console)


def _tune(recipe: Recipe, options: TuneOptions, console: Console | None) -> TuneResult:
    _check(options)
    environment = _environment(options)
    records = RecipeRecords(Store(options.runs), range(options.seeds))
    grids = _grids(recipe, options, records, environment.data_root)
    searches = [_RateSearch(grid, options, environment.data_root) for grid in grids]
    execution = Execution()
    while configs := [config for search in searches for config in search.propose(records)]:
        jobs = records.jobs(configs)
        _refuse_test_tasks(jobs)
        execution = run_jobs(jobs, environment, console)
        if not all(search.record(records) for search in searches):
            break
    results = [GridResult(search.grid, _rate_results(search.grid, records), options.seeds) for search in searches]
    result = _write(recipe, results, options)
    execution.raise_with(result)
    return result


class _RateSearch:
    """The search for the learning rate of one grid; `grid` gets the rates that are added."""

    def __init__(self, grid: RateGrid, options: TuneOptions, root: Path) -> None:
        self.grid, self._options, self._root = grid, options, root
        self._line = LineSearch(grid.configs, extensions=options.extensions, refine=options.refine, name="rates")
        self._numerics = numerics_of(next(iter(grid.configs.values())))

    def propose(self, records: RecipeRecords) -> list[RunConfig]:
        """Return the runs of the learning rates to try next. An archive is not extended by runs that it lacks."""
        rates = self._line.propose()
        configs = {rate: self.grid.configs.get(rate) or self._config(rate) for rate in rates}
        if records.store.read_only:
            first = self.grid.configs.keys()
            configs = {rate: c for rate, c in configs.items() if rate in first or records.complete(c)}
        self.grid = replace(self.grid, configs=dict(sorted({**self.grid.configs, **configs}.items())))
        return list(configs.values())

    def _config(self, rate: float) -> RunConfig:
        return with_numerics(_on_validation(self.grid.cell, rate, self._options, self._root), self._numerics)

    def record(self, records: RecipeRecords) -> bool:
        """Record the results of all learning rates so far; returns whether none is missing."""
        results = _rate_results(self.grid, records)
        for result in results:
            self._line.record(result.lr, result.mean if result.eligible else None)
        return all(result.seeds + result.diverged == len(records.seeds) for result in results)


def _check(options: TuneOptions) -> None:
    check_seeds(options.seeds)
    if not options.rates or any(not 0 < rate < float("inf") for rate in options.rates):
        raise UserError(f"rates {','.join(map(str, options.rates))}: use learning rates above 0, such as 0.03,0.1.")


def _environment(options: TuneOptions) -> RunOptions:
    """Environment of the runs; by default a whole grid runs in parallel on a GPU."""
    execution = options.execution
    if execution.lanes is None and (execution.devices or execution.on_gpu):
        execution = replace(execution, lanes=len(options.rates) * options.seeds)
    return replace(execution, runs=options.runs, data_root=data_root(options.data_root))


def _grids(recipe: Recipe, options: TuneOptions, records: RecipeRecords, root: Path) -> list[RateGrid]:
    """One grid for each norm and strategy on a stream; prints what can't be tuned."""
    if not cells_of(recipe):
        raise UserError(f"tune {recipe.name}: it has no runs. {TUNABLE}.")
    cells = _tunable(recipe, filter_cells(cells_of(recipe), options.only))
    keys = _grid_keys(cells_of(recipe))
    rates = sorted(set(options.rates))
    grids: dict[object, RateGrid] = {}
    for cell in cells:
        configs = {rate: _on_validation(cell, rate, options, root) for rate in rates}
        where = {key: "own" if cell.place[key] is None else cell.place[key] for key in keys}
        grids.setdefault((tuple(where.items()), tuple(configs.values())), RateGrid(cell, where, configs))
    every = [config for grid in grids.values() for config in grid.configs.values()]
    numerics = records.choose_numerics(every, {"train": {"precision": options.precision}})
    in_one_precision = [
        replace(grid, configs={rate: with_numerics(config, numerics) for rate, config in grid.configs.items()})
        for grid in grids.values()
    ]
    return _with_data(recipe, in_one_precision, records, root)


def _grid_keys(cells: Sequence[RecipeCell]) -> list[str]:
    """Dimensions that tell the grids of a recipe apart; moments only if some cells are tuned with their own."""
    keys = [key for key in GRID_KEYS if any(cell.place[key] is not None for cell in cells)]
    if all(cell.place["moments"] in UNTUNED_MOMENTS for cell in cells):
        keys.remove("moments")
    return keys


def _with_data(recipe: Recipe, grids: list[RateGrid], records: RecipeRecords, root: Path) -> list[RateGrid]:
    """Grids whose data is present or that are fully recorded; prints what the others need."""
    usable_grids, absent = [], set()
    for grid in grids:
        source = source_of(grid.cell)
        if is_present(source, root) or all(map(records.complete, grid.configs.values())):
            usable_grids.append(grid)
        else:
            absent.add(source)
    messages = [missing_data_message(recipe, source, root) for source in sorted(absent)]
    if not usable_grids:
        raise UserError(" ".join(messages))
    for line in messages:
        log.warning(line)
    return usable_grids


def _tunable(recipe: Recipe, cells: Sequence[RecipeCell]) -> list[RecipeCell]:
    """Cells whose stream has validation tasks."""
    without = dict.fromkeys(cell.place["stream"] for cell in cells if not find_stream(cell.place["stream"]).validation)
    tunable = [cell for cell in cells if cell.place["stream"] not in without]
    if not tunable:
        able = " and ".join(sorted(spec.name for spec in STREAMS.values() if spec.validation))
        raise UserError(
            f"tune {recipe.name}: {' and '.join(without)} {'have' if len(without) > 1 else 'has'} no validation tasks; "
            f"{able} have them. {TUNABLE} with those streams; for others, write learning rates under [[selected]] of a "
            f"recipe of your own."
        )
    for stream in without:
        log.warning(f"tune {recipe.name}: {stream} has no validation tasks and is skipped.")
    return tunable


def _on_validation(cell: RecipeCell, rate: float, options: TuneOptions, root: Path) -> RunConfig:
    """Configuration of a cell's run on all validation tasks, evaluated with running moments or the cell's own."""
    train = {"lr": rate, "max_steps": options.max_steps, "precision": options.precision}
    overrides = {
        "stream": {"part": "validate", "tasks": None},
        "train": {key: value for key, value in train.items() if value is not None},
        "evaluate": {**({"moments": "running"} if cell.place["moments"] in UNTUNED_MOMENTS else {}), "drift": False},
    }
    return config_of(cell, root, overrides)


def _refuse_test_tasks(jobs: Sequence[Run]) -> None:
    """Guard: no learning rate is chosen on tasks that a table reports on."""
    for job in jobs:
        stream = job.config.stream
        if stream.part != "validate" or not find_stream(stream.name).validation:
            raise RuntimeError(f"tune: a run on stream.part={stream.part} of {stream.name}, not on validation tasks")


def _rate_results(grid: RateGrid, records: RecipeRecords) -> list[RateResult]:
    results = []
    for rate, config in grid.configs.items():
        seeds = sorted(records.store.seeds(config, records.seeds))
        accuracies = [records.store.load_run(config, seed).score("acc") for seed in seeds]
        results.append(RateResult.of(rate, accuracies, len(records.diverged(config))))
    return results


def _write(recipe: Recipe, results: Sequence[GridResult], options: TuneOptions) -> TuneResult:
    """Write the chosen rates, unless it is a smoke test."""
    rates = [
        SelectedRate(result.grid.where, best.lr, result.grid.configs[best.lr].train.precision, tuple(result.rates))
        for result in results
        if (best := result.best) is not None
    ]
    if not rates or options.max_steps is not None:
        return TuneResult(recipe, results)
    path = options.out or selection_file(recipe, options.runs)
    selection = _over_old(Selection(recipe.name, tuple(rates)), path, recipe, options)
    with usable(path, "it can't be written", "Use another file."):
        write_atomically(path, selection_text(selection).encode())
    return TuneResult(recipe, results, selection, path)


def _over_old(selection: Selection, path: Path, recipe: Recipe, options: TuneOptions) -> Selection:
    """Merge a new selection over the previous one: that of the same file, or the one `contnorm paper` would read."""
    old = read_selection(path, recipe.name) if path.is_file() else None
    if old is None and options.out is None:
        old = selection_of(recipe, options.runs)
    return merge_selections(old, selection) if old is not None else selection
