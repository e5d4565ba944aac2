"""The joblib launcher: a task of joblib for each unit, in its processes or in another engine that joblib is set to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.base import Launcher
from contnorm.bench.launchers.batch_unit import BatchUnit, stop_file
from contnorm.bench.optional_libraries import import_library
from contnorm.errors import UserError

__all__ = ["JoblibLauncher"]


class JoblibLauncher(Launcher):
    """Executes units with ``joblib.Parallel``. Their events arrive when a unit ends, not while it runs.

    Args:
        n_jobs: Number of processes, as in joblib; None for the number of lanes on a CPU, and for one on a GPU, where a
            process executes that many runs.
        backend: Backend of joblib; None for processes, or for that of an open ``joblib.parallel_config``.
    """

    remote: ClassVar[bool] = False

    def __init__(self, n_jobs: int | None = None, backend: str | None = None) -> None:
        self._joblib = import_library("joblib", "joblib")
        if n_jobs is not None and (isinstance(n_jobs, bool) or not isinstance(n_jobs, int) or n_jobs == 0):
            raise UserError(f"n_jobs={n_jobs!r}: use a number of processes, or -1 for the number of cores.")
        self.n_jobs, self.backend = n_jobs, backend
        try:
            self._parallel(1)
        except ValueError as error:
            raise UserError(f"backend={backend!r}: can't be used ({error}).") from error

    def _parallel(self, n_jobs: int) -> Any:
        return self._joblib.Parallel(n_jobs, backend=self.backend, return_as="generator_unordered", batch_size=1)

    def launch(self, work: UnitWork, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute units; after a request to stop, those that run save, and the others return at once."""
        default = work.environment.lanes if work.environment.device.type == "cpu" else 1
        parallel = self._parallel(default if self.n_jobs is None else self.n_jobs)
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
