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
from contnorm.bench.api.run import run_missing
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import data_root
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.grid import LEARNING_RATES, LineSearch, Refine
from contnorm.bench.records import DIVERGED, Store
from contnorm.bench.rng import check_seeds
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError
from contnorm.paper.cells import RecipeCell, RecordIndex, cells_of, filter_cells, numerics_of, with_numerics
from contnorm.paper.recipe import Dimension, Recipe, Selector, find_recipe
from contnorm.paper.run import config_of, is_present, missing_data_message, selection_file, selection_of
from contnorm.paper.selection import RateResult, SelectedRate, Selection, best_rate, read_selection, selection_text

_log = logging.getLogger("contnorm")
GRID_KEYS: tuple[Dimension, ...] = (
    "stream", "strategy", "norm", "groups", "momentum", "schedule", "freeze_after", "layers", "buffer", "forward",
    "batch", "replay", "moments", "weights",
)  # fmt: skip
UNTUNED_MOMENTS = ("running", "oracle")  # evaluated with running moments in a search, which needs no past data


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
    rates: Sequence[float] = LEARNING_RATES
    execution: RunOptions = field(default_factory=RunOptions)
    max_steps: int | None = None
    precision: str | None = None
    data_root: Path | None = None
    runs: Path = Path("runs")
    out: Path | None = None
    extensions: int = 0
    refine: Refine | None = None


