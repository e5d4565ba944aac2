"""The work function of a launcher: it executes one unit of work in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from contnorm.bench.components import Component, components_of, share_components
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.runner import JobRunner
from contnorm.bench.engine.units import Unit
from contnorm.bench.local_imports import search_path, use_search_path
from contnorm.bench.user_code import code_hash, only_trusted, python_objects, trusted_files

__all__ = ["UnitWork"]


@dataclass
class UnitWork:
    """Executes units of work, in a process that may execute the same user code as the one that planned them.

    It can be pickled (with `contnorm.bench.engine.process_pool.pickle_objects`, which includes the user's modules) and
    called in another process. Data sets are loaded once per process.

    Attributes:
        environment: The environment of the runs, without its launcher.
        trusted: Files of user code that may be executed; None for all.
        path: The search path for local modules.
        components: Components that a program or a plugin registered in the process that planned the units.
        fingerprints: Fingerprints of the data sets in the process that planned the units, by name.
    """

    environment: RunEnvironment
    trusted: frozenset[Path] | None = None
    path: tuple[str, ...] = ()
    components: Sequence[Component] = ()
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    _runner: JobRunner | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, jobs: Sequence[Job], environment: RunEnvironment) -> UnitWork:
        """Return the work function of some jobs, with the permissions and the components of this process."""
        components = _components([job.config for job in jobs])
        return cls(replace(environment, launcher=None), trusted_files(), search_path(), components)

    def __call__(self, unit: Unit, stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute a unit; yields the events of its jobs.

        Args:
            unit: The unit.
            stop: Called often; once it returns True, the runs stop at the next step and are saved.
        """
        use_search_path(self.path)
        share_components(self.components)
        if self._runner is None:
            self._runner = JobRunner(self.environment)
        self._runner.environment = self.environment
        with only_trusted(self.trusted), python_objects(self.environment.objects):
            yield from self._runner.run(unit.jobs, stop)

    def replace_environment(self, **changes: Any) -> UnitWork:
        """Return the same work in another environment, such as on another device or with another folder of runs."""
        return replace(self, environment=replace(self.environment, **changes))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runner": None}  # data sets are loaded again


def _components(configs: Sequence[RunConfig]) -> list[Component]:
    """Return the components that a program or a plugin registered in this process, and that these settings name."""
    named = dict.fromkeys(component for config in set(configs) for component in components_of(config.as_dict()))
    used = [component for component in named if component.kind != "dataset"]  # data is sent, or loaded by the worker
    return [replace(component, code=code_hash(component.name, component.kind)) for component in used]
