"""The `tune` command: chooses a learning rate for each norm and strategy of a table, on its validation tasks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from contnorm import bench, paper
from contnorm.bench.user_code import check_files
from contnorm.cli.common import (
    DEVICE_HELP,
    PRECISION_HELP,
    THREADS_HELP,
    AllowMissing,
    DataRoot,
    RunsFolder,
    TrustCode,
    console,
    importing_torch,
)
from contnorm.cli.tables import print_text, safe_text, show_rows
from contnorm.errors import UserError
from contnorm.paper.selection import RATES, RateResult

if TYPE_CHECKING:
    from contnorm.paper import GridResult, TuneOptions, TuneResult

__all__ = ["tune", "tune_recipe"]


def tune(
    recipe: Annotated[str, typer.Argument(help="Recipe: table2, table8, table9, table10, table12, or a TOML file.")],
    stream: Annotated[
        str | None, typer.Option(help="Streams to tune, comma-separated, such as split-cifar100; default: all.")
    ] = None,
    strategies: Annotated[
        str | None, typer.Option(help="Strategies to tune, comma-separated, such as er,derpp; default: all.")
    ] = None,
    norms: Annotated[
        str | None, typer.Option(help="Norms to tune, comma-separated, such as bn,cn; default: all.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds, counted from 0.")] = 3,
    rates: Annotated[
        str | None, typer.Option(help="Learning rates to try, comma-separated; default: 0.003,0.01,0.03,0.1,0.3.")
    ] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    lanes: Annotated[
        int | None,
        typer.Option(help="Number of parallel runs. Default: a norm's whole grid on a GPU, one per core on a CPU."),
    ] = None,
    threads: Annotated[int, typer.Option(help=THREADS_HELP)] = 1,
    precision: Annotated[str | None, typer.Option(help=PRECISION_HELP)] = None,
    max_steps: Annotated[
        int | None, typer.Option(help="Stop after N steps (smoke test; no learning rate is chosen).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="File to write the learning rates to; default: RUNS/selected/RECIPE.toml."),
    ] = None,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    trust_code: TrustCode = None,
) -> None:
    """Choose a learning rate for each norm and strategy of a table, using only the validation tasks."""
    typed = {"stream": stream, "strategy": strategies, "norm": norms}
    only = [f"{key}={value.strip()}" for key, values in typed.items() if values for value in values.split(",")]
    grid = _numbers(rates, "--rates") if rates else RATES
    with importing_torch():
        options = bench.RunOptions(device, lanes, threads, allow_missing=allow_missing)
    trusted = check_files(trust_code or [])
    request = paper.TuneOptions(seeds, only, grid, options, max_steps, precision, data_root, runs, out, trusted)
    raise typer.Exit(tune_recipe(recipe, request, console))


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
    heads = ["stream", "strategy", "norm", *(f"lr {rate:g}" for rate in sorted(set(options.rates))), "chosen"]
    rows = []
    for result in results:
        best = result.best if options.max_steps is None else None
        cells = [_rate_text(rate, rate is best, options.seeds) for rate in result.rates]
        rows.append([*result.grid.names, *cells, f"{best.lr:g}" if best else "none yet"])
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
