"""The `run` and `resume` commands: runs with progress bars; Ctrl-C saves a checkpoint and stops.

Settings with several values are a sweep: all combinations are run, and the best setting of each norm is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from contnorm import bench
from contnorm.bench.config.sources import check_seed, check_seeds
from contnorm.cli.common import (
    AllowMissing,
    DataRoot,
    Lanes,
    Log,
    LogDir,
    LogEvery,
    console,
    importing_torch,
)
from contnorm.cli.examples import Example, examples
from contnorm.cli.options import (
    Address,
    Devices,
    LauncherName,
    LauncherSettings,
    Request,
    find_launcher,
    takes_settings,
)
from contnorm.cli.show import show_scores
from contnorm.cli.sweep_tables import JsonFlag, PlotFile, ScoreName, show_result
from contnorm.errors import UserError

__all__ = ["resume", "run"]

_AXIS_OF_FLAG = {"groups": "norm.groups", "buffer": "memory.size", "batch": "batch_size"}


@examples(
    Example(
        "Train with BN over five tasks of digits, with three seeds, and save the weights.",
        "contnorm run --norm bn --seeds 3 --keep-weights",
    ),
    Example(
        "The same with CN. Runs that are recorded already are not repeated.",
        "contnorm run --norm cn --seeds 3 --keep-weights",
    ),
    Example(
        "Try three learning rates for BN and CN, with two seeds each.",
        "contnorm run --norm bn,cn --lr 0.003,0.01,0.03 --seeds 2 --runs sweep-runs",
    ),
    Example(
        "Choose a memory size on held-out training samples.",
        "contnorm run --norm cn --buffer 50,200 --validation --seeds 2 --runs sweep-runs",
    ),
)
@takes_settings
def run(
    request: Request,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds, counted from 0. Default: 1; 3 if a setting has several values.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Run this single seed.")] = None,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="Save the final weights of each run next to its record, for `diagnose`."),
    ] = False,
    validation: Annotated[
        bool,
        typer.Option(
            "--validation", help="Use validation tasks, or held-out training samples, instead of the test samples."
        ),
    ] = False,
    score: ScoreName = None,
    by: Annotated[
        str, typer.Option(help="Choose one setting for each value of these settings, comma-separated.")
    ] = "norm",
    plot: PlotFile = None,
    json_: JsonFlag = False,
) -> None:
    """Train once over a stream, or once with each combination of settings, as in --norm bn,cn --lr 0.01,0.03."""
    if seed is not None and seeds is not None:
        raise UserError(f"--seed {seed} and --seeds {seeds}: use one of them. --seeds is a number of seeds, from 0 on.")
    if seeds is not None:
        check_seeds(seeds)
    if seed is not None:
        check_seed(seed)
    is_sweep = request.is_sweep or validation or plot is not None or json_
    chosen: Any = [seed] if seed is not None else seeds or (3 if is_sweep else 1)
    of_stream, settings = request.settings()
    arguments: dict[str, Any] = {"settings": settings, "seeds": chosen, "keep_weights": keep_weights}
    with request.importing():
        stream = request.load_stream(of_stream)
        arguments |= request.arguments()
    if not is_sweep:
        raise typer.Exit(_run(stream, arguments, console))
    names = [_AXIS_OF_FLAG.get(name.strip(), name.strip()) for name in by.split(",")]
    arguments |= {"validation": validation, "score": score, "by": names}
    raise typer.Exit(
        show_result(lambda shown: bench.sweep(stream, progress=shown, **arguments), request, plot, json_, console)
    )


def _run(stream: bench.Stream, arguments: dict[str, Any], console: Console) -> int:
    """Run the seeds that have no record, show the scores of all, and return the exit code."""
    try:
        result = bench.run(stream, progress=console, **arguments)
    except bench.RunInterrupted as stopped:
        return 128 + stopped.signal
    show_scores(result.records, console)
    if result.diverged:
        raise UserError(" ".join(result.diverged.values()))
    return 0


@examples(
    Example("Finish all stopped runs in the folder runs.", "contnorm resume"),
    Example("Finish the stopped runs of another folder, one at a time.", "contnorm resume --runs sweep-runs --lanes 1"),
)
def resume(
    folder: Annotated[Path | None, typer.Argument(help="The same as --runs.", show_default=False)] = None,
    runs: Annotated[
        Path, typer.Option("--runs", help="Folder of runs, of one experiment in it, or of one run.")
    ] = Path("runs"),
    device: Annotated[
        str | None, typer.Option(help="Device to compute on: cpu, cuda, cuda:1, ... Default: as each run started.")
    ] = None,
    lanes: Lanes = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads per run. Default: as each run started.")] = None,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    log: Log = None,
    log_every: LogEvery = 50,
    log_dir: LogDir = None,
    devices: Devices = None,
    launcher: LauncherName = None,
    address: Address = None,
    launcher_set: LauncherSettings = None,
) -> None:
    """Resume the interrupted runs of a folder, bit-exactly."""
    with importing_torch(device, in_workers=bool(devices or launcher)):
        options: dict[str, Any] = {"device": device, "lanes": lanes, "threads": threads, "devices": devices}
    options |= {"launcher": find_launcher(launcher, address, launcher_set), "allow_missing": allow_missing or None}
    options |= {"log": log, "log_every": log_every, "log_dir": log_dir}
    try:
        records = bench.resume(folder or runs, root=data_root, console=console, **options)
    except bench.RunInterrupted as stopped:
        raise typer.Exit(128 + stopped.signal) from None
    show_scores(records, console)
