"""The `tune` command: chooses the best learning rate, or another setting, of each norm on validation data.

With a recipe, it chooses a learning rate for each norm and strategy of a table.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench, paper
from contnorm.bench.config.sources import check_seeds
from contnorm.bench.grid import REFINEMENTS, Refine
from contnorm.cli.common import (
    DEVICE_HELP,
    PRECISION_HELP,
    THREADS_HELP,
    AllowMissing,
    DataRoot,
    Log,
    LogDir,
    LogEvery,
    RunsFolder,
    console,
    importing_torch,
    is_explicit,
)
from contnorm.cli.examples import Example, examples
from contnorm.cli.launcher_options import Address, Devices, LauncherName, LauncherSettings, find_launcher
from contnorm.cli.sweep import GridFlags, GridOption, JsonFlag, PlotFile, ScoreName, SetOption, run_grid
from contnorm.cli.tables import print_text, safe_text, show_rows
from contnorm.errors import UserError, unknown
from contnorm.paper.selection import RATES, RateResult

if TYPE_CHECKING:
    from contnorm.paper import GridResult, TuneOptions, TuneResult

__all__ = ["tune", "tune_recipe"]


@examples(
    Example(
        "Choose the learning rate of BN and CN on held-out training samples.",
        "contnorm tune --stream permuted-mnist --norm bn,cn --runs tune-runs",
    ),
    Example(
        "Choose the memory size out of three, and try no others.",
        "contnorm tune --stream permuted-mnist --over memory.size --grid memory.size=50,100,200 --extend 0 "
        "--refine none --runs tune-runs",
    ),
)
def tune(
    context: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(help="Recipe: table2, table8, table9, table10, table12, or a TOML file; none: tune --stream."),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(help="Stream to tune; of a recipe, streams, comma-separated; default: all of the recipe."),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategy", "--strategies", help="Strategies, comma-separated; default: er, or all of the recipe."
        ),
    ] = None,
    norms: Annotated[
        str | None,
        typer.Option("--norm", "--norms", help="Norms, comma-separated, as bn,cn; default: cn, or all of the recipe."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Networks, comma-separated, each a name or file.py:make; default: that of the stream."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from 0.")] = 3,
    rates: Annotated[
        str | None,
        typer.Option("--lr", "--rates", help="Learning rates, comma-separated; default: 0.003,0.01,0.03,0.1,0.3."),
    ] = None,
    over: Annotated[
        str, typer.Option(help="Setting to tune: lr, or a numeric setting of --grid, such as memory.size.")
    ] = "lr",
    grid: GridOption = None,
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
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    lanes: Annotated[
        int | None,
        typer.Option(
            help="Number of parallel runs. Default: 8 on a GPU (recipe: a norm's grid), one per core on a CPU."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help=THREADS_HELP)] = 1,
    precision: Annotated[str | None, typer.Option(help=PRECISION_HELP)] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after N steps (smoke test; no learning rate is chosen).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File for the rates of a recipe; default: RUNS/selected/RECIPE.toml."),
    ] = None,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    log: Log = None,
    log_every: LogEvery = 50,
    log_dir: LogDir = None,
    set_: SetOption = None,
    devices: Devices = None,
    launcher: LauncherName = None,
    address: Address = None,
    launcher_set: LauncherSettings = None,
) -> None:
    """Choose the best learning rate (or another setting) of each norm, using only validation data."""
    check_seeds(seeds)
    refinement = _refinement(refine)
    with importing_torch(device, in_workers=bool(devices or launcher)):
        where = find_launcher(launcher, address, launcher_set)
        options = bench.RunOptions(device, lanes, threads, allow_missing=allow_missing, launcher=where, devices=devices)
    if recipe is not None:
        _refuse(context, STREAM_ONLY, f"can't be used with the recipe {recipe}")
        typed = {"stream": stream, "strategy": strategies, "norm": norms}
        only = [f"{key}={value.strip()}" for key, values in typed.items() if values for value in values.split(",")]
        request = paper.TuneOptions(
            seeds,
            only,
            _numbers(rates, "--rates") if rates else RATES,
            options,
            max_steps,
            precision,
            data_root,
            runs,
            out,
            extensions=0 if extend is None else extend,
            refine=None if refine is None else refinement,
        )
        raise typer.Exit(tune_recipe(recipe, request, console))
    _refuse(context, RECIPE_ONLY, "needs a recipe, such as `contnorm tune table2`")
    if stream is None:
        raise UserError("tune: give a recipe, such as table2, or --stream. See `contnorm ls streams`.")
    lists = {"strategy": strategies, "norm": norms, "model": model, "lr": rates}
    flags = GridFlags(lists, grid or [], {"train.precision": precision, "train.max_steps": max_steps}, set_ or [])

    def search(stream_: bench.Stream, settings: dict[str, Any], progress: Console) -> bench.SweepResult:
        return bench.tune(
            stream_,
            over=over,
            settings=settings,
            seeds=seeds,
            extensions=3 if extend is None else extend,
            refine=refinement,
            score=score,
            runs=runs,
            progress=progress,
            device=device,
            lanes=lanes,
            threads=threads,
            log=log,
            log_every=log_every,
            log_dir=log_dir,
            launcher=where,
            devices=devices,
        )

    raise typer.Exit(run_grid(search, stream, flags, options, data_root, plot, json_, console, runs))


STREAM_ONLY = {
    "model": "--model",
    "over": "--over",
    "grid": "--grid",
    "score": "--score",
    "plot": "--plot",
    "json_": "--json",
    "set_": "--set",
    "log": "--log",
    "log_every": "--log-every",
    "log_dir": "--log-dir",
}
RECIPE_ONLY = {"out": "--out"}


def _refuse(context: typer.Context, parameters: Mapping[str, str], reason: str) -> None:
    for name, flag in parameters.items():
        if is_explicit(context, name):
            raise UserError(f"tune: {flag} {reason}.")


def _refinement(text: str | None) -> Refine | None:
    """Parse --refine; the default is to refine between the best two values."""
    if text == "none":
        return None
    for known in REFINEMENTS:
        if text in (None, known):
            return known
    raise unknown("--refine", str(text), [*REFINEMENTS, "none"])


def _numbers(text: str, flag: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} {text!r}: use numbers with commas between, such as 0.03,0.1.") from None


def tune_recipe(name: str, options: TuneOptions, console: Console) -> int:
    """Run the missing runs of all grids, print them and the chosen rates, and return the exit code."""
    try:
        result = paper.tune(name, options, console=console)
    except paper.TableInterrupted as stopped:
        _show(name, stopped.result, options, console)
        return 128 + stopped.signal
    except paper.TableError as error:
        _show(name, error.result, options, console)
        raise
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
        rows.append([*result.grid.names, *cells, str(len(texts)), f"{best.lr:g}" if best else "none yet"])
    show_rows(heads, rows, console, named=3)
    console.print()
    seeds = "one seed" if options.seeds == 1 else f"{options.seeds} seeds"
    precision = next(iter(results[0].grid.configs.values())).train.precision
    console.print(
        safe_text(f"ACC on the validation tasks, over {seeds}, in {precision}; * is chosen: the highest mean.")
    )


def _rate_text(rate: RateResult, best: bool, seeds: int) -> str:
    if rate.diverged:
        return f"{rate.diverged} of {seeds} diverged"
    if not rate.seeds:
        return "-"
    spread = f" +- {rate.sd:.2f}" if rate.seeds > 1 else ""
    few = f" ({rate.seeds})" if rate.seeds < seeds else ""
    return f"{rate.mean:.2f}{spread}{few}{' *' if best else ''}"


def _footer(results: Sequence[GridResult]) -> Iterator[str]:
    """Notes below the table of grids."""
    if any(rate.diverged for result in results for rate in result.rates):
        yield (
            "diverged: the loss is not finite. Such a learning rate is not chosen, and the run is not repeated; delete "
            "its record to repeat it."
        )
    for result in results:
        best, label = result.best, " ".join(result.grid.names)
        if not result.complete:
            yield f"{label}: runs are missing, so no learning rate is chosen yet."
            continue
        if best is None:
            yield f"{label}: every learning rate has a diverged run, so none is chosen."
            continue
        ties = [rate for rate in result.rates if rate is not best and not rate.diverged and rate.mean == best.mean]
        if ties:
            yield f"{label}: {', '.join(f'{rate.lr:g}' for rate in ties)} did as well; the smallest is chosen."
        if len(result.rates) > 1 and best in (result.rates[0], result.rates[-1]):
            yield f"{label}: {best.lr:g} is at the end of the grid; rates beyond it were not tried."
