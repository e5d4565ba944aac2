"""`run`: train over a stream with one norm and strategy, for several seeds; `resume`: continue stopped runs."""

from __future__ import annotations

import inspect
import logging
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.arguments import (
    ARGUMENTS,
    DEFAULT_NORM,
    DEFAULT_STRATEGY,
    Model,
    Norm,
    as_stream,
    console_of,
    names_known_arguments,
    resolve_run,
    unknown_argument,
)
from contnorm.bench.api.progress import LOG_EVERY, Loggers, OnTaskDone, RunInterrupted, RunLogs, RunProgress, StopRun
from contnorm.bench.api.result import Result
from contnorm.bench.api.stream import Stream
from contnorm.bench.components import components_of, own_code
from contnorm.bench.data.dataset import find_stored
from contnorm.bench.data.registry import data_root, digits_notice, load_with_progress
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Event, Launcher, Run, RunOptions
from contnorm.bench.label_metrics import rows_of
from contnorm.bench.memories import Memory
from contnorm.bench.records import Record, Store, make_record
from contnorm.bench.rng import list_seeds
from contnorm.bench.signals import StopSignals
from contnorm.bench.strategies.base import Strategy
from contnorm.bench.unfinished import UNFINISHED_SUFFIX, is_locked, unfinished_runs
from contnorm.errors import UserError

_log = logging.getLogger("contnorm")


class DivergedError(UserError):
    """All seeds of an experiment diverged: their loss, a parameter or a moment is not finite.

    Example:
        >>> from contnorm.bench import load_stream
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> run(stream, norm="none", lr=1e9)
        Traceback (most recent call last):
        contnorm.bench.api.run.DivergedError: seed 0: the loss is nan at step 5 of 10 (task 0). Most likely the ...
    """


@names_known_arguments
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
    log_every: int = LOG_EVERY,
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
        >>> from contnorm.bench import load_stream
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=100)
        >>> result = run(stream, norm="bn", strategy="er", seeds=2, lanes=1)
        >>> result.accuracy.shape
        (2, 2, 2)
    """
    options = dict(locals())  # all arguments: those that describe the experiment, and those of its execution
    arguments = {name: options.pop(name) for name in ARGUMENTS}
    stream = as_stream(options.pop("stream"))
    (result,) = run_experiments(stream, [resolve_run(stream, arguments, runs is not None)], **options)
    if isinstance(result, DivergedError):
        raise result
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
        >>> from contnorm.bench import load_stream
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> bn, gn = run_all(stream, [{"norm": "bn"}, {"norm": "gn", "lr": 0.1}])
        >>> bn.config.norm.name, gn.config.train.lr
        ('bn', 0.1)
    """
    stream = as_stream(stream)
    runs = [resolve_run(stream, one, options.get("runs") is not None) for one in experiments]
    results = run_experiments(stream, runs, **options)
    for result in results:
        if isinstance(result, UserError):
            raise result
    return [result for result in results if isinstance(result, Result)]


