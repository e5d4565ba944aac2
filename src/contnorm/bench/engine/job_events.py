"""Events of jobs: what a run has done, with the job it belongs to. The scheduler and the launchers yield them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from contnorm.bench.engine.events import Failed, Finished, Started, Steps, Stopped, TaskDone
from contnorm.bench.engine.job import Job

__all__ = ["Event", "Waiting"]


@dataclass(frozen=True)
class Waiting:
    """Another process holds the run; this one waits for it."""

    holder: str


@dataclass(frozen=True)
class Event:
    """An event of a run.

    Attributes:
        job: The run.
        what: The event; the string ``"recorded"`` if the run has a record already.
        path: The path of its record; None without a folder of records.
    """

    job: Job
    what: Started | Steps | TaskDone | Finished | Stopped | Failed | Waiting | str
    path: Path | None
