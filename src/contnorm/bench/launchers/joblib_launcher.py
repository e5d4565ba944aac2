"""The joblib launcher: a task of joblib for each unit, in its processes or in another engine that joblib is set to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.base import Launcher
from contnorm.bench.launchers.batch_unit import BatchUnit, stop_file
from contnorm.bench.loggers.registry import import_library

__all__ = ["JoblibLauncher"]


class JoblibLauncher(Launcher):
    """Executes units with ``joblib.Parallel``. Their events arrive when a unit ends, not while it runs.

    Args:
        n_jobs: Number of processes, as in joblib; None for the number of lanes.
        backend: Backend of joblib; None for processes, or for that of an open ``joblib.parallel_config``.
    """

    remote: ClassVar[bool] = False

    def __init__(self, n_jobs: int | None = None, backend: str | None = None) -> None:
        self.n_jobs, self.backend = n_jobs, backend
        self._joblib = import_library("joblib", "joblib")

    def launch(self, work: UnitWork, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute units; after a request to stop, those that run save, and the others return at once."""
        n_jobs = work.environment.lanes if self.n_jobs is None else self.n_jobs
        parallel = self._joblib.Parallel(n_jobs, backend=self.backend, return_as="generator_unordered", batch_size=1)
        with tempfile.TemporaryDirectory() as folder, stop_file(Path(folder), "stop", stop) as file:
            calls = BatchUnit.of(work, list(units), file)
            results = parallel(self._joblib.delayed(call)() for call in calls)
            try:
                for result in results:
                    yield from result.events
                    result.raise_error()
            except Exception:
                file.touch()
                for _ in results:  # the others save their runs
                    pass
                raise
