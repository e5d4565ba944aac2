"""`run`: train over a stream with one norm and strategy, for several seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.arguments import DEFAULT_NORM, DEFAULT_STRATEGY, Model, Norm, resolve_run
from contnorm.bench.api.execution import OnTaskDone, Outcome, print_data_notices, run_runs
from contnorm.bench.api.result import Result
from contnorm.bench.api.run_logs import Loggers, LogOptions
from contnorm.bench.api.stream import Stream, list_seeds, load_stream
from contnorm.bench.components import components_of, loading_user_code
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.launch import Launcher
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.memories import Memory
from contnorm.bench.records import make_record
from contnorm.bench.strategies.base import Strategy
from contnorm.errors import UserError

__all__ = ["DivergedError", "find_stream", "run", "run_all", "run_experiments"]


class DivergedError(UserError):
    """All seeds of an experiment diverged: their loss, a parameter or a moment is not finite.

    Example:
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> run(stream, norm="none", lr=1e9)
        Traceback (most recent call last):
        contnorm.bench.api.run.DivergedError: seed 0: the loss is nan at step 5 of 10 (task 0). Most likely the ...
    """


def run(
    stream: Stream | str,
    *,
    norm: Norm = DEFAULT_NORM,
    strategy: str | Strategy | type[Strategy] = DEFAULT_STRATEGY,
    model: Model | None = None,
    memory: str | Memory | type[Memory] | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    replay: int | None = None,
    seeds: int | Iterable[int] = 1,
    settings: Mapping[str, Any] | None = None,
    runs: str | Path | None = None,
    tag: str | None = None,
    device: str = "cpu",
    devices: Sequence[int] | str | int | None = None,
    lanes: int | None = None,
    threads: int = 1,
    keep_weights: bool = False,
    memory_moments: bool = False,
    progress: bool | Console = False,
    log: Loggers | None = None,
    log_every: int = LogOptions.every,
    log_dir: str | Path | None = None,
    launcher: str | Launcher | None = None,
    on_task_done: OnTaskDone | None = None,
) -> Result:
    """Train once over a stream for each seed; after each task, measure accuracy on all tasks so far.

    A run is identified by its settings and seed. With a folder ``runs``, a finished run is recorded there and not
    repeated, and a stopped one is resumed bit-exactly. Several seeds run in parallel: on a CPU in processes if that
    saves time, on a GPU in one CUDA graph. The results of a seed do not depend on the others.

    Args:
        stream: A stream, or the name of one.
        norm: Name of the normalization layer: ``"bn"``, ``"gn"``, ``"cn"`` and so on. A number of groups may follow, as
            in ``"cn8"``; otherwise it is the default of the stream. ``"none"`` removes the norm layers of a network.
            Or a norm of your own: ``path/to/file.py:Class``, a registered name, or a class or function that creates a
            layer for a number of channels.
        strategy: Learning method: a name, ``path/to/file.py:Class``, or an object such as ``bench.ER(replay=10)``.
        model: Network: a name, ``path/to/file.py:make``, a function ``make(input_shape, num_outputs)``, or a
            `torch.nn.Module`. The norm layers of the function's network, and of a copy of the module, are converted to
            ``norm``; a function ``make(input_shape, num_outputs, norm)`` makes them itself with ``norm(channels)``. All
            seeds start from the weights of a given module. Default: that of the stream.
        memory: Replay memory: a name, ``path/to/file.py:Class``, a subclass of `Memory`, or an object such as
            ``bench.Ring(50)``. Default: that of the stream.
        lr: Learning rate.
        batch_size: Samples of the stream per step.
        replay: Replayed samples per step.
        seeds: Number of seeds, counted from 0, or the seeds.
        settings: Further settings by dotted key, such as ``{"strategy.forward": "separate"}``; see the list of
            settings in the documentation.
        runs: Folder of records and checkpoints; None to keep the results in memory only.
        tag: Name of a network, strategy, memory or norm that can't be identified by its code, such as one that uses an
            open file. Runs with the same tag and settings count as the same run.
        device: ``"cpu"``, ``"cuda"``, or a GPU by its index, such as ``"cuda:1"``.
        devices: Indices of several GPUs of this machine to use in parallel, such as ``[0, 1]``, or ``"all"``. Each has
            a worker process that executes up to ``lanes`` runs at a time.
        lanes: Number of parallel runs; None for 8 on a GPU, and as many as the cores allow on a CPU.
        threads: CPU threads per run. Changing it changes results slightly.
        keep_weights: Whether to keep the final weights, for `Result.models`.
        memory_moments: Whether to evaluate with the exact moments of the replay memory too, beside the moments of the
            settings. It changes neither the training nor the other accuracies, and not the identity of the run. Runs
            without running moments or memory, and runs that are recorded already, stay without it.
        progress: Whether to show progress; or the rich console to show it on.
        log: Loggers of settings, losses, accuracies and scores: ``"csv"``, ``"tensorboard"``, ``"wandb"``,
            ``"mlflow"``, an object of a subclass of `bench.Logger`, or a list of these. They do not change results.
        log_every: Steps between the losses that are logged.
        log_dir: Folder of logs; None for the folder next to ``runs`` whose name ends in ``-logs``, or ``runs-logs``.
        launcher: Where runs are executed: a name, such as ``"ray"``, or a launcher, such as
            ``bench.RayLauncher(address="auto")``; None for this machine. Results do not depend on it.
        on_task_done: Called in this process with a `bench.Event` after each task of a run: its settings, seed and
            accuracies so far. Runs that are recorded already are included. An exception that it raises, such as
            `bench.StopRun`, stops and saves all runs of the call, which then raises it.

    Returns:
        The results of all seeds.

    Raises:
        UserError: If a setting is invalid, or if runs failed.
        DivergedError: If all seeds diverged.
        KeyboardInterrupt: After Ctrl-C, when the runs are saved.

    Example:
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=100)
        >>> result = run(stream, norm="bn", strategy="er", seeds=2, lanes=1)
        >>> result.accuracy.shape
        (2, 2, 2)
    """
    arguments: dict[str, Any] = {"norm": norm, "strategy": strategy, "model": model, "memory": memory, "lr": lr}
    arguments |= {"batch_size": batch_size, "replay": replay, "settings": settings, "tag": tag}
    (result,) = run_all(
        stream,
        [arguments],
        seeds=seeds,
        runs=runs,
        device=device,
        devices=devices,
        lanes=lanes,
        threads=threads,
        keep_weights=keep_weights,
        memory_moments=memory_moments,
        progress=progress,
        log=log,
        log_every=log_every,
        log_dir=log_dir,
        launcher=launcher,
        on_task_done=on_task_done,
    )
    return result


def run_all(stream: Stream | str, experiments: Sequence[Mapping[str, Any]], **options: Any) -> list[Result]:
    """Run several experiments on the same stream, in parallel where lanes are free.

    Args:
        stream: A stream, or the name of one.
        experiments: For each experiment its arguments of `run`: ``norm``, ``strategy``, ``model``, ``memory``, ``lr``,
            ``batch_size``, ``replay``, ``settings`` and ``tag``.
        **options: The other arguments of `run`: ``seeds``, ``runs``, ``device``, ``lanes`` and so on.

    Returns:
        The results of the experiments, in order.

    Example:
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> bn, gn = run_all(stream, [{"norm": "bn"}, {"norm": "gn", "lr": 0.1}])
        >>> bn.config.norm.name, gn.config.train.lr
        ('bn', 0.1)
    """
    stream = find_stream(stream)
    runs = [resolve_run(stream, one, options.get("runs") is not None) for one in experiments]
    results = run_experiments(stream, runs, **options)
    for result in results:
        if isinstance(result, UserError):
            raise result
    return [result for result in results if isinstance(result, Result)]


def find_stream(stream: Stream | str) -> Stream:
    """Return a stream, or the one of a name, for a run."""
    if loading_user_code():
        raise UserError(
            "bench.run was called by a file that is loaded as user code. Call it if __name__ == '__main__'."
        )
    found = load_stream(stream) if isinstance(stream, str) else stream
    if not isinstance(found, Stream):
        raise UserError(f"stream={stream!r}: use a name, or a stream of load_stream or Stream.from_arrays.")
    return found


def run_experiments(
    stream: Stream,
    experiments: Sequence[Run],
    *,
    seeds: int | Iterable[int] = 1,
    runs: str | Path | None = None,
    progress: bool | Console = False,
    log: Loggers | None = None,
    log_every: int = LogOptions.every,
    log_dir: str | Path | None = None,
    on_task_done: OnTaskDone | None = None,
    **options: Any,
) -> list[Result | DivergedError]:
    """Run several experiments as `run_all` does; one whose seeds all diverged has an error in place of its result.

    Args:
        stream: The stream.
        experiments: A run of each experiment, with any seed.
        seeds, runs, progress, log, log_every, log_dir, on_task_done: As in `run`.
        **options: Options of `RunOptions`.
    """
    folder = None if runs is None else Path(runs).expanduser()
    console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
    sources = {stream.source.name: stream.source} if stream.root is None else {}
    resolved = RunOptions(
        **{name: value for name, value in options.items() if value is not None},
        allow_missing=stream.allow_missing,
        runs=folder,
        data_root=stream.root or Path("data"),
        sources=sources,
    )
    seed_list = list_seeds(seeds)
    todo = list(dict.fromkeys(replace(one, seed=seed) for one in experiments for seed in seed_list))
    if "source" not in stream.settings:
        print_data_notices(todo, resolved.data_root)
    with LogOptions.of(log, log_every, log_dir).open(folder) as logs:
        outcome = run_runs(todo, resolved, console, logs=logs, on_task_done=on_task_done)
    return [_result(one, seed_list, outcome, stream, resolved) for one in experiments]


def _result(
    one: Run, seeds: Sequence[int], outcome: Outcome, stream: Stream, options: RunOptions
) -> Result | DivergedError:
    """Return the result of an experiment, from what was run and what was recorded before."""
    records, weights, diverged = [], dict[int, bytes | Path](), dict[int, str]()
    for run in (replace(one, seed=seed) for seed in seeds):
        event = outcome.finished.get(run)
        if run in outcome.diverged:
            diverged[run.seed] = outcome.diverged[run]
            continue
        if event is not None:
            records.append(make_record(run.config, run.seed, event.results, event.path))
        else:
            records.append(options.store.load_run(run.config, run.seed))
        path = records[-1].path
        if event is not None and event.weights is not None:
            weights[run.seed] = event.weights
        elif path is not None and weights_path(path).is_file():
            weights[run.seed] = weights_path(path)
        elif options.keep_weights and path is not None:
            logging.getLogger("contnorm").warning(
                f"{path}: was recorded without its weights. Move it away to run it again with them."
            )
    if not records:
        return DivergedError(" ".join(diverged.values()))
    for reason in diverged.values():
        logging.getLogger("contnorm").warning(reason)
    return Result(records, diverged=diverged, stream=stream, weights=weights, objects=components_of(one.config))
