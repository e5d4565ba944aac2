"""The `run` and `resume` commands: runs with progress bars; Ctrl-C saves a checkpoint and stops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from contnorm import bench
from contnorm.bench.config.schema import flatten_settings
from contnorm.bench.config.sources import (
    Setting,
    check_seed,
    check_seeds,
    collect_settings,
    parse_int_or_text,
)
from contnorm.cli.common import (
    DEVICE_HELP,
    MAX_STEPS_HELP,
    PRECISION_HELP,
    THREADS_HELP,
    AllowMissing,
    DataRoot,
    Lanes,
    Log,
    LogDir,
    LogEvery,
    MemoryMoments,
    RunsFolder,
    console,
    importing_torch,
    is_explicit,
)
from contnorm.cli.examples import Example, examples
from contnorm.cli.launcher_options import Address, Devices, LauncherName, LauncherSettings, find_launcher
from contnorm.cli.show import show_scores
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench import RunOptions

__all__ = ["resume", "resume_all", "run", "run_seeds"]

# Flags whose names differ from those of their settings.
_FLAG_NAMES = {
    "stream.name": "--stream",
    "strategy.name": "--strategy",
    "norm.name": "--norm",
    "model.name": "--model",
    "memory.kind": "--memory",
    "memory.size": "--buffer",
    "evaluate.moments": "--eval-moments",
}


@examples(
    Example(
        "Train with BN over five tasks of digits, with three seeds, and save the weights.",
        "contnorm run --norm bn --seeds 3 --keep-weights",
    ),
    Example(
        "The same with CN. Runs that are recorded already are not repeated.",
        "contnorm run --norm cn --seeds 3 --keep-weights",
    ),
)
def run(
    context: typer.Context,
    stream: Annotated[
        str, typer.Option(help="Stream of tasks to learn; see `contnorm ls streams`.")
    ] = "permuted-mnist",
    strategy: Annotated[str, typer.Option(help="Learning method: er, derpp, single, ... or file.py:Class.")] = "er",
    memory: Annotated[
        str | None, typer.Option(help="Replay memory: ring, reservoir, balanced, ... or file.py:Class.")
    ] = None,
    norm: Annotated[str, typer.Option(help="Normalization layer: bn, cn, cn8, ... or file.py:Class.")] = "cn",
    groups: Annotated[str | None, typer.Option(help="Number of channel groups, or 'auto'.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Network: mlp, resnet18, ... or file.py:make; default: that of the stream.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Pretrained weights to start from: a file, or torchvision:IMAGENET1K_V1.")
    ] = None,
    buffer: Annotated[
        int | None, typer.Option(help="Memory size: per task (or class) for ring, in total for the others.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Stream samples per step.")] = None,
    replay: Annotated[int | None, typer.Option(help="Replayed memory samples per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Number of seeds, counted from 0; default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Run this single seed.")] = None,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    lanes: Lanes = None,
    threads: Annotated[int, typer.Option(help=THREADS_HELP)] = 1,
    precision: Annotated[str | None, typer.Option(help=PRECISION_HELP)] = None,
    eval_moments: Annotated[
        str | None,
        typer.Option(
            help="Moments for evaluation: running, oracle (BN*: exact, from training data of all tasks so far), memory "
            "(exact, from the replay memory), or task (for each task, those saved at its end)."
        ),
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help=MAX_STEPS_HELP)] = None,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights", help="Save the final weights of each run next to its record, for `diagnose`."),
    ] = False,
    memory_moments: MemoryMoments = False,
    data_root: DataRoot = None,
    allow_missing: AllowMissing = False,
    runs: RunsFolder = Path("runs"),
    config: Annotated[Path | None, typer.Option(help="TOML file of settings.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting as key=value, such as strategy.forward=separate; repeatable."),
    ] = None,
    log: Log = None,
    log_every: LogEvery = 50,
    log_dir: LogDir = None,
    devices: Devices = None,
    launcher: LauncherName = None,
    address: Address = None,
    launcher_set: LauncherSettings = None,
) -> None:
    """Train once over a stream; after each task, measure accuracy on all tasks so far."""
    seed_list = _seeds(seeds, seed)
    flags: dict[str, Any] = {
        "stream.name": stream,
        "strategy.name": strategy,
        "norm.name": norm,
        "norm.groups": parse_int_or_text(groups) if groups is not None else None,
        "model.name": model,
        "model.weights": weights,
        "memory.kind": memory,
        "memory.size": buffer,
        "train.batch": batch,
        "train.replay": replay,
        "train.lr": lr,
        "train.precision": precision,
        "train.max_steps": max_steps,
        "evaluate.moments": eval_moments,
    }
    names = {key: _FLAG_NAMES.get(key, f"--{key.partition('.')[2].replace('_', '-')}") for key in flags}
    typed = [Setting(names[key], key, value) for key, value in flags.items() if _is_typed(context, key, value)]
    defaults = {key: value for key, value in flags.items() if value is not None}
    values = collect_settings(defaults, config, typed, set_ or [])
    with importing_torch(device, in_workers=bool(devices or launcher)):
        where = find_launcher(launcher, address, launcher_set)
        options = bench.RunOptions(device, lanes, threads, keep_weights, allow_missing, where, devices, memory_moments)
    logs = {"log": log, "log_every": log_every, "log_dir": log_dir}
    raise typer.Exit(run_seeds(values, seed_list, options, data_root, runs, console, logs))


def _seeds(count: int | None, single: int | None) -> list[int]:
    """Seeds to run: ``count`` seeds from 0, or the single one."""
    if single is not None and count is not None:
        raise UserError(
            f"--seed {single} and --seeds {count}: use one of them. --seeds is the number of seeds, counted from 0."
        )
    if count is not None:
        check_seeds(count)
    if single is not None:
        check_seed(single)
    return [single] if single is not None else list(range(count or 1))


def _is_typed(context: typer.Context, key: str, value: Any) -> bool:
    """Whether a flag of `run` was typed. A settings file overrides the defaults of stream, strategy and norm."""
    group, _, name = key.partition(".")
    if name != "name":
        return value is not None
    return is_explicit(context, group)


@examples(
    Example("Finish all stopped runs in the folder runs.", "contnorm resume"),
    Example("Finish the stopped runs of another folder, one at a time.", "contnorm resume sweep-runs --lanes 1"),
)
def resume(
    path: Annotated[Path, typer.Argument(help="Folder of a run, or of several runs.")] = Path("runs"),
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
    """Resume all interrupted runs under a folder, bit-exactly."""
    with importing_torch(device, in_workers=bool(devices or launcher)):
        where = find_launcher(launcher, address, launcher_set)
        options = bench.RunOptions(device, lanes, threads, allow_missing=allow_missing, launcher=where, devices=devices)
    logs = {"log": log, "log_every": log_every, "log_dir": log_dir}
    raise typer.Exit(resume_all(path, options, data_root, console, logs))


def run_seeds(
    values: dict[str, Any],
    seeds: list[int],
    options: RunOptions,
    root: Path | None,
    runs: Path,
    console: Console,
    logs: Mapping[str, Any] | None = None,
) -> int:
    """Run the seeds that have no record, show the scores of all, and return the exit code."""
    stream = bench.load_stream(root=root, allow_missing=options.allow_missing, **values["stream"])
    settings = flatten_settings({group: content for group, content in values.items() if group != "stream"})
    try:
        result = bench.run(
            stream,
            settings=settings,
            seeds=seeds,
            runs=runs,
            device=options.device or "cpu",
            lanes=options.lanes,
            threads=1 if options.threads is None else options.threads,
            keep_weights=options.keep_weights,
            memory_moments=options.memory_moments,
            progress=console,
            launcher=options.launcher,
            devices=options.devices,
            **(logs or {}),
        )
    except bench.RunInterrupted as stopped:
        return 128 + stopped.signal
    show_scores(result.records, console)
    if result.diverged:
        raise UserError(" ".join(result.diverged.values()))
    return 0


def resume_all(
    path: Path,
    options: RunOptions,
    root: Path | None,
    console: Console,
    logs: Mapping[str, Any] | None = None,
) -> int:
    """Resume every stopped run under a folder, show the scores, and return the exit code."""
    try:
        records = bench.resume(path, options=options, root=root, console=console, **(logs or {}))
    except bench.RunInterrupted as stopped:
        return 128 + stopped.signal
    except bench.ResumeError as error:
        show_scores(error.records, console)
        if str(error):
            raise
        return 2
    show_scores(records, console)
    return 0
