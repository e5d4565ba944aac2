"""The `tune` command: chooses a learning rate for each norm and strategy of a recipe on the validation tasks.

Each learning rate is an ordinary run with an ordinary record. On a GPU all runs of one norm and strategy share a CUDA
graph. The tasks that a table reports on are never used.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from contnorm.bench.api.execution import RunOptions, run_environment
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import check_seeds
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.records import Store, write_output
from contnorm.bench.streams.tasks import STREAMS, find_stream
from contnorm.bench.trust import only_trusted
from contnorm.cli.paper import config_of, is_found, selection_file, selection_of, what_to_put
from contnorm.cli.paper_records import Kept, hows_of
from contnorm.cli.tables import safe_text, say, say_on_stderr, show_rows
from contnorm.errors import UserError, usable
from contnorm.paper.cells import Cell, cells_of, source_of
from contnorm.paper.filters import chosen
from contnorm.paper.precisions import computed
from contnorm.paper.recipe import Recipe
from contnorm.paper.recipe_file import find_recipe
from contnorm.paper.selection import (
    RATES,
    Chosen,
    Selection,
    Tried,
    merged,
    read_selection,
    selection_text,
    winner,
)

__all__ = ["RATES", "Wanted", "tune_recipe"]

GRID_KEYS = ("stream", "strategy", "norm", "groups", "momentum", "schedule", "layers", "buffer")
TUNABLE = "`contnorm tune` takes table2, table8, table9, table10, table12, and recipes of your own"


@dataclass(frozen=True)
class Wanted:
    """Options of the `tune` command.

    Attributes:
        only: Filters for cells, in the form of ``--only`` of `contnorm paper`.
        rates: Learning rates to try.
        out: File to write; None for the one that `contnorm paper` reads by default.
        trusted: Python files that may be executed if the recipe names them.
    """

    seeds: int = 3
    only: Sequence[str] = ()
    rates: Sequence[float] = RATES
    hands: RunOptions = field(default_factory=RunOptions)
    max_steps: int | None = None
    precision: str | None = None
    data_root: Path | None = None
    runs: Path = Path("runs")
    out: Path | None = None
    trusted: Sequence[Path] = ()


@dataclass(frozen=True)
class _Grid:
    """Runs among which one learning rate is chosen, and the cells that it applies to."""

    cell: Cell
    where: dict[str, object]
    configs: dict[float, RunConfig]

    def jobs(self, seeds: int) -> list[Job]:
        return [Job(config, seed) for config in self.configs.values() for seed in range(seeds)]


def tune_recipe(name: str, wanted: Wanted, console: Console) -> int:
    """Run the missing runs of all grids, show the grids, write the chosen rates, and return the exit code."""
    with only_trusted(wanted.trusted):
        return _tune_recipe(name, wanted, console)


def _tune_recipe(name: str, wanted: Wanted, console: Console) -> int:
    recipe = find_recipe(name)
    _check(wanted)
    place = _place(wanted)
    grids = _grids(recipe, wanted, place)
    console.print(safe_text(f"{recipe.name}: learning rates, chosen on the validation tasks"), style="bold")
    jobs = [job for grid in grids for job in grid.jobs(wanted.seeds)]
    _refuse_test_tasks(jobs)
    store = Store(place.runs)
    code, failed = 0, ""
    try:
        code = recorded(jobs, place, console)
    except UserError as error:  # the results of the other runs are still shown
        failed = str(error)
    _show_and_write(name, recipe, grids, store, wanted, console)
    if failed:
        raise UserError(failed)
    return code


def _check(wanted: Wanted) -> None:
    check_seeds(wanted.seeds)
    if not wanted.rates or any(not 0 < rate < float("inf") for rate in wanted.rates):
        raise UserError(f"--rates {','.join(map(str, wanted.rates))}: use learning rates above 0, such as 0.03,0.1.")


def _place(wanted: Wanted) -> RunEnvironment:
    """Environment of the runs; on a GPU a whole grid runs in parallel unless --lanes is typed."""
    options = wanted.hands
    if options.lanes is None and options.device == "cuda":
        options = replace(options, lanes=len(wanted.rates) * wanted.seeds)
    return run_environment(wanted.runs, options, wanted.data_root)


def _grids(recipe: Recipe, wanted: Wanted, place: RunEnvironment) -> list[_Grid]:
    """One grid for each norm and strategy on a stream; prints what can't be tuned."""
    if not cells_of(recipe):
        raise UserError(f"tune {recipe.name}: it has no runs. {TUNABLE}.")
    cells = _tunable(recipe, chosen(cells_of(recipe), wanted.only))
    keys = [key for key in GRID_KEYS if any(cell.place[key] is not None for cell in cells_of(recipe))]
    records = Kept(Store(place.runs), range(wanted.seeds), hows_of({"train": {"precision": wanted.precision}}))
    grids: dict[tuple[RunConfig, ...], _Grid] = {}
    for cell in cells:
        configs = {rate: _on_validation(cell, rate, wanted, place.data_root) for rate in sorted(set(wanted.rates))}
        where = {key: "own" if cell.place[key] is None else cell.place[key] for key in keys}
        configs = _as_begun(configs, records)
        grids.setdefault(tuple(configs.values()), _Grid(cell, where, configs))
    return _with_data(recipe, list(grids.values()), records, place.data_root)