@dataclass
class GridResult:
    """Learning rates among which one is chosen, and their results.

    Attributes:
        cell: One of the cells that the choice applies to.
        where: Selects all of them.
        seeds: Number of seeds that each learning rate must have.
        configs: Settings of the runs by learning rate.
        rates: Results of the learning rates.
    """

    cell: RecipeCell
    where: Selector
    seeds: int
    configs: dict[float, RunConfig]
    rates: list[RateResult] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of the stream, the strategy and the norm, for tables."""
        place = self.cell.place
        buffer = f" buffer {place['buffer']}" if place["buffer"] is not None else ""
        return place["stream"], f"{place['strategy']}{buffer}", self.cell.norm.replace("*", "")

    def config(self, rate: float, options: TuneOptions, root: Path) -> RunConfig:
        """Settings of a run on all validation tasks, evaluated with running moments or the cell's own."""
        train = {"lr": rate, "max_steps": options.max_steps, "precision": options.precision}
        untuned = self.cell.place["moments"] in UNTUNED_MOMENTS
        overrides = {
            "stream": {"part": "validate", "tasks": None},
            "train": {key: value for key, value in train.items() if value is not None},
            "evaluate": {**({"moments": "running"} if untuned else {}), "drift": False},
        }
        config = config_of(self.cell, root, overrides)
        return with_numerics(config, numerics_of(next(iter(self.configs.values())))) if self.configs else config

    @property
    def complete(self) -> bool:
        """Whether no run of the grid is missing."""
        return all(rate.seeds + rate.lost == self.seeds for rate in self.rates)

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
        RunInterrupted: If a signal stopped the runs, after they were saved; the same call continues.
        UserError: If runs failed, if no cell of the recipe can be tuned, or an option is invalid.

    Example:
        >>> tune("table2", TuneOptions(rates=[-1.0]))
        Traceback (most recent call last):
        contnorm.errors.UserError: rates -1.0: use learning rates above 0, such as 0.03,0.1.
    """
    recipe, options = find_recipe(recipe) if isinstance(recipe, str) else recipe, options or TuneOptions()
    check_seeds(options.seeds)
    if not options.rates or any(not 0 < rate < float("inf") for rate in options.rates):
        raise UserError(f"rates {','.join(map(str, options.rates))}: use learning rates above 0, such as 0.03,0.1.")
    execution, root = options.execution, data_root(options.data_root)
    if execution.lanes is None and (execution.devices or execution.on_gpu):  # a whole grid in parallel
        execution = replace(execution, lanes=len(options.rates) * options.seeds)
    execution = replace(execution, runs=options.runs, data_root=root)
    seeds, index = range(options.seeds), RecordIndex(Store(options.runs).load_all())
    grids = _grids(recipe, options, root, index)
    searches = [
        LineSearch(grid.configs, extensions=options.extensions, refine=options.refine, name="rates") for grid in grids
    ]
    while True:
        runs = list[Run]()
        for grid, search in zip(grids, searches, strict=True):
            for rate in search.propose():
                config = grid.configs.get(rate) or grid.config(rate, options, root)
                if (
                    execution.store.read_only
                    and rate not in grid.configs
                    and len(index.records(config, seeds)) < len(seeds)
                ):
                    continue  # an archive is not extended by runs that it lacks
                grid.configs[rate] = config
                runs += [Run(config, seed) for seed in seeds]
        if not runs:
            break
        run_missing(runs, execution, console)
        index = RecordIndex(Store(options.runs).load_all())
        for grid, search in zip(grids, searches, strict=True):
            grid.rates = _results(grid, index, seeds)
            for result in grid.rates:
                search.record(result.lr, result.mean if result.eligible else None)
        if not all(grid.complete for grid in grids):
            break
    return _write(recipe, grids, options)


def _grids(recipe: Recipe, options: TuneOptions, root: Path, index: RecordIndex) -> list[GridResult]:
    """One grid for each norm and strategy on a stream; logs what can't be tuned."""
    every = cells_of(recipe)
    cells = filter_cells(every, options.only) if every else []
    without = dict.fromkeys(cell.place["stream"] for cell in cells if not find_stream(cell.place["stream"]).validation)
    hint = "and is skipped; write learning rates for it under [[selected]] of a recipe of your own"
    problems = [f"tune {recipe.name}: {stream} has no validation tasks, {hint}." for stream in without]
    keys = [key for key in GRID_KEYS if any(cell.place[key] is not None for cell in every)]
    if all(cell.place["moments"] in UNTUNED_MOMENTS for cell in every):
        keys = [key for key in keys if key != "moments"]
    grids: dict[object, GridResult] = {}
    for cell in (cell for cell in cells if cell.place["stream"] not in without):
        where: Selector = {key: "own" if cell.place[key] is None else cell.place[key] for key in keys}
        grid = GridResult(cell, where, options.seeds, {})
        grid.configs = {rate: grid.config(rate, options, root) for rate in sorted(set(options.rates))}
        grids.setdefault((tuple(where.items()), tuple(grid.configs.values())), grid)
    seeds, configs = range(options.seeds), [config for grid in grids.values() for config in grid.configs.values()]
    if configs:
        typed = {} if options.precision is None else {"precision": options.precision}
        numerics = index.numerics(configs, seeds, typed)
        for grid in grids.values():
            grid.configs = {rate: with_numerics(config, numerics) for rate, config in grid.configs.items()}
    usable = []
    for grid in grids.values():
        recorded = all(len(index.records(config, seeds)) == options.seeds for config in grid.configs.values())
        if recorded or is_present(grid.cell.source, root):
            usable.append(grid)
        elif (message := missing_data_message(recipe, grid.cell.source, root)) not in problems:
            problems.append(message)
    if not usable:
        raise UserError(" ".join(problems) or f"tune {recipe.name}: it has no runs.")
    for line in problems:
        _log.warning(line)
    return usable


def _results(grid: GridResult, index: RecordIndex, seeds: range) -> list[RateResult]:
    results = []
    for rate, config in sorted(grid.configs.items()):
        records = index.records(config, seeds).values()
        accuracies = [record.score("acc") for record in records if record.status != DIVERGED]
        results.append(RateResult.of(rate, accuracies, len(records) - len(accuracies)))
    return results


def _write(recipe: Recipe, grids: Sequence[GridResult], options: TuneOptions) -> TuneResult:
    """Write the chosen rates over those of the same file, unless it is a smoke test."""
    rates = [
        SelectedRate(grid.where, best.lr, grid.configs[best.lr].train.precision, tuple(grid.rates))
        for grid in grids
        if (best := grid.best) is not None
    ]
    if not rates or options.max_steps is not None:
        return TuneResult(recipe, grids)
    path = options.out or selection_file(recipe, options.runs)
    old = read_selection(path, recipe.name) if path.is_file() else None
    if old is None and options.out is None:  # the one that `contnorm paper` would read
        old = selection_of(recipe, options.runs)
    unchanged = [one for one in (old.selected if old else ()) if all(one.where != new.where for new in rates)]
    selection = Selection(recipe.name, (*unchanged, *rates))
    write_atomically(path, selection_text(selection).encode())
    return TuneResult(recipe, grids, selection, path)