def run_experiments(
    stream: Stream,
    experiments: Sequence[Run],
    *,
    seeds: int | Iterable[int] = 1,
    runs: str | Path | None = None,
    progress: bool | Console = False,
    log: Loggers | None = None,
    log_every: int = LOG_EVERY,
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
    for name in options.keys() - RunOptions.__dataclass_fields__.keys():
        raise unknown_argument(name, inspect.signature(run).parameters)
    resolved = RunOptions(
        **{name: value for name, value in options.items() if value is not None},
        allow_missing=stream.allow_missing,
        runs=None if runs is None else Path(runs).expanduser(),
        data_root=stream.root or Path("data"),
        sources={stream.source.name: stream.source} if stream.root is None else {},
    )
    console = console_of(progress)
    seed_list = list_seeds(seeds)
    todo = list(dict.fromkeys(replace(one, seed=seed) for one in experiments for seed in seed_list))
    if "source" not in stream.settings:
        print_data_notices(todo, resolved.data_root)
    logs = None if log is None else RunLogs(log, resolved.runs, log_every, log_dir)
    ended = run_runs(todo, resolved, console, logs=logs, on_task_done=on_task_done)
    results: list[Result | DivergedError] = []
    for one in experiments:
        events = {seed: ended[replace(one, seed=seed)] for seed in seed_list}
        diverged = {seed: event.why for seed, event in events.items() if event.kind == "diverged"}
        records = [
            resolved.store.load_run(event.config, seed)
            if event.kind == "recorded"
            else make_record(event.config, seed, event.results, event.path)
            for seed, event in events.items()
            if seed not in diverged
        ]
        if not records:
            results.append(DivergedError(" ".join(diverged.values())))
            continue
        for reason in diverged.values():
            _log.warning(reason)
        weights: dict[int, bytes | Path] = {}
        for record in records:
            kept = events[record.seed].weights
            if kept is not None:
                weights[record.seed] = kept
            elif record.path is not None and weights_path(record.path).is_file():
                weights[record.seed] = weights_path(record.path)
            elif resolved.keep_weights and record.path is not None:
                why = f"{record.path}: was recorded without its weights. Move it away to run it again with them."
                _log.warning(why)
        objects = components_of(one.config)
        results.append(Result(records, diverged=diverged, stream=stream, weights=weights, objects=objects))
    return results


def run_runs(
    runs: Sequence[Run],
    options: RunOptions,
    console: Console | None = None,
    *,
    logs: RunLogs | None = None,
    on_task_done: OnTaskDone | None = None,
    quiet: bool = False,
) -> dict[Run, Event]:
    """Execute runs, with a progress bar for each of them and one for all; returns the last event of each.

    Args:
        runs: The runs.
        options: How they are executed.
        console: Terminal or notebook to print to; None for no output.
        logs: Loggers that get the events of the runs.
        on_task_done: Called with an `Event` after each task of a run; its exception stops the runs.
        quiet: Whether recorded runs get no line.

    Raises:
        RunInterrupted: If SIGINT or SIGTERM stopped the runs, after they were saved.
        UserError: At the end, with the reasons of all failed runs.
    """
    ended, started = dict[Run, Event](), set[Run]()
    errors: list[BaseException] = []  # exceptions of `on_task_done`; the first one stops all runs
    hint = "Nothing is saved, since runs=None." if options.runs is None else "Run it again to continue."
    progress, prepare, observers = None, None, list[Callable[[Event], None]]()
    if console is not None:
        progress = RunProgress(runs, console, quiet, hint)
        prepare = partial(_decode, options=options, progress=progress)
        observers.append(progress.show)
    if logs is not None:
        options = replace(options, log_every=logs.every)
        observers.append(logs.log_event)
    say: Callable[[str], None] = _log.debug if progress is None else progress.print
    with StopSignals() as signals, progress or nullcontext(), logs or nullcontext():
        stop = partial(any, (signals, errors))
        try:
            for event in execute(runs, options, stop, prepare):
                if event.kind == "started":
                    started.add(event.run)
                elif event.is_end:
                    ended[event.run] = event
                for observer in observers:
                    observer(event)
                if on_task_done is not None and not errors and event.kind in ("task", "recorded"):
                    errors += _call_back(on_task_done, event, runs, options)
        except KeyboardInterrupt as interrupt:
            message, number = f"stopped at once. {hint}", (signals.received or [signal.SIGINT])[-1]
            say(message)
            raise RunInterrupted(message, number) from interrupt
    for error in errors:
        if isinstance(error, StopRun) and error.discard and options.runs is not None:
            _discard(runs, started, options.store)
        raise error
    if failures := sorted(event.why for event in ended.values() if event.kind == "failed"):
        raise UserError(" ".join(f"{why.removesuffix('.')}." for why in failures))
    unfinished = sum(run not in ended or ended[run].kind == "stopped" for run in runs)
    if signals and unfinished:
        message = f"stopped with {unfinished} of {len(runs)} runs unfinished. {hint}"
        silent = progress is None and signals.received[0] == signal.SIGTERM  # Python prints nothing on SIGTERM
        say(message) if not silent else _log.warning(message)
        raise RunInterrupted(message, signals.received[0])
    return ended


def _decode(name: str, options: RunOptions, progress: RunProgress) -> None:
    """Decode a data set with a progress bar, if it was not decoded before."""
    is_in_memory = "@" in name and find_stored(name, options.data_root) is None  # or made by a plugin
    if name not in options.sources and not is_in_memory:
        load_with_progress(name, options.data_root, progress.bars, options.allow_missing)


def _call_back(call: OnTaskDone, event: Event, runs: Sequence[Run], options: RunOptions) -> list[BaseException]:
    """Call a function after a task of a run, or for each task of a recorded one; returns its exception, if any.

    It may be of any type: it is raised when the runs are saved.
    """
    events = [event]
    if event.kind == "recorded":
        record = options.store.load_run(event.config, event.seed)
        ends = record.task_ends
        events = [
            Event("task", event.run, ends[task], ends[-1], task, scores=scores, last=end == ends[-1], recorded=True)
            for (task, scores), end in zip(enumerate(rows_of(record.counted)), ends, strict=True)
        ]
    seeds = tuple(run.seed for run in runs if run.config == event.config)
    try:
        for one in events:
            call(replace(one, seeds=seeds))
    except BaseException as error:
        if type(error) in (KeyboardInterrupt, GeneratorExit):  # such as the second Ctrl-C: end at once
            raise
        return [error]
    return []


def _discard(runs: Iterable[Run], started: set[Run], store: Store) -> None:
    """Remove what a call has written: checkpoints, and the records of runs that it has started."""
    for run in runs:
        record = store.path(run.config, run.seed)
        if not is_locked(record.with_suffix(UNFINISHED_SUFFIX)):  # a locked run belongs to another process
            shutil.rmtree(record.with_suffix(UNFINISHED_SUFFIX), ignore_errors=True)
        if run in started:
            weights_path(record).unlink(missing_ok=True)
            record.unlink(missing_ok=True)
        with suppress(OSError):  # there are other files
            record.parent.rmdir()


def print_data_notices(runs: Iterable[Run], root: Path) -> None:
    """Log notices on data sets, such as that embedded digits are used in place of MNIST."""
    for source, name in dict.fromkeys((run.config.stream.source, run.config.stream.name) for run in runs):
        if notice := digits_notice(source, name, root):
            _log.warning(notice)


def run_missing(runs: Sequence[Run], options: RunOptions, console: Console | None = None) -> None:
    """Execute the runs that are neither recorded nor known to diverge; for tables that are made of all of them.

    Runs that an archive does not have are not executed.
    """
    store = options.store
    todo = [run for run in runs if not store.is_diverged(run.config, run.seed)]
    if store.read_only:
        missing = [run for run in todo if not store.has(run.config, run.seed)]
        if missing:
            _log.warning(f"{options.runs}: is an archive, so its {len(missing)} missing runs are not executed.")
        return
    print_data_notices(todo, options.data_root)
    run_runs(todo, options, console, quiet=True)


def resume(
    path: str | Path = "runs",
    *,
    root: str | Path | None = None,
    progress: bool | Console = False,
    log: Loggers | None = None,
    log_every: int = LOG_EVERY,
    log_dir: str | Path | None = None,
    **options: Any,
) -> list[Record]:
    """Resume every stopped run of a folder, by default on the device and with the threads that it started with.

    Runs with code of yours are resumed by the call or command that started them.

    Args:
        path: Folder of runs, of one experiment in it, or of one run.
        root: Folder of data sets; None for the default one.
        progress: Whether to show progress; or the rich console to show it on.
        log: Loggers, as in `bench.run`; they continue the logs of the runs.
        log_every: Steps between the losses that are logged.
        log_dir: Folder of logs; None for the folder next to that of the runs.
        **options: Options of `RunOptions` that override what a run started with, such as ``lanes=2``.

    Returns:
        The records of the resumed runs.

    Raises:
        UserError: If nothing can be resumed; and, after the other runs are finished, if a run failed.

    Example:
        >>> resume("no such folder")
        Traceback (most recent call last):
        contnorm.errors.UserError: no stopped run under no such folder. Name the folder of a run, or of many runs.
    """
    folder, console = Path(path), console_of(progress)
    groups: dict[tuple[Any, ...], list[Run]] = {}
    problems, records = list[str](), list[Record]()
    Store(folder).check_writable()
    for stopped in unfinished_runs(folder):
        if stopped.config is None:
            problems.append(f"{stopped.folder}: its settings can't be read. Repeat the command that started it.")
        elif reason := own_code(stopped.config):
            problems.append(f"{stopped.folder}: {reason}. Repeat the command that started the run to resume it.")
        else:
            was = stopped.note["circumstances"]
            key = stopped.folder.parent.parent, was["device"], was.get("threads", 1), *stopped.note["options"].items()
            groups.setdefault(key, []).append(Run(stopped.config, stopped.seed))
    if not groups:
        why = f"no stopped run under {folder}. Name the folder of a run, or of many runs."
        raise UserError(" ".join(problems) or why)
    for problem in problems:
        _log.warning(problem)
    for (runs, device, threads, *noted), stopped_runs in groups.items():
        chosen: dict[str, Any] = {"device": device, "threads": threads, **dict(noted)}
        chosen |= {name: value for name, value in options.items() if value is not None}
        place = Path(data_root(None if root is None else Path(root)))
        try:
            resolved = RunOptions(**chosen, runs=runs, data_root=place)
            print_data_notices(stopped_runs, place)
            logs = None if log is None else RunLogs(log, runs, log_every, log_dir)
            run_runs(stopped_runs, resolved, console, logs=logs)
        except UserError as error:  # other runs go on
            problems.append(str(error))
        store = Store(runs)
        records += [store.load_run(run.config, run.seed) for run in stopped_runs if store.has(run.config, run.seed)]
    if problems:
        raise UserError(" ".join(problems))
    return records
