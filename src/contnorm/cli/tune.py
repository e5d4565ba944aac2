"""The `tune` command: chooses the best learning rate, or another setting, of each norm on validation data.

With a recipe, it chooses a learning rate for each norm and strategy of a table.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench, paper
from contnorm.bench.grid import LEARNING_RATES
from contnorm.bench.rng import check_seeds
from contnorm.cli.common import console, print_lines, print_text, show_rows
from contnorm.cli.options import EXECUTION, load_stream, run_options, takes_options
from contnorm.cli.run import JsonFlag, PlotFile, ScoreName, show_result
from contnorm.errors import UserError
from contnorm.paper.selection import RateResult

if TYPE_CHECKING:
    from contnorm.paper.lr_search import GridResult, TuneOptions, TuneResult

# Settings that can be given with a recipe.
_OF_RECIPES = {
    "stream.name": "stream",
    "strategy.name": "strategy",
    "norm.name": "norm",
    "train.lr": "lr",
    "train.precision": "precision",
    "train.max_steps": "max_steps",
}


@takes_options(*EXECUTION, settings=True)
def tune(
    typed: dict[str, Any],
    execution: dict[str, Any],
    recipe: Annotated[str | None, typer.Argument(help="Recipe: table2, ..., or a TOML file; or use --stream.")] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from 0.")] = 3,
    over: Annotated[str, typer.Option(help="Setting to tune: lr, or a numeric setting such as memory.size.")] = "lr",
    extend: Annotated[
        int | None, typer.Option(help="Most values to try beyond the grid; default: 3, or 0 for a recipe.")
    ] = None,
    refine: Annotated[
        str | None, typer.Option(help="Refine: between (the best two), around, or none, as is the default of a recipe.")
    ] = None,
    score: ScoreName = None,
    plot: PlotFile = None,
    json_: JsonFlag = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File for a recipe's rates; default: RUNS/selected/RECIPE.toml.")
    ] = None,
) -> None:
    """Choose the best learning rate (or another setting) of each norm, using only validation data.

    Examples:
        # Choose the learning rate of BN and CN on held-out training samples.
        contnorm tune --stream permuted-mnist --norm bn,cn --runs tune-runs
        # Choose the memory size out of three, and try no others.
        contnorm tune --stream permuted-mnist --over memory.size --buffer 50,100,200 --extend 0 --refine none
    """
    check_seeds(seeds)
    refinement: Any = None if refine == "none" else refine
    if recipe is not None:
        given = _recipe_options(typed, execution, seeds)
        options = replace(given, out=out, extensions=extend or 0, refine=refinement)
        tune_recipe(recipe, options, console)
        return
    if "stream.name" not in typed:
        raise UserError("tune: give a recipe, such as table2, or --stream. See `contnorm ls streams`.")
    stream, arguments = load_stream(typed, execution)
    arguments |= {"seeds": seeds, "over": over, "score": score, "extensions": 3 if extend is None else extend}
    arguments |= {"refine": refinement if refine else "between"}
    show_result(lambda progress: bench.tune(stream, progress=progress, **arguments), plot, json_)


def _recipe_options(typed: Mapping[str, Any], execution: Mapping[str, Any], seeds: int) -> TuneOptions:
    """Return the options of a search of the learning rates of a recipe."""
    only, given = list[str](), dict[str, Any]()
    for key, value in typed.items():
        name = _OF_RECIPES.get(key)
        if name is None:
            raise UserError(f"tune: {key} can't be set with a recipe. Use {', '.join(_OF_RECIPES)}.")
        values = value if isinstance(value, list) else [value]
        if name in ("stream", "strategy", "norm"):
            only += [f"{name}={value}" for value in values]
        else:
            given[name] = values if name == "lr" else value
    return paper.TuneOptions(
        seeds,
        only,
        given.get("lr", LEARNING_RATES),
        run_options(execution),
        given.get("max_steps"),
        given.get("precision"),
        execution["data_root"],
        execution["runs"],
    )


def tune_recipe(name: str, options: TuneOptions, console: Console) -> None:
    """Run the missing runs of all grids, and print them and the chosen rates."""
    _show(name, paper.tune(name, options, console=console), options, console)


def _show(name: str, result: TuneResult, options: TuneOptions, console: Console) -> None:
    """Print one row per grid, with the chosen rate marked, and the command that uses the rates."""
    print_text(f"{result.recipe.name}: learning rates, chosen on the validation tasks", console, "bold")
    tried = sorted({rate.lr for grid in result.grids for rate in grid.rates})
    rows = []
    for grid in result.grids:
        best = grid.best if options.max_steps is None else None
        texts = {rate.lr: _rate_text(rate, rate is best, options.seeds) for rate in grid.rates}
        cells = [texts.get(lr, "") for lr in tried]  # extended searches have different rates
        rows.append([*grid.names, *cells, str(len(texts)), f"{best.lr:g}" if best else "none yet"])
    heads = ["stream", "strategy", "norm", *(f"lr {lr:g}" for lr in tried), "tried", "chosen"]
    show_rows(heads, rows, console, named=3)
    precision = next(iter(result.grids[0].configs.values())).train.precision
    print_text(
        f"ACC over {options.seeds} seeds, in {precision}; * is chosen: the highest mean without a diverged run.",
        console,
    )
    if options.max_steps is not None:
        print_text("A smoke test: the numbers are of the first steps only, so no learning rate is chosen.", console)
        return
    for grid in result.grids:
        if note := _note(grid):
            print_text(f"{' '.join(grid.names)}: {note}", console)
    if result.path is not None:
        flags = f" --runs {shlex.quote(str(options.runs))}" if options.runs != Path("runs") else ""
        flags += f" --selected {shlex.quote(str(options.out))}" if options.out else ""
        command = f"contnorm paper {shlex.quote(name)}{flags}"
        print_lines([f"The rates are in {result.path}. Show the table with them: {command}"], console)


def _rate_text(rate: RateResult, best: bool, seeds: int) -> str:
    if rate.lost:
        return f"{rate.lost} of {seeds} diverged"
    if not rate.seeds:
        return "-"
    spread = f" +- {rate.sd:.2f}" if rate.seeds > 1 else ""
    few = f" ({rate.seeds})" if rate.seeds < seeds else ""
    return f"{rate.mean:.2f}{spread}{few}{' *' if best else ''}"


def _note(grid: GridResult) -> str:
    """Remark on the choice of a grid; empty for none."""
    best = grid.best
    if not grid.complete:
        return "runs are missing, so no learning rate is chosen yet."
    if best is None:
        return "every learning rate has a diverged run, so none is chosen."
    ties = [rate for rate in grid.rates if rate is not best and not rate.lost and rate.mean == best.mean]
    if ties:
        return f"{', '.join(f'{rate.lr:g}' for rate in ties)} did as well; the smallest is chosen."
    if len(grid.rates) > 1 and best in (grid.rates[0], grid.rates[-1]):
        return f"{best.lr:g} is at the end of the grid; rates beyond it were not tried."
    return ""