def _as_begun(configs: dict[float, RunConfig], records: Kept) -> dict[float, RunConfig]:
    """The grid in the precision with most records. All its runs share one precision, since they are compared."""
    candidates = [{rate: computed(config, how) for rate, config in configs.items()} for how in records.hows]
    most = max(candidates, key=lambda candidate: sum(map(records.count, candidate.values())))
    return most if any(map(records.count, most.values())) else configs


def _with_data(recipe: Recipe, grids: list[_Grid], records: Kept, root: Path) -> list[_Grid]:
    """Grids whose data is present or that are fully recorded; prints what the others need."""
    whole = {id(grid) for grid in grids if all(records.count(c) == len(records.seeds) for c in grid.configs.values())}
    absent = {source for grid in grids if id(grid) not in whole and not is_found(source := source_of(grid.cell), root)}
    messages = [what_to_put(recipe, source, root) for source in sorted(absent)]
    here = [grid for grid in grids if id(grid) in whole or source_of(grid.cell) not in absent]
    if not here:
        raise UserError(" ".join(messages))
    for line in messages:
        say_on_stderr(line)
    return here


def _tunable(recipe: Recipe, cells: Sequence[Cell]) -> list[Cell]:
    """Cells whose stream has validation tasks."""
    without = dict.fromkeys(cell.place["stream"] for cell in cells if not find_stream(cell.place["stream"]).validation)
    tunable = [cell for cell in cells if cell.place["stream"] not in without]
    if not tunable:
        able = " and ".join(sorted(spec.name for spec in STREAMS.values() if spec.validation))
        raise UserError(
            f"tune {recipe.name}: {' and '.join(without)} {'set' if len(without) > 1 else 'sets'} no validation tasks "
            f"apart to choose by; {able} do. {TUNABLE} with those streams; for others, write learning rates by hand "
            f"under [[selected]] of a recipe of your own."
        )
    for stream in without:
        say_on_stderr(f"tune {recipe.name}: {stream} sets no validation tasks apart to choose by, and is left out.")
    return tunable


def _on_validation(cell: Cell, rate: float, wanted: Wanted, root: Path) -> RunConfig:
    """Configuration of a cell's run on all validation tasks; all runs are evaluated in the same way."""
    train = {"lr": rate, "max_steps": wanted.max_steps, "precision": wanted.precision}
    overrides = {
        "stream": {"part": "validate", "tasks": None},
        "train": {key: value for key, value in train.items() if value is not None},
        "evaluate": {"moments": "running", "drift": False},
    }
    return config_of(cell, root, overrides)


def _refuse_test_tasks(jobs: Sequence[Job]) -> None:
    """Guard: no learning rate is chosen on tasks that a table reports on."""
    for job in jobs:
        stream = job.config.stream
        if stream.part != "validate" or not find_stream(stream.name).validation:
            raise RuntimeError(f"tune: a run on stream.part={stream.part} of {stream.name}, not on validation tasks")


def _show_and_write(
    name: str, recipe: Recipe, grids: Sequence[_Grid], store: Store, wanted: Wanted, console: Console
) -> None:
    results = [(grid, _tried(grid, wanted.seeds, store)) for grid in grids]
    _show(results, wanted, console)
    picks = [_chosen(grid, tried) for grid, tried in results if _complete(tried, wanted.seeds)]
    selection = Selection(recipe.name, tuple(pick for pick in picks if pick is not None))
    if wanted.max_steps is not None:
        console.print(safe_text("A try: these numbers are of the first steps alone, so nothing is chosen by them."))
        return
    for line in _footer(results, wanted.seeds):
        say(line, console)
    if selection.chosen:
        path = wanted.out or selection_file(recipe, wanted.runs)
        with usable(path, "it can't be written", "Say with --out where else."):
            write_output(path, selection_text(_over_old(selection, path, recipe, wanted)).encode())
        console.print(
            safe_text(f"{len(selection.chosen)} chosen, in {path}. {_how_to_use(name, wanted)}"), soft_wrap=True
        )


