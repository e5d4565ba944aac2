"""Loggers of runs: which ones are used, and what they get."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

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
from contnorm.errors import UserError, check_count

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
        """Check the arguments of `bench.run`."""
        loggers = () if log is None else (log,) if isinstance(log, str | Logger) else tuple(log)
        for logger in loggers:
            if not isinstance(logger, str | Logger):
                raise UserError(
                    f"log={logger!r}: use a name such as 'csv', or an object of a subclass of bench.Logger."
                )
        return cls(loggers, check_count(every, "log_every"), None if folder is None else Path(folder).expanduser())

    def open(self, runs: Path | None) -> RunLogs:
        """Create the loggers; the default folder of logs is next to that of the runs."""
        folder = self.folder or default_log_folder(runs)
        created = [create_logger(logger, folder) if isinstance(logger, str) else logger for logger in self.loggers]
        return RunLogs(created, self.every)


class RunLogs:
    """Calls loggers with the events of runs. An error of a logger is reported once, and ends this logger only.

    Args:
        loggers: The loggers.
        every: Steps between losses.
    """

    def __init__(self, loggers: Sequence[Logger], every: int) -> None:
        self.loggers, self.every = list(loggers), every
        self._runs: dict[Run, LoggedRun] = {}  # runs in progress

    def __enter__(self) -> RunLogs:
        return self

    def __exit__(self, *error: object) -> None:
        for run in list(self._runs):  # of a second Ctrl-C, or an error
            self._end(run, "stopped")
        self._call(lambda logger: logger.close())

    def log_event(self, event: Event) -> None:
        """Log an event of a run; events of runs that are not executed, such as recorded ones, are ignored."""
        run = event.run
        if not self.loggers:
            return
        if event.kind == "started":
            if run in self._runs:  # its worker was lost, and another one continues it
                self._end(run, "stopped")
            logged = self._runs[run] = LoggedRun.of(event.config, event.seed, event.provenance, event.done)
            self._call(lambda logger: logger.start(logged))
        elif run not in self._runs:
            return
        elif event.kind == "steps":
            if event.done % self.every == 0:
                self._metrics(event, loss_metrics(event.loss, event.task))
        elif event.kind == "task":
            system = system_metrics(event.seconds, event.done, event.config.train.batch, event.memory)
            self._metrics(event, {**task_metrics(event.scores), **system})
        else:
            if event.kind == "finished":
                self._metrics(event, score_metrics(make_record(event.config, event.seed, event.results).scores))
            self._end(run, event.kind, event.why)

    def _metrics(self, event: Event, values: dict[str, float]) -> None:
        run = self._runs[event.run]
        self._call(lambda logger: logger.metrics(run, event.done, dict(values)))

    def _end(self, run: Run, status: str, reason: str = "") -> None:
        logged = self._runs.pop(run)
        self._call(lambda logger: logger.end(logged, status, reason))

    def _call(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self.loggers):
            try:
                with restored_random_state():
                    call(logger)
            except (Exception, SystemExit) as error:
                self.loggers = [other for other in self.loggers if other is not logger]
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                logging.getLogger("contnorm").warning(
                    f"{type(logger).__name__}: failed and gets no further events ({reason}). The runs continue; "
                    f"log their records afterwards with `contnorm export`."
                )


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Restore the global random generators: user code in this process may use them, and callbacks too."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
