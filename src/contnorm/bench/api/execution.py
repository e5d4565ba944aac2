"""Execution of runs with progress, signals, loggers and callbacks; shared by all functions and commands that run."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from contnorm.bench.components import own_code
from contnorm.bench.config.defaults import changed, stream_name, varying
from contnorm.bench.config.schema import format_settings
from contnorm.bench.data.dataset import find_stored
from contnorm.bench.data.registry import data_root, digits_notice, load_with_progress
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Event, Run, RunOptions
from contnorm.bench.label_metrics import rows_of
from contnorm.bench.loggers import (
    LoggedRun,
    Logger,
    create_logger,
    default_log_folder,
    loss_metrics,
    score_metrics,
    system_metrics,
    task_metrics,
)
from contnorm.bench.records import Record, Store, make_record
from contnorm.bench.signals import StopSignals
from contnorm.bench.unfinished import ENDING, is_locked, unfinished_runs
from contnorm.errors import UserError, check_count, escape_terminal

_log = logging.getLogger("contnorm")

LOG_EVERY = 50  # steps between the losses that are logged
Loggers = str | Logger | Sequence[str | Logger]
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


class RunProgress:
    """Shows progress bars, and prints a line for each run that ends.

    Args:
        runs: The runs.
        console: The terminal or notebook to print to.
        quiet: Whether recorded runs get no line.
        hint: A sentence that says how to continue after a stop.
    """

    def __init__(self, runs: Sequence[Run], console: Console, quiet: bool, hint: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.console, self.hint, self._lines, self._unfinished = console, hint, not quiet, len(runs)
        # Bars can be updated on a terminal, or in a notebook, where rich needs ipywidgets.
        widgets = console.is_jupyter and find_spec("ipywidgets") is not None
        self._interactive, self._count = console.is_terminal or widgets, len(runs)
        self._varying = varying(list(dict.fromkeys(run.config for run in runs))) - {"norm.name", "strategy.name"}
        self.bars = Progress(*columns, console=console, disable=not self._interactive)
        self._total = self.bars.add_task("all runs", total=len(runs), visible=len(runs) > 1)
        self._bar_of: dict[Run, TaskID] = {}

    def __enter__(self) -> RunProgress:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def print(self, text: str) -> None:
        """Print a line of text as it is."""
        self.console.print(Text(escape_terminal(text)), soft_wrap=True)

    def show(self, event: Event) -> None:
        """Show an event of a run."""
        run = event.run
        if event.kind == "steps":
            if run not in self._bar_of:
                self._bar_of[run] = self.bars.add_task(self._label(run), total=event.steps)
            self.bars.update(self._bar_of[run], completed=event.done)
        elif event.kind == "waiting":
            self.print(f"{self._label(run)}: waiting for {event.why}, which is running it.")
        elif event.kind == "stopped":
            self.print(f"{self._label(run)}: stopped after {event.done} of {event.steps} steps. {self.hint}")
        elif event.is_end:
            self._unfinished -= 1
            self.bars.advance(self._total)
            if run in self._bar_of:
                self.bars.update(self._bar_of[run], visible=False)
            if self._lines and event.kind == "recorded":
                self.print(f"{self._label(run)}: not run again; its record is {event.path}")
            elif self._lines and event.kind == "finished" and event.path is not None:
                self.print(f"{self._label(run)}: recorded in {event.path}")
            elif self._lines and event.kind == "finished" and not self._interactive:
                self.print(f"{self._label(run)}: finished, {self._unfinished} of {self._count} runs to go")

    def _label(self, run: Run) -> str:
        """Name of a run: its stream, strategy and norm, and the settings in which the runs differ."""
        config = run.config
        own = format_settings(changed(config), self._varying)
        names = [stream_name(config.stream), config.strategy.name, config.norm.name, *([own] if own else [])]
        return escape_terminal(f"{' '.join(names)} seed {run.seed}")


class RunLogs:
    """Calls loggers with the events of runs. An error of a logger is reported once, and ends this logger only.

    Args:
        log: Names of loggers, and objects.
        runs: Folder of runs, next to which logs are written by default.
        every: Steps between losses.
        folder: Folder of logs; None for the default one.
    """

    def __init__(
        self, log: Loggers, runs: Path | None, every: int = LOG_EVERY, folder: str | Path | None = None
    ) -> None:
        self.every = check_count(every, "log_every")
        place = default_log_folder(runs) if folder is None else Path(folder).expanduser()
        self.loggers = []
        for logger in (log,) if isinstance(log, str | Logger) else log:
            if not isinstance(logger, str | Logger):
                raise UserError(
                    f"log={logger!r}: use a name such as 'csv', or an object of a subclass of bench.Logger."
                )
            self.loggers.append(create_logger(logger, place) if isinstance(logger, str) else logger)
        self._runs: dict[Run, LoggedRun] = {}  # runs in progress

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(self, *error: object) -> None:
        for run in list(self._runs):  # of a second Ctrl-C, or an error
            self._end(run, "stopped")
        self._call("close")

    def log_event(self, event: Event) -> None:
        """Log an event of a run; events of runs that are not executed, such as recorded ones, are ignored."""
        run = event.run
        if event.kind == "started":
            if run in self._runs:  # its worker was lost, and another one continues it
                self._end(run, "stopped")
            self._runs[run] = LoggedRun.of(event.config, event.seed, event.provenance, event.done)
            self._call("start", self._runs[run])
        elif run not in self._runs:
            return
        elif event.kind == "steps":
            if event.done % self.every == 0:
                self._call("metrics", self._runs[run], event.done, loss_metrics(event.loss, event.task))
        elif event.kind == "task":
            system = system_metrics(event.seconds, event.done, event.config.train.batch, event.memory)
            self._call("metrics", self._runs[run], event.done, {**task_metrics(event.scores), **system})
        else:
            if event.kind == "finished":
                scores = make_record(event.config, event.seed, event.results).scores
                self._call("metrics", self._runs[run], event.done, score_metrics(scores))
            self._end(run, event.kind, event.why)

    def _end(self, run: Run, status: str, reason: str = "") -> None:
        self._call("end", self._runs.pop(run), status, reason)

    def _call(self, method: str, *arguments: Any) -> None:
        for logger in list(self.loggers):
            try:
                getattr(logger, method)(*arguments)
            except (Exception, SystemExit) as error:
                self.loggers = [other for other in self.loggers if other is not logger]
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                name = type(logger).__name__
                _log.warning(f"{name}: failed and gets no further events ({reason}). The runs continue.")


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
    errors: list[BaseException] = []  # of the callback; they stop the runs
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
        silent = progress is None and signals.received[0] == signal.SIGTERM  # for which Python prints no message
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
    console: Console | None = None,
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
    folder = Path(path)
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
