"""The online loop: once through the stream, an evaluation after each task. Top to bottom, no callbacks.

It yields what happens; progress bars, stores and people read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from contnorm.engine.checkpoint import Checkpoints
from contnorm.engine.evaluate import count_right, drift_of, keeps_moments, oracle_moments
from contnorm.engine.lane import Lane

__all__ = ["Finished", "Progress", "Stopped", "run_lane"]


@dataclass(frozen=True)
class Progress:
    """So many steps are done, of so many."""

    done: int
    steps: int
    task: int
    loss: float | None = None


@dataclass(frozen=True)
class Finished:
    """The run is through: what goes into its record."""

    found: dict[str, Any]


@dataclass(frozen=True)
class Stopped:
    """The run was asked to stop and is saved after so many steps."""

    done: int
    steps: int


@dataclass
class _Tally:
    """What is counted along the way, and saved in every checkpoint."""

    correct: list[list[int | None]] = field(default_factory=list)
    correct_running: list[list[int | None]] = field(default_factory=list)
    before: list[int] | None = None
    drift: list[dict[str, dict[str, float]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "evaluate": 0.0})


def run_lane(
    lane: Lane,
    checkpoints: Checkpoints | None = None,
    every: int = 500,
    report_every: int = 20,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Progress | Finished | Stopped]:
    """Go through the stream, from the last checkpoint where there is one.

    Args:
        lane: The run.
        checkpoints: Where to save; None for nowhere.
        every: Steps between checkpoints; one is also written at each task's end.
        report_every: Steps between reports, each of which looks at the loss.
        stop: Asked after each step; where it says so, the run is saved and ends.
    """
    tally = _resumed(lane, checkpoints)
    steps = len(lane.plan.steps)
    if lane.config.evaluate.ahead and tally.before is None:
        tally.before = count_right(lane, lane.data.stream.tasks)
    for task in range(len(tally.correct), lane.data.stream.tasks):
        while lane.done < lane.plan.ends[task]:
            started = time.perf_counter()
            loss = lane.step()
            reporting = lane.done % report_every == 0 or lane.done == lane.plan.ends[task]
            value = lane.check(loss) if reporting else None
            tally.seconds["train"] += time.perf_counter() - started
            if reporting:
                yield Progress(lane.done, steps, task, value)
            stopping = stop()
            due = lane.done % every == 0 and lane.done < lane.plan.ends[task]  # a task's end has its own
            if checkpoints is not None and (stopping or due):
                _save(lane, tally, checkpoints)
            if stopping:
                yield Stopped(lane.done, steps)
                return
        started = time.perf_counter()
        _evaluate(lane, task, tally)
        tally.seconds["evaluate"] += time.perf_counter() - started
        if checkpoints is not None:
            _save(lane, tally, checkpoints)
    yield Finished(_found(lane, tally))


def _evaluate(lane: Lane, task: int, tally: _Tally) -> None:
    """One row after a task: with the running moments, and, where asked for, with the oracle's."""
    tasks = lane.data.stream.tasks
    measured = tasks if lane.config.evaluate.ahead else task + 1
    row = _padded(count_right(lane, measured), tasks)
    wants_oracle = lane.config.evaluate.moments == "oracle"
    if not (wants_oracle or lane.config.evaluate.drift) or not keeps_moments(lane.model):
        tally.correct.append(row)
        return
    with oracle_moments(lane, task + 1) as done:
        tally.drift.append(drift_of(done))
        if wants_oracle:
            tally.correct_running.append(row)
            row = _padded(count_right(lane, measured), tasks)
    tally.correct.append(row)


def _padded(row: list[int], tasks: int) -> list[int | None]:
    return [*row, *([None] * (tasks - len(row)))]


def _found(lane: Lane, tally: _Tally) -> dict[str, Any]:
    total = [int((lane.data.stream.test.task == task).sum()) for task in range(lane.data.stream.tasks)]
    matrix = {"correct": tally.correct, "total": total, "before": tally.before}
    found: dict[str, Any] = {"matrix": matrix, "drift": {"by_task": tally.drift}, "seconds": tally.seconds}
    if tally.correct_running:
        found["matrix_running"] = {**matrix, "correct": tally.correct_running}
    return found


def _save(lane: Lane, tally: _Tally, checkpoints: Checkpoints) -> None:
    checkpoints.save(lane.state(), {"done": lane.done, "tally": vars(tally)})


def _resumed(lane: Lane, checkpoints: Checkpoints | None) -> _Tally:
    found = checkpoints.latest() if checkpoints is not None else None
    if found is None:
        return _Tally()
    lane.load(found.tensors, found.progress["done"])
    return _Tally(**found.progress["tally"])
