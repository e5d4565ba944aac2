"""The work function of a launcher: it executes one unit of work in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from contnorm.bench.components import Component, components_of, share_components
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.runner import JobRunner
from contnorm.bench.engine.units import Unit

__all__ = ["UnitWork"]


@dataclass
class UnitWork:
    """Executes units of work, in another process or in this one.

    It can be pickled (with `contnorm.bench.engine.process_pool.pickle_objects`, which includes the user's modules) and
    called in another process. Data sets are loaded once per process.

    Attributes:
        environment: The environment of the runs, without its launcher.
        components: Components that are registered or passed in the process that planned the units.
        fingerprints: Fingerprints of the data sets in the process that planned the units, by name.
    """

    environment: RunEnvironment
    components: Sequence[Component] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    _runner: JobRunner | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, jobs: Sequence[Job], environment: RunEnvironment) -> UnitWork:
        """Return the work function of some jobs, with the components of this process that they name."""
        configs = {job.config: None for job in jobs}
        components = dict.fromkeys(component for config in configs for component in components_of(config))
        return cls(replace(environment, launcher=None), list(components))

    def __call__(self, unit: Unit, stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute a unit; yields the events of its jobs.

        Args:
            unit: The unit.
            stop: Called often; once it returns True, the runs stop at the next step and are saved.
        """
        share_components(self.components)
        if self._runner is None:
            self._runner = JobRunner(self.environment)
        self._runner.environment = self.environment
        yield from self._runner.run(unit.jobs, stop)

    def replace_environment(self, **changes: Any) -> UnitWork:
        """Return the same work in another environment, such as on another device or with another folder of runs."""
        return replace(self, environment=replace(self.environment, **changes))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runner": None}  # data sets are loaded again
