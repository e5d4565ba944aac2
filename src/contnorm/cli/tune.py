"""The `tune` command: chooses the best learning rate, or another setting, of each norm on validation data.

With a recipe, it chooses a learning rate for each norm and strategy of a table.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench, paper
from contnorm.bench.config.sources import check_seeds
from contnorm.bench.grid import REFINEMENTS, Refine
from contnorm.cli.common import console
from contnorm.cli.examples import Example, examples
from contnorm.cli.options import Request, takes_settings
from contnorm.cli.sweep_tables import JsonFlag, PlotFile, ScoreName, show_result
from contnorm.cli.tables import print_text, safe_text, show_rows
from contnorm.errors import UserError, unknown
from contnorm.paper.selection import RATES, RateResult

if TYPE_CHECKING:
    from contnorm.paper.lr_search import GridResult, TuneOptions, TuneResult

__all__ = ["tune", "tune_recipe"]

_OF_RECIPES = {
    "stream.name": "stream",
    "strategy.name": "strategy",
    "norm.name": "norm",
    "train.lr": "lr",
    "train.precision": "precision",
    "train.max_steps": "max_steps",
}  # settings that can be given with a recipe


@examples(
    Example(
        "Choose the learning rate of BN and CN on held-out training samples.",
        "contnorm tune --stream permuted-mnist --norm bn,cn --runs tune-runs",
    ),
    Example(
        "Choose the memory size out of three, and try no others.",
        "contnorm tune --stream permuted-mnist --over memory.size --buffer 50,100,200 --extend 0 --refine none "
        "--runs tune-runs",
    ),
)
@takes_settings
def tune(
    request: Request,
    recipe: Annotated[
        str | None,
        typer.Argument(help="Recipe: table2, table8, table9, table10, table12, or a TOML file; none: tune --stream."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from 0.")] = 3,
    over: Annotated[str, typer.Option(help="Setting to tune: lr, or a numeric setting such as memory.size.")] = "lr",
    extend: Annotated[
        int | None, typer.Option(help="Most values to try beyond the grid, per search; default: 3, or 0 for a recipe.")
    ] = None,
    refine: Annotated[
        str | None,
        typer.Option(help="Refinement: between (the best two), around, or none; default: between, none for a recipe."),
    ] = None,
    score: ScoreName = None,
    plot: PlotFile = None,
    json_: JsonFlag = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File for the rates of a recipe; default: RUNS/selected/RECIPE.toml."),
    ] = None,
) -> None:
    """Choose the best learning rate (or another setting) of each norm, using only validation data."""
    check_seeds(seeds)
    if refine not in (None, "none", *REFINEMENTS):
        raise unknown("--refine", str(refine), [*REFINEMENTS, "none"])
    refinement: Refine | None = None if refine == "none" else "around" if refine == "around" else "between"
    if recipe is not None:
        used = None if refine is None else refinement
        with request.importing():
            options = _recipe_options(request, seeds, extend or 0, used, out)
        raise typer.Exit(tune_recipe(recipe, options, console))
    if not any(setting.key == "stream.name" for setting in request.typed):
        raise UserError("tune: give a recipe, such as table2, or --stream. See `contnorm ls streams`.")
    of_stream, settings = request.settings()
    arguments: dict[str, Any] = {"settings": settings, "seeds": seeds, "over": over, "score": score}
    with request.importing():
        stream = request.load_stream(of_stream)
        arguments |= {"extensions": 3 if extend is None else extend, "refine": refinement, **request.arguments()}
    raise typer.Exit(
        show_result(lambda shown: bench.tune(stream, progress=shown, **arguments), request, plot, json_, console)
    )


def _recipe_options(
    request: Request, seeds: int, extensions: int, refine: Refine | None, out: Path | None
) -> TuneOptions:
    """Return the options of a search of the learning rates of a recipe."""
    only, given = list[str](), dict[str, Any]()
    for setting in request.typed:
        name = _OF_RECIPES.get(setting.key)
        if name is None:
            raise UserError(f"tune: {setting.origin} can't be used with a recipe.")
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        if name in ("stream", "strategy", "norm"):
            only += [f"{name}={value}" for value in values]
        else:
            given[name] = values if name == "lr" else setting.value
    names = ("device", "lanes", "threads", "allow_missing", "devices", "memory_moments")
    execution = bench.RunOptions(**{name: request.execution[name] for name in names}, launcher=request.launcher)
    return paper.TuneOptions(
        seeds,
        only,
        given.get("lr", RATES),
        execution,
        given.get("max_steps"),
        given.get("precision"),
        request.execution["data_root"],
        request.runs,
        out,
        extensions=extensions,
        refine=refine,
    )


def tune_recipe(name: str, options: TuneOptions, console: Console) -> int:
    """Run the missing runs of all grids, print them and the chosen rates, and return the exit code."""
    try:
        result = paper.tune(name, options, console=console)
    except bench.RunInterrupted as stopped:
        return 128 + stopped.signal
    _show(name, result, options, console)
    return 0


def _show(name: str, result: TuneResult, options: TuneOptions, console: Console) -> None:
    console.print(safe_text(f"{result.recipe.name}: learning rates, chosen on the validation tasks"), style="bold")
    _show_grids(result.grids, options, console)
    if options.max_steps is not None:
        console.print(
            safe_text("A smoke test: the numbers are of the first steps only, so no learning rate is chosen.")
        )
        return
    for line in _footer(result.grids):
        print_text(line, console)
    if result.path is not None:
        count = sum(grid.best is not None for grid in result.grids)
        console.print(safe_text(f"{count} chosen, in {result.path}. {_how_to_use(name, options)}"), soft_wrap=True)


def _how_to_use(name: str, options: TuneOptions) -> str:
    flags = f" --runs {shlex.quote(str(options.runs))}" if options.runs != Path("runs") else ""
    flags += f" --selected {shlex.quote(str(options.out))}" if options.out else ""
    return f"Show the table with it: contnorm paper {shlex.quote(name)}{flags}"


def _show_grids(results: Sequence[GridResult], options: TuneOptions, console: Console) -> None:
    """Print one row per grid, with the chosen rate marked."""
    tried = sorted({rate.lr for result in results for rate in result.rates})
    heads = ["stream", "strategy", "norm", *(f"lr {lr:g}" for lr in tried), "tried", "chosen"]
    rows = []
    for result in results:
        best = result.best if options.max_steps is None else None
        texts = {rate.lr: _rate_text(rate, rate is best, options.seeds) for rate in result.rates}
        cells = [texts.get(lr, "") for lr in tried]  # extended searches have different rates
        rows.append([*result.names, *cells, str(len(texts)), f"{best.lr:g}" if best else "none yet"])
    show_rows(heads, rows, console, named=3)
    console.print()
    seeds = "one seed" if options.seeds == 1 else f"{options.seeds} seeds"
    precision = next(iter(results[0].configs.values())).train.precision
    console.print(
        safe_text(f"ACC on the validation tasks, over {seeds}, in {precision}; * is chosen: the highest mean.")
    )


def _rate_text(rate: RateResult, best: bool, seeds: int) -> str:
    if rate.lost:
        return f"{rate.lost} of {seeds} diverged"
    if not rate.seeds:
        return "-"
    spread = f" +- {rate.sd:.2f}" if rate.seeds > 1 else ""
    few = f" ({rate.seeds})" if rate.seeds < seeds else ""
    return f"{rate.mean:.2f}{spread}{few}{' *' if best else ''}"


def _footer(results: Sequence[GridResult]) -> Iterator[str]:
    """Notes below the table of grids."""
    if any(rate.lost for result in results for rate in result.rates):
        yield (
            "diverged: the loss is not finite. Such a learning rate is not chosen, and the run is not repeated; delete "
            "its record to repeat it."
        )
    for result in results:
        best, label = result.best, " ".join(result.names)
        if not result.complete:
            yield f"{label}: runs are missing, so no learning rate is chosen yet."
            continue
        if best is None:
            yield f"{label}: every learning rate has a diverged run, so none is chosen."
            continue
        ties = [rate for rate in result.rates if rate is not best and not rate.lost and rate.mean == best.mean]
        if ties:
            yield f"{label}: {', '.join(f'{rate.lr:g}' for rate in ties)} did as well; the smallest is chosen."
        if len(result.rates) > 1 and best in (result.rates[0], result.rates[-1]):
            yield f"{label}: {best.lr:g} is at the end of the grid; rates beyond it were not tried."
