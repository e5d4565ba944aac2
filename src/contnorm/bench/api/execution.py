"""Execution of runs with progress, signals, loggers and callbacks; shared by all functions and commands that run."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.progress import RunProgress
from contnorm.bench.api.run_logs import Loggers, LogOptions, RunLogs, restored_random_state
from contnorm.bench.components import own_code
from contnorm.bench.data.registry import data_root, digits_notice, load_with_progress
from contnorm.bench.data.store import find_stored
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Event, Run, RunOptions
from contnorm.bench.label_metrics import rows_of
from contnorm.bench.records import Record, Store
from contnorm.bench.signals import StopSignals
from contnorm.bench.unfinished import ENDING, is_locked, unfinished_runs
from contnorm.errors import UserError

__all__ = ["OnTaskDone", "Outcome", "RunInterrupted", "StopRun", "resume", "run_missing", "run_runs"]

log = logging.getLogger("contnorm")

OnTaskDone = Callable[[Event], object]


class RunInterrupted(KeyboardInterrupt):
    """Runs were stopped by a signal, after saving what can be saved.

    After SIGTERM it is a `SystemExit` too: a program that does not catch it ends with status 143, as the commands do.

    Attributes:
        signal: Number of the signal.
        result: What has finished: the `SweepResult` of a sweep, otherwise None.

    Example:
        >>> stopped = RunInterrupted("stopped after saving.", signal.SIGTERM)
        >>> isinstance(stopped, SystemExit), stopped.code
        (True, 143)
    """

    def __new__(cls, message: str, number: int, *rest: object) -> RunInterrupted:
        """Create the exception, as an object of a subclass after SIGTERM."""
        if number != signal.SIGTERM:
            return super().__new__(cls, message)
        content = {"code": 128 + signal.SIGTERM, "__module__": cls.__module__}
        return super().__new__(type(cls.__name__, (cls, SystemExit), content), message)

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number
        self.result: Any = None


class StopRun(Exception):  # noqa: N818 - a request, as StopIteration is
    """Raised by an ``on_task_done`` callback to stop the runs of its call, which then raises it.

    Any other exception stops the runs too. They are saved, and the same call continues them.

    Args:
        message: Reason of the stop.
        discard: Whether to remove what the call has written to the folder of runs instead of saving it: checkpoints,
            and the records of runs that finished in this call. Records of earlier calls stay.

    Attributes:
        discard: As the argument.

    Example:
        >>> from contnorm.bench.api.run import run
        >>> from contnorm.bench.api.stream import load_stream
        >>> def check(event):
        ...     if event.average < 101:
        ...         raise StopRun(f"{event.done} of {event.steps} steps")
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> run(stream, norm="bn", on_task_done=check)
        Traceback (most recent call last):
        contnorm.bench.api.execution.StopRun: 5 of 10 steps
    """

    discard = False

    def __init__(self, message: str = "", *, discard: bool = False) -> None:
        super().__init__(message)
        self.discard = discard


@dataclass
class Outcome:
    """What has become of runs.

    Attributes:
        finished: The last event of runs that were executed and finished.
        diverged: The reasons of runs that diverged.
        failures: The reasons of runs that failed.
        started: Runs that were executed.
        error: The exception of a callback, which stops the runs.
    """

    finished: dict[Run, Event] = field(default_factory=dict)
    diverged: dict[Run, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    started: set[Run] = field(default_factory=set)
    error: BaseException | None = None

    def add(self, event: Event) -> None:
        """Add an event."""
        if event.kind == "started":
            self.started.add(event.run)
        elif event.kind == "finished":
            self.finished[event.run] = event
        elif event.kind == "diverged":
            self.diverged[event.run] = event.why
        elif event.kind == "failed":
            self.failures.append(event.why)


def run_runs(
    runs: Sequence[Run],
    options: RunOptions,
    console: Console | None = None,
    *,
    logs: RunLogs | None = None,
    on_task_done: OnTaskDone | None = None,
    quiet: bool = False,
) -> Outcome:
    """Execute runs, with a progress bar for each of them and one for all.

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
    outcome = Outcome()
    hint = "Nothing is saved, since runs=None." if options.runs is None else "Run it again to continue."
    if logs is not None and logs.loggers:
        options = replace(options, log_every=logs.every)
    progress = RunProgress(runs, console, quiet, hint)
    prepare = None if console is None else partial(_decode, options=options, progress=progress)
    observers: list[Callable[[Event], None]] = [outcome.add, progress.show]
    observers += [logs.log_event] if logs is not None else []
    if on_task_done is not None:
        observers.append(partial(_call, call=on_task_done, runs=runs, options=options, outcome=outcome))
    with StopSignals() as signals, progress:
        try:
            for event in execute(runs, options, lambda: bool(signals) or outcome.error is not None, prepare):
                for observer in observers:
                    observer(event)
        except KeyboardInterrupt as interrupt:
            message = f"stopped at once. {hint}"
            progress.print(message)
            raise RunInterrupted(message, (signals.received or [signal.SIGINT])[-1]) from interrupt
    if outcome.error is not None:
        if isinstance(outcome.error, StopRun) and outcome.error.discard and options.runs is not None:
            _discard(runs, outcome.started, options.store)
        raise outcome.error
    if outcome.failures:
        raise UserError(" ".join(f"{why.removesuffix('.')}." for why in sorted(outcome.failures)))
    if signals and progress.unfinished:
        message = f"stopped with {len(progress.unfinished)} of {len(runs)} runs unfinished. {hint}"
        progress.print(message)
        if signals.received[0] == signal.SIGTERM and console is None:  # Python prints no message
            log.warning(message)
        raise RunInterrupted(message, signals.received[0])
    return outcome


