"""How runs are followed: progress bars, loggers, and the exceptions that stop runs."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from contnorm.bench.config.defaults import changed, stream_name, varying
from contnorm.bench.config.schema import format_settings
from contnorm.bench.engine.run import Event, Run
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
from contnorm.bench.records import make_record
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
        contnorm.bench.api.progress.StopRun: 5 of 10 steps
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
        for run in list(self._runs):  # a second Ctrl-C, or an error, leaves some
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
            system = system_metrics(event.seconds, event.done, event.config.train.batch, event.peak_memory)
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