def _over_old(selection: Selection, path: Path, recipe: Recipe, wanted: Wanted) -> Selection:
    """Merge a new selection over the previous one: that of the same file, or the one `contnorm paper` would read."""
    old = read_selection(path, recipe.name) if path.is_file() else None
    if old is None and wanted.out is None:
        old = selection_of(recipe, wanted.runs)
    return merged(old, selection) if old is not None else selection


def _how_to_use(name: str, wanted: Wanted) -> str:
    options = f" --runs {shlex.quote(str(wanted.runs))}" if wanted.runs != Wanted.runs else ""
    options += f" --selected {shlex.quote(str(wanted.out))}" if wanted.out else ""
    return f"Show the table with it: contnorm paper {shlex.quote(name)}{options}"


def _tried(grid: _Grid, seeds: int, store: Store) -> list[Tried]:
    results = []
    for rate, config in grid.configs.items():
        accuracies = [store.load(store.path(config, s)).score("acc") for s in range(seeds) if store.has(config, s)]
        diverged = sum(store.lost(config, s) for s in range(seeds))
        results.append(Tried.of(rate, accuracies, diverged))
    return results


def _complete(tried: Sequence[Tried], seeds: int) -> bool:
    return all(one.seeds + one.lost == seeds for one in tried)


def _chosen(grid: _Grid, tried: Sequence[Tried]) -> Chosen | None:
    best = winner(tried)
    if best is None:
        return None
    return Chosen(grid.where, best.lr, grid.configs[best.lr].train.precision, tuple(tried))


def _show(results: Sequence[tuple[_Grid, list[Tried]]], wanted: Wanted, console: Console) -> None:
    """Print one row per grid, with the chosen rate marked."""
    rates = sorted(set(wanted.rates))
    heads = ["stream", "strategy", "norm", *(f"lr {rate:g}" for rate in rates), "chosen"]
    rows = []
    for grid, tried in results:
        best = winner(tried) if _complete(tried, wanted.seeds) and wanted.max_steps is None else None
        cells = [_cell(one, one is best, wanted.seeds) for one in tried]
        rows.append([*_named(grid), *cells, f"{best.lr:g}" if best else "none yet"])
    show_rows(heads, rows, console, named=3)
    console.print()
    seeds = "one seed" if wanted.seeds == 1 else f"{wanted.seeds} seeds"
    console.print(safe_text(f"ACC on the validation tasks, over {seeds}; * is chosen: the highest mean."))


def _named(grid: _Grid) -> tuple[str, str, str]:
    place = grid.cell.place
    buffer = f" buffer {place['buffer']}" if place["buffer"] is not None else ""
    return place["stream"], f"{place['strategy']}{buffer}", grid.cell.norm.replace("*", "")


def _cell(tried: Tried, best: bool, seeds: int) -> str:
    if tried.lost:
        return f"lost {tried.lost} of {seeds}"
    if not tried.seeds:
        return "-"
    spread = f" +- {tried.sd:.2f}" if tried.seeds > 1 else ""
    few = f" ({tried.seeds})" if tried.seeds < seeds else ""
    return f"{tried.mean:.2f}{spread}{few}{' *' if best else ''}"


def _footer(results: Sequence[tuple[_Grid, list[Tried]]], seeds: int) -> Iterator[str]:
    """Notes below the table of grids."""
    if any(one.lost for _, tried in results for one in tried):
        yield (
            "lost: the loss was no longer finite, and such a learning rate is not chosen. It is not run again; its "
            "note is <seed>.lost.json among the runs."
        )
    for grid, tried in results:
        best, what = winner(tried), " ".join(_named(grid))
        if not _complete(tried, seeds):
            yield f"{what}: not all of its runs are there, so nothing is chosen yet."
            continue
        if best is None:
            yield f"{what}: every learning rate lost a run, so none is chosen."
            continue
        ties = [one for one in tried if one is not best and not one.lost and one.mean == best.mean]
        if ties:
            yield f"{what}: {', '.join(f'{one.lr:g}' for one in ties)} did as well; the smallest is chosen."
        if len(tried) > 1 and best in (tried[0], tried[-1]):
            yield f"{what}: {best.lr:g} lies at the end of the grid; what lies beyond is not tried."
