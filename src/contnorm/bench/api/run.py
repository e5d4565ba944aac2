"""`run`: train over a stream with one norm and strategy, for several seeds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.arguments import ARGUMENTS, DEFAULT_NORM, DEFAULT_STRATEGY, Model, Norm, collect_values
from contnorm.bench.api.execution import RunOptions, environment_with_data, run_jobs
from contnorm.bench.api.progress import RunMonitor
from contnorm.bench.api.result import Result
from contnorm.bench.api.run_logs import Loggers, LogOptions, RunLogs
from contnorm.bench.api.stream import Stream, list_seeds, load_stream
from contnorm.bench.api.task_callback import OnTaskDone
from contnorm.bench.components import Component, components_of, loading_user_code
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.events import Finished
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.launchers.base import Launcher
from contnorm.bench.launchers.local import LocalLauncher
from contnorm.bench.memories import Memory
from contnorm.bench.records import Record, Store, make_record
from contnorm.bench.strategies.base import Strategy
from contnorm.errors import UserError, unknown

__all__ = ["DivergedError", "ResolvedExperiment", "resolve_experiment", "run", "run_all", "run_experiments"]

log = logging.getLogger("contnorm")

ROUNDS = 10  # attempts at runs whose records other processes discard


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
    repeated, and a stopped one is resumed bit-exactly. Several seeds run in parallel: in processes on a CPU, in one
    CUDA graph on a GPU. The results of a seed do not depend on the others.

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
        tag: Name of a network, strategy or memory that is defined in no file, such as a class of a notebook. Runs with
            the same tag and settings count as the same run.
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
        on_task_done: Called in this process with a `bench.TaskDone` after each task of a run: its settings, seed and
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
    arguments = {
        "norm": norm,
        "strategy": strategy,
        "model": model,
        "memory": memory,
        "lr": lr,
        "batch_size": batch_size,
        "replay": replay,
        "settings": settings,
        "tag": tag,
    }
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


def run_all(
    stream: Stream | str,
    experiments: Sequence[Mapping[str, Any]],
    *,
    seeds: int | Iterable[int] = 1,
    runs: str | Path | None = None,
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
) -> list[Result]:
    """Run several experiments on the same stream, in parallel where lanes are free.

    Args:
        stream: A stream, or the name of one.
        experiments: For each experiment its arguments of `run`: ``norm``, ``strategy``, ``model``, ``memory``, ``lr``,
            ``batch_size``, ``replay``, ``settings`` and ``tag``.
        seeds, runs, device, devices, lanes, threads, keep_weights, memory_moments, progress, log, log_every, log_dir,
            launcher, on_task_done: As in `run`.

    Returns:
        The results of the experiments, in order.

    Example:
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> bn, gn = run_all(stream, [{"norm": "bn"}, {"norm": "gn", "lr": 0.1}], lanes=1)
        >>> bn.config.norm.name, gn.config.train.lr
        ('bn', 0.1)
    """
    results = run_experiments(
        stream,
        experiments,
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
    for result in results:
        if isinstance(result, UserError):
            raise result
    return [result for result in results if isinstance(result, Result)]


def run_experiments(
    stream: Stream | str,
    experiments: Sequence[Mapping[str, Any] | ResolvedExperiment],
    *,
    seeds: int | Iterable[int] = 1,
    runs: str | Path | None = None,
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
    monitor: RunMonitor | None = None,
) -> list[Result | UserError]:
    """Run several experiments as `run_all` does; one whose seeds all diverged has an error in place of its result.

    Args:
        stream, experiments, seeds, runs, device, devices, lanes, threads, keep_weights, memory_moments, progress,
            log, log_every, log_dir, launcher, on_task_done: As in `run_all`. An experiment may also be resolved before.
        monitor: Gets the settings of the experiments, then every event of their runs.
    """
    if loading_user_code():
        raise UserError(
            "bench.run was called by a file that is loaded as user code. Call it if __name__ == '__main__'."
        )
    if isinstance(stream, str):
        stream = load_stream(stream)
    if not isinstance(stream, Stream):
        raise UserError(
            f"stream is of type {type(stream).__name__}: use a name, or a stream of load_stream or Stream.from_arrays."
        )
    if runs is not None and (not isinstance(runs, str | os.PathLike) or not os.fspath(runs)):
        raise UserError(f"runs={runs!r}: use a folder, or None to keep the results in memory.")
    folder = None if runs is None else Path(runs).expanduser()
    seed_list = list_seeds(seeds)
    log_options = LogOptions.of(log, log_every, log_dir)
    if isinstance(experiments, str | Mapping) or not isinstance(experiments, Iterable):
        raise UserError(f"experiments={experiments!r}: use a list of dictionaries, such as [{{'norm': 'bn'}}].")
    resolved = [
        experiment
        if isinstance(experiment, ResolvedExperiment)
        else resolve_experiment(stream, experiment, runs is not None)
        for experiment in experiments
    ]
    console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
    missing = stream.allow_missing
    options = RunOptions(device, lanes, threads, keep_weights, missing, launcher, devices, memory_moments)
    if monitor is not None:
        monitor.start([experiment.config for experiment in resolved])
    with log_options.open(folder) as logs:
        return _run_group(resolved, seed_list, stream, folder, options, console, monitor, logs, on_task_done)


@dataclass(frozen=True)
class ResolvedExperiment:
    """The settings of an experiment, and the Python objects that they name."""

    config: RunConfig
    objects: Sequence[Component] = ()


def resolve_experiment(stream: Stream, arguments: Mapping[str, Any], recorded: bool) -> ResolvedExperiment:
    """Check and complete the settings of an experiment, from its arguments of `run`.

    Args:
        stream: The stream.
        arguments: As in `run_all`.
        recorded: Whether runs are recorded, so that Python objects need an identity.
    """
    if not isinstance(arguments, Mapping):
        raise UserError(f"experiment {arguments!r}: use a dictionary of arguments of run, such as {{'norm': 'bn'}}.")
    unknown_keys = sorted(set(map(str, arguments)) - set(ARGUMENTS))
    if unknown_keys:
        raise unknown("argument of an experiment", unknown_keys[0], ARGUMENTS)
    values = collect_values(stream, recorded, **arguments)
    return ResolvedExperiment(resolve(values.nested(), stream.root or Path("data")), values.objects)


def _run_group(
    experiments: Sequence[ResolvedExperiment],
    seeds: Sequence[int],
    stream: Stream,
    runs: Path | None,
    options: RunOptions,
    console: Console | None,
    monitor: RunMonitor | None,
    logs: RunLogs,
    on_task_done: OnTaskDone | None,
) -> list[Result | UserError]:
    configs = [experiment.config for experiment in experiments]
    jobs = list(dict.fromkeys(Job(config, seed) for config in configs for seed in seeds))
    environment = _environment(runs, options, stream, len(jobs))
    return _run(jobs, configs, environment, stream, console, monitor, logs, on_task_done)


def _environment(runs: Path | None, options: RunOptions, stream: Stream, jobs: int) -> RunEnvironment:
    environment = environment_with_data(runs, options, stream.root or Path("data"))
    # Worker processes load a data set by its name; only one in memory is sent to them.
    launcher = environment.launcher or LocalLauncher()
    in_process = isinstance(launcher, LocalLauncher) and launcher.processes(jobs, environment) == 1
    sources = {stream.source.name: stream.source} if stream.root is None or (in_process and stream.is_loaded) else {}
    return replace(environment, sources=sources)


def _run(
    jobs: list[Job],
    configs: Sequence[RunConfig],
    environment: RunEnvironment,
    stream: Stream,
    console: Console | None,
    monitor: RunMonitor | None,
    logs: RunLogs,
    on_task_done: OnTaskDone | None,
) -> list[Result | UserError]:
    objects = [component for config in configs for component in components_of(config)]
    diverged: dict[Job, str] = {}
    finished: dict[Job, Finished] = {}
    store = None if environment.runs is None else environment.store
    remaining = jobs
    for _ in range(ROUNDS):
        run_jobs(
            remaining,
            environment,
            console,
            print_records=environment.runs is not None,
            notices="source" not in stream.settings,
            # `contnorm resume` has neither the objects nor the arrays nor the registered components of this program.
            resume_hint="Run it again to continue."
            if environment.sources or monitor or any(not part.origin.package for part in objects)
            else None,
            on_diverged=lambda job, reason: diverged.update({job: reason}),
            on_finished=lambda job, what: finished.update({job: what}),
            monitor=monitor,
            logs=logs,
            on_task_done=on_task_done,
        )
        # Another process may have discarded runs that it had recorded, as a pruned trial does.
        remaining = [job for job in jobs if job not in finished and job not in diverged and _is_gone(job, store)]
        if not remaining:
            break
    diverged = dict(sorted(diverged.items(), key=lambda item: item[0].seed))
    results: list[Result | UserError] = []
    for config in configs:
        of_experiment = [job for job in jobs if job.config == config]
        records = [_record(job, store, finished) for job in of_experiment if job not in diverged]
        reasons = {job.seed: reason for job, reason in diverged.items() if job.config == config}
        if not records:
            results.append(DivergedError(" ".join(reasons.values())))
            continue
        for reason in reasons.values():
            log.warning(reason)
        weights: dict[int, bytes | Path] = {}
        for record in records:
            content = finished[Job(config, record.seed)].weights if store is None else _weights(record, environment)
            if content is not None:
                weights[record.seed] = content
        results.append(Result(records, diverged=reasons, stream=stream, weights=weights, objects=components_of(config)))
    return results


def _is_gone(job: Job, store: Store | None) -> bool:
    """Whether a run that was recorded has no record any more."""
    if store is None or store.path(job.config, job.seed).is_file():
        return False
    return not store.has(job.config, job.seed)


def _record(job: Job, store: Store | None, finished: Mapping[Job, Finished]) -> Record:
    """Return the record of a finished run: made of its results, or from the store if it was recorded before."""
    if job in finished:
        path = None if store is None else store.path(job.config, job.seed)
        return make_record(job.config, job.seed, finished[job].results, path)
    assert store is not None  # without a store, every run is executed
    return store.load_run(job.config, job.seed)


def _weights(record: Record, environment: RunEnvironment) -> Path | None:
    """Return the file of the weights of a recorded run; warns if they were requested and are missing."""
    if record.path is None:  # of an archive
        return None
    path = weights_path(record.path)
    if path.is_file():
        return path
    if environment.keep_weights:
        log.warning(f"{record.path}: was recorded without its weights. Move it away to run it again with them.")
    return None
