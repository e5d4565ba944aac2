"""Sends the events of runs to loggers."""

from __future__ import annotations

import logging
import os
import random
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contnorm.bench.engine.events import Diverged, Failed, Finished, Started, Steps, Stopped, TaskDone
from contnorm.bench.engine.job import Job
from contnorm.bench.engine.scheduler import Event
from contnorm.bench.loggers import (
    LOGGERS,
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
from contnorm.errors import UserError, unknown

__all__ = ["LogOptions", "Loggers", "RunLogs", "restored_random_state"]

Loggers = str | Logger | Sequence[str | Logger]


@dataclass(frozen=True)
class LogOptions:
    """Which loggers to use, and how often losses are logged.

    Attributes:
        loggers: Names and objects.
        every: Steps between losses.
        folder: Folder of logs; None for the default one.
    """

    loggers: tuple[str | Logger, ...] = ()
    every: int = 50
    folder: Path | None = None

    @classmethod
    def of(cls, log: Loggers | None, every: int = 50, folder: str | Path | None = None) -> LogOptions:
        """Check the arguments of `bench.run`.

        Raises:
            UserError: If a logger is neither a known name nor an object of a subclass of `Logger`, or the interval is
                not a positive whole number.
        """
        loggers = () if log is None else (log,) if isinstance(log, str | Logger) else log
        if not isinstance(loggers, Sequence):
            raise UserError(f"log={log!r}: use a name such as 'csv', an object of a bench.Logger, or a list of them.")
        for logger in loggers:
            if isinstance(logger, str) and logger not in LOGGERS:
                raise unknown("logger", logger, LOGGERS)
            if isinstance(logger, type) or not isinstance(logger, str | Logger):
                raise UserError(
                    f"log={logger!r}: use a name such as 'csv', or an object of a subclass of bench.Logger."
                )
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise UserError(f"log_every={every!r}: use a whole number of steps, 1 or more.")
        if folder is not None and (not isinstance(folder, str | os.PathLike) or not os.fspath(folder)):
            raise UserError(f"log_dir={folder!r}: use a folder, or None for the one next to the runs.")
        repeated = [name for name in loggers if isinstance(name, str) and list(loggers).count(name) > 1]
        if repeated:
            raise UserError(f"log: {repeated[0]!r} is given twice. Name each logger once.")
        return cls(tuple(loggers), every, None if folder is None else Path(folder).expanduser())

    def open(self, runs: Path | None) -> RunLogs:
        """Create the loggers.

        Args:
            runs: Folder of the runs, next to which the default folder of logs is.

        Raises:
            UserError: If the library of a logger is missing, or the logger can't be used.
        """
        folder = self.folder or default_log_folder(runs)
        if any(isinstance(logger, str) for logger in self.loggers) and folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is not a folder, and logs can't be written there. Use another one (--log-dir).")
        return RunLogs(
            [create_logger(logger, folder) if isinstance(logger, str) else logger for logger in self.loggers],
            self.every,
            self.command_line,
        )

    @property
    def command_line(self) -> str:
        """The options of a command that logs to the same place; objects can't be named."""
        names = [name for name in self.loggers if isinstance(name, str)]
        if not names:
            return ""
        folder = "" if self.folder is None else f" --log-dir {shlex.quote(str(self.folder))}"
        every = "" if self.every == LogOptions.every else f" --log-every {self.every}"
        return "".join(f" --log {name}" for name in names) + every + folder


class RunLogs:
    """Calls loggers with the events of runs. An error of a logger is reported once, and ends this logger only.

    Args:
        loggers: The loggers.
        every: Steps between losses.
        command_line: Options of a command that logs to the same place.
    """

    def __init__(self, loggers: Sequence[Logger], every: int, command_line: str = "") -> None:
        self.loggers, self.every, self.command_line = list(loggers), every, command_line
        self._runs: dict[Job, LoggedRun] = {}  # runs in progress
        self._steps: dict[Job, int] = {}  # steps of these runs in total

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(self, *error: object) -> None:
        for job in list(self._runs):  # of a second Ctrl-C, or an error
            self._end(job, "stopped")
        self._call(lambda logger: logger.close())

    def log_event(self, event: Event) -> None:
        """Log an event of a run; events of runs that are not executed, such as recorded ones, are ignored."""
        job, what = event.job, event.what
        if not self.loggers:
            return
        if isinstance(what, Started):
            if job in self._runs:  # its worker was lost, and another one continues it
                self._end(job, "stopped")
            run = self._runs[job] = LoggedRun.of(job.config, job.seed, what.provenance, what.done)
            self._steps[job] = what.steps
            self._call(lambda logger: logger.start(run))
        elif job not in self._runs:
            return
        elif isinstance(what, Steps):
            if what.done % self.every == 0:
                self._metrics(job, what.done, loss_metrics(what.loss, what.task))
        elif isinstance(what, TaskDone):
            system = system_metrics(what.seconds, what.done, job.config.train.batch, what.memory)
            self._metrics(job, what.done, {**task_metrics(what.scores), **system})
        else:
            self._log_end(job, what)

    def _log_end(self, job: Job, what: Any) -> None:
        if isinstance(what, Finished):
            record = make_record(job.config, job.seed, what.results)
            self._metrics(job, self._steps[job], score_metrics(record.scores))
            self._end(job, "finished")
        elif isinstance(what, Stopped):
            self._end(job, "stopped")
        elif isinstance(what, Failed):
            self._end(job, "diverged" if isinstance(what, Diverged) else "failed", what.why)

    def _metrics(self, job: Job, step: int, values: dict[str, float]) -> None:
        run = self._runs[job]
        self._call(lambda logger: logger.metrics(run, step, dict(values)))

    def _end(self, job: Job, status: str, reason: str = "") -> None:
        run = self._runs.pop(job)
        self._call(lambda logger: logger.end(run, status, reason))

    def _call(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self.loggers):
            try:
                with restored_random_state():
                    call(logger)
            except (Exception, SystemExit) as error:
                self.loggers = [other for other in self.loggers if other is not logger]
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                logging.getLogger("contnorm").warning(
                    f"{type(logger).__name__}: failed and gets no further events ({reason}). The runs continue."
                )


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restore the global random generators: user code in this process may use them, and loggers and callbacks too."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
