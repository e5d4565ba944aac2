"""The interface of launchers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork

__all__ = ["Launcher"]


class Launcher(ABC):
    """Executes units of work on workers: processes of this machine, or of many.

    The scheduler plans the units, after it has checked the settings of all runs, and reads the events. A launcher
    decides which worker gets which unit, and what to do about a worker that is lost.

    Attributes:
        remote: Whether workers may be on other machines, which have devices that this one may not have.

    Example:
        >>> from contnorm import bench
        >>> class OneAfterTheOther(bench.Launcher):
        ...     "Executes all units in this process."
        ...     remote = False
        ...     def launch(self, work, units, stop):
        ...         for unit in units:
        ...             yield from work(unit, stop)
        >>> stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> bench.run(stream, norm="bn", seeds=2, launcher=OneAfterTheOther()).accuracy.shape
        (2, 2, 2)
    """

    remote: ClassVar[bool] = True

    def workers(self) -> int | None:
        """Return the number of units that are executed at a time, so that there are enough of them; None if unknown."""
        return None

    @abstractmethod
    def launch(self, work: UnitWork, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute units; yields the events of all jobs as they arrive.

        Args:
            work: ``work(unit, stop)`` executes one unit and yields its events. Send it to workers with
                `contnorm.bench.engine.process_pool.pickle_objects`; ``work.environment`` has the device, the CPU
                threads per run and the folder of runs.
            units: The units, longest first.
            stop: Called often; once it returns True, no unit is started, and the running ones are asked to stop: the
                ``stop`` that their ``work`` was called with returns True.
        """