def _decode(name: str, options: RunOptions, progress: RunProgress) -> None:
    """Decode a data set with a progress bar, if it was not decoded before."""
    is_in_memory = "@" in name and find_stored(name, options.data_root) is None  # or made by a plugin
    if name not in options.sources and not is_in_memory:
        load_with_progress(name, options.data_root, progress.bars, options.allow_missing)


def _call(event: Event, call: OnTaskDone, runs: Sequence[Run], options: RunOptions, outcome: Outcome) -> None:
    """Call a function after each task of a run, once for each task of a recorded one; its exception is kept."""
    events = [event] if event.kind == "task" else []
    if event.kind == "recorded":
        record = options.store.load_run(event.config, event.seed)
        ends = record.task_ends
        events = [
            Event("task", event.run, ends[task], ends[-1], task, scores=scores, last=end == ends[-1], recorded=True)
            for (task, scores), end in zip(enumerate(rows_of(record.counted)), ends, strict=True)
        ]
    for one in events:
        if outcome.error is not None:
            return
        seeds = tuple(run.seed for run in runs if run.config == one.config)
        try:
            with restored_random_state():
                call(replace(one, seeds=seeds))
        except BaseException as error:  # of any type: it is raised when the runs are saved
            if type(error) in (KeyboardInterrupt, GeneratorExit):  # such as the second Ctrl-C: end at once
                raise
            outcome.error = error


def _discard(runs: Iterable[Run], started: set[Run], store: Store) -> None:
    """Remove what a call has written: checkpoints, and the records of runs that it has started."""
    for run in runs:
        record = store.path(run.config, run.seed)
        if not is_locked(record.with_suffix(ENDING)):  # by another process
            shutil.rmtree(record.with_suffix(ENDING), ignore_errors=True)
        if run in started:
            weights_path(record).unlink(missing_ok=True)
            record.unlink(missing_ok=True)
        with suppress(OSError):  # there are other files
            record.parent.rmdir()


def print_data_notices(runs: Iterable[Run], root: Path) -> None:
    """Log notices on data sets, such as that embedded digits are used in place of MNIST."""
    for source, name in dict.fromkeys((run.config.stream.source, run.config.stream.name) for run in runs):
        if notice := digits_notice(source, name, root):
            log.warning(notice)


def run_missing(runs: Sequence[Run], options: RunOptions, console: Console | None = None) -> None:
    """Execute the runs that are neither recorded nor known to diverge; for tables that are made of all of them.

    Runs that an archive does not have are not executed.
    """
    store = options.store
    todo = [run for run in runs if not store.is_diverged(run.config, run.seed)]
    if store.read_only:
        missing = [run for run in todo if not store.has(run.config, run.seed)]
        if missing:
            log.warning(f"{options.runs}: is an archive, so its {len(missing)} missing runs are not executed.")
        return
    print_data_notices(todo, options.data_root)
    run_runs(todo, options, console, quiet=True)


def resume(
    path: str | Path = "runs",
    *,
    root: str | Path | None = None,
    console: Console | None = None,
    log: Loggers | None = None,
    log_every: int = LogOptions.every,
    log_dir: str | Path | None = None,
    **options: Any,
) -> list[Record]:
    """Resume every stopped run of a folder, by default on the device and with the threads that it started with.

    Runs with code of yours are resumed by the call or command that started them.

    Args:
        path: Folder of runs, of one experiment in it, or of one run.
        root: Folder of data sets; None for the default one.
        console: Terminal or notebook to show progress on; None for no output.
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
    log_options, folder = LogOptions.of(log, log_every, log_dir), Path(path)
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
        logging.getLogger("contnorm").warning(problem)
    for (runs, device, threads, *noted), stopped_runs in groups.items():
        chosen: dict[str, Any] = {"device": device, "threads": threads, **dict(noted)}
        chosen |= {name: value for name, value in options.items() if value is not None}
        place = Path(data_root(None if root is None else Path(root)))
        try:
            with log_options.open(runs) as logs:
                resolved = RunOptions(**chosen, runs=runs, data_root=place)
                print_data_notices(stopped_runs, place)
                run_runs(stopped_runs, resolved, console, logs=logs)
        except UserError as error:  # other runs go on
            problems.append(str(error))
        store = Store(runs)
        records += [store.load_run(run.config, run.seed) for run in stopped_runs if store.has(run.config, run.seed)]
    if problems:
        raise UserError(" ".join(problems))
    return records
