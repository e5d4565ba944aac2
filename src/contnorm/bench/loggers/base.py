"""The interface of loggers, and the run that they log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contnorm.bench.config.defaults import resolved_settings, stream_name
from contnorm.bench.config.schema import RunConfig, StreamConfig

__all__ = ["LoggedRun", "Logger"]


@dataclass(frozen=True)
class LoggedRun:
    """A run, as loggers see it.

    Attributes:
        hash: Hash of the settings.
        seed: Seed of the run.
        settings: All settings with the values that the run uses, by dotted key.
        provenance: Versions, device, data and commit, as in the record.
        done: Steps done before; 0 unless the run resumes from a checkpoint. A logger continues the log of a run that
            resumes, and drops or skips what was logged after this step: these steps are repeated.
        record: Seal of the record if the log is made of a record; None while the run is executed.

    Example:
        >>> run = LoggedRun.of(RunConfig(), seed=3)
        >>> run.name, run.id == f"{run.hash}-3", run.settings["train.batch"]
        ('permuted-mnist single bn seed 3', True, 10)
    """

    hash: str
    seed: int
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    done: int = 0
    record: str | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        seed: int,
        provenance: Mapping[str, Any] | None = None,
        done: int = 0,
        record: str | None = None,
    ) -> LoggedRun:
        """Make it of resolved settings."""
        return cls(config.hash, seed, resolved_settings(config), provenance or {}, done, record)

    @property
    def id(self) -> str:
        """Hash and seed, which identify the run."""
        return f"{self.hash}-{self.seed}"

    @property
    def experiment(self) -> str:
        """Stream, strategy and norm: a short description, the same for all seeds."""
        stream = stream_name(StreamConfig(self.settings["stream.name"], self.settings.get("stream.source")))
        return f"{stream} {self.settings['strategy.name']} {self.settings['norm.name']}"

    @property
    def name(self) -> str:
        """Description and seed."""
        return f"{self.experiment} seed {self.seed}"

    @property
    def folder(self) -> str:
        """Relative path that is unique to the run and can be read."""
        return f"{re.sub(r'[^A-Za-z0-9.+-]+', '-', self.experiment)}-{self.hash}/seed-{self.seed}"


class Logger:
    """Base class of loggers. Override the methods that you need; by default they do nothing.

    One logger gets the events of all runs of a call. Several runs may be in progress at the same time, so a logger
    keeps what belongs to a run by `LoggedRun.id`. It is called in the process that starts the runs, between their
    steps. If it raises an error, one warning is logged, the logger gets no further events, and the runs continue.

    Names of metrics: ``loss`` and ``task`` every N steps; ``accuracy/task_0``, ``accuracy/task_1`` ... and
    ``accuracy/average`` (over the tasks learned so far) after each task, or ``c_f1/...``, ``o_f1/...`` and ``map/...``
    for multi-label data; ``system/...`` after each task; ``score/acc``, ``score/fm`` ... at the end. Scores and
    accuracies are in percent. Values that are not finite are left out.

    Example:
        >>> class Print(Logger):
        ...     def metrics(self, run, step, values):
        ...         print(run.seed, step, values)
        >>> Print().metrics(LoggedRun.of(RunConfig(), seed=0), 50, {"loss": 0.5})
        0 50 {'loss': 0.5}
    """

    def start(self, run: LoggedRun) -> None:
        """Start the log of a run, or continue it if ``run.done`` is not 0."""

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        """Log metrics by name, after a number of steps. It may be called several times with the same step."""

    def end(self, run: LoggedRun, status: str, reason: str = "") -> None:
        """End the log of a run.

        Args:
            run: The run.
            status: ``"finished"``, ``"diverged"``, ``"stopped"`` (it can be resumed) or ``"failed"``.
            reason: Why it diverged or failed.
        """

    def close(self) -> None:
        """Release resources, after the last run."""
