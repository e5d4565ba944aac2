"""Units of work: the jobs that one worker executes together, planned longest first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from contnorm.bench.cost import CostModel, recorded_timings
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.run_dir import RunDir

__all__ = ["JobGroup", "Unit", "group_jobs", "plan_units"]


@dataclass(frozen=True)
class Unit:
    """Jobs that one worker executes together: the lanes of one GPU, or one job on a CPU.

    Attributes:
        jobs: The jobs.
        seconds: Estimated seconds that the unit keeps its worker busy.
    """

    jobs: tuple[Job, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class JobGroup:
    """Jobs that run together, and the number of steps that each of them has done."""

    jobs: list[Job]
    done: int


def group_jobs(jobs: Sequence[Job], environment: RunEnvironment, workers: int | None = None) -> Iterator[JobGroup]:
    """Group jobs that can run together: same stream, training settings (except lr) and step; at most ``lanes``.

    With a number of workers the groups are made smaller if some workers would have none.
    """
    by_key: dict[tuple[object, ...], list[Job]] = {}
    steps: dict[Job, int] = {}
    store = None if environment.runs is None else environment.store
    for job in jobs:
        steps[job] = 0 if store is None else RunDir.of(job, store).checkpoints.latest_step()
        key = (job.config.stream, replace(job.config.train, lr=1.0), steps[job])
        by_key.setdefault(key, []).append(job)
    size = environment.lanes if environment.device.type == "cuda" else 1
    size = min(size, math.ceil(len(jobs) / workers)) if workers else size
    for group in by_key.values():
        for i in range(0, len(group), size):
            yield JobGroup(group[i : i + size], steps[group[0]])


def plan_units(
    jobs: Sequence[Job], environment: RunEnvironment, workers: int | None = None, costs: CostModel | None = None
) -> list[Unit]:
    """Return the units of some jobs, longest first; those of equal length are in the order of their jobs.

    Args:
        jobs: The jobs.
        environment: Their environment, with the lanes of a unit.
        workers: Number of units that are executed at a time; None if it is unknown.
        costs: Estimates of the seconds of runs; None for those of the records in the folder of runs.
    """
    if costs is None:
        costs = CostModel(recorded_timings(environment.runs), environment.device.type)
    groups = [tuple(group.jobs) for group in group_jobs(jobs, environment, workers)]
    units = [Unit(group, costs.group_seconds([job.config for job in group])) for group in groups]
    return sorted(units, key=lambda unit: -unit.seconds)
