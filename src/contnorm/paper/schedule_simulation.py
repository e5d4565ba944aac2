"""The time of the whole paper on many GPUs, simulated from recorded times.

``python -m contnorm.paper.schedule_simulation RECORDS...`` prints it, with the costs of the given records. The runs of
all recipes are planned as a launcher plans them: groups of lanes, longest first. Each GPU takes the next group when it
is free. No run is executed.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from contnorm.bench.cost import CostModel, Timing
from contnorm.bench.engine.execute import group_runs
from contnorm.bench.engine.run import Run
from contnorm.bench.records import load_runs
from contnorm.paper.cells import cells_of
from contnorm.paper.recipe import find_recipe, recipe_names
from contnorm.paper.recipe_runs import config_of

__all__ = [
    "GPUS",
    "LANES",
    "Schedule",
    "choose_lanes",
    "format_schedules",
    "format_widths",
    "load_costs",
    "paper_jobs",
    "simulate",
]

GPUS = (1, 8, 64, 512)
WIDTHS_ON = 64  # GPUs for which sizes of groups are compared
LANES = (1, 2, 4, 8, 16)  # more hardly save time, and may not fit into the memory of a GPU
SEEDS = 5
START = 20.0  # seconds until a worker process trains: Python, torch, the GPU and its kernels
LOAD = 5.0  # seconds to read a decoded data set, once per worker


@dataclass(frozen=True)
class Schedule:
    """A simulated execution.

    Attributes:
        gpus: Number of GPUs.
        lanes: Largest number of runs in a group.
        units: Number of groups.
        seconds: Time until the last group ends.
        busy: Seconds of training of all GPUs together.
        longest: Seconds of the longest group.
    """

    gpus: int
    lanes: int
    units: int
    seconds: float
    busy: float
    longest: float

    @property
    def utilization(self) -> float:
        """Share of the GPUs' time that they train."""
        return self.busy / (self.gpus * self.seconds)


def paper_jobs(root: Path = Path("data"), seeds: int = SEEDS) -> list[Run]:
    """Return the runs of all recipes, each once: every setting with every seed.

    Example:
        >>> jobs = paper_jobs(seeds=1)
        >>> len(jobs) == len(set(jobs)) > 200
        True
    """
    cells = [cell for name in recipe_names() for cell in cells_of(find_recipe(name))]
    configs = dict.fromkeys(config_of(cell, root) for cell in cells)
    return [Run(config, seed) for config in configs for seed in range(seeds)]


def load_costs(records: Iterable[str | Path]) -> CostModel:
    """Return the costs of runs on a GPU, from the records of folders and archives."""
    timings = [Timing.of(record) for path in records for record in load_runs(path).records]
    return CostModel([timing for timing in timings if timing is not None], "cuda")


def simulate(
    units: Sequence[tuple[float, Sequence[Run]]], gpus: int, *, start: float = START, load: float = LOAD
) -> tuple[float, float]:
    """Execute units in their order: each GPU takes the next one when it is free.

    Args:
        units: Seconds and runs of each group, longest first.
        gpus: Number of GPUs, each with one worker.
        start: Seconds until a worker can train.
        load: Seconds until a worker has read a data set.

    Returns:
        The seconds until the last unit ends, and the seconds of training of all GPUs together.

    Example:
        >>> simulate([(3.0, ()), (2.0, ()), (2.0, ())], 2, start=0.0)
        (4.0, 7.0)
    """
    workers: list[tuple[float, int]] = [(0.0, worker) for worker in range(min(gpus, len(units)))]
    sources: list[set[str]] = [set() for _ in workers]
    end, started = 0.0, [False] * len(workers)
    for seconds, runs in units:
        free, worker = heapq.heappop(workers)
        free += 0.0 if started[worker] else start
        started[worker] = True
        new = {run.source for run in runs} - sources[worker]
        sources[worker] |= new
        free += load * len(new) + seconds
        end = max(end, free)
        heapq.heappush(workers, (free, worker))
    return end, sum(seconds for seconds, _ in units)


def choose_lanes(
    jobs: Sequence[Run], costs: CostModel, gpus: int, lanes: Sequence[int] = LANES, *, start: float = START
) -> Schedule:
    """Return the fastest schedule on some GPUs over the possible sizes of a group."""
    schedules = []
    for size in lanes:
        groups = group_runs(jobs, min(size, -(-len(jobs) // gpus)))
        seconds_of = [(costs.group_seconds([run.config for run in group]), group) for group in groups]
        units = sorted(seconds_of, key=lambda unit: -unit[0])
        seconds, busy = simulate(units, gpus, start=start)
        schedules.append(Schedule(gpus, size, len(units), seconds, busy, units[0][0]))
    return min(schedules, key=lambda schedule: schedule.seconds)


def format_schedules(schedules: Sequence[Schedule]) -> str:
    """Return a table in Markdown.

    Example:
        >>> print(format_schedules([Schedule(1, 8, 100, 7200.0, 7100.0, 400.0)]).splitlines()[-1])
        | 1 | 2 h 0 min | 1.0 | 99 % | 100 groups of up to 8 | 6 min 40 s |
    """
    first = schedules[0].seconds * schedules[0].gpus
    lines = [
        "| GPUs | time | speedup | GPUs train | work | longest group |",
        "|---:|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {one.gpus} | {_duration(one.seconds)} | {first / one.seconds:.1f} | {100 * one.utilization:.0f} % | "
        f"{one.units} groups of up to {one.lanes} | {_duration(one.longest)} |"
        for one in schedules
    ]
    return "\n".join(lines)


def format_widths(schedules: Sequence[Schedule]) -> str:
    """Return a table in Markdown of schedules with different sizes of groups."""
    lines = ["| lanes | time | training of all GPUs together | longest group |", "|---:|---:|---:|---:|"]
    lines += [
        f"| {one.lanes} | {_duration(one.seconds)} | {_duration(one.busy)} | {_duration(one.longest)} |"
        for one in schedules
    ]
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def main(records: Sequence[str]) -> None:
    """Print the table for the costs of some records."""
    jobs, costs = paper_jobs(), load_costs(records)
    longest = max({job.config for job in jobs}, key=costs.seconds)
    print(f"{len(jobs)} runs; the longest takes {_duration(costs.seconds(longest))} alone ({longest.stream.name}).")
    print(format_schedules([choose_lanes(jobs, costs, gpus) for gpus in GPUS]))
    print(format_widths([choose_lanes(jobs, costs, WIDTHS_ON, [lanes]) for lanes in LANES]))


if __name__ == "__main__":
    main(sys.argv[1:])
