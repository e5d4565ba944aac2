"""The launcher of this machine: one process on a GPU, a pool of processes on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.process_pool import run_in_processes
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.base import Launcher

__all__ = ["LocalLauncher"]


class LocalLauncher(Launcher):
    """Executes units in processes of this machine. Units of a GPU, and single ones, are executed in this process.

    Example:
        >>> import torch
        >>> from pathlib import Path
        >>> environment = RunEnvironment(None, Path("data"), torch.device("cpu"), lanes=4)
        >>> LocalLauncher().processes(3, environment)
        3
    """

    remote: ClassVar[bool] = False

    def processes(self, jobs: int, environment: RunEnvironment) -> int:
        """Return the number of worker processes for some jobs; 1 if this process executes them itself."""
        return min(environment.lanes, jobs) if environment.device.type == "cpu" else 1

    def launch(self, work: UnitWork, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute units in a pool of worker processes."""
        yield from run_in_processes(work, units, self.processes(len(units), work.environment), stop)
