"""The online loop: once through the stream, an evaluation after each task. Top to bottom, no callbacks.

It moves several lanes together and yields what happens to each; progress bars, stores and people read it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from contnorm.bench.data.multilabel import MultiLabelSource
from contnorm.bench.engine.checkpoint import Checkpoint, Checkpoints
from contnorm.bench.engine.checkpoint_writer import Saver
from contnorm.bench.engine.code_state import UNREADABLE
from contnorm.bench.engine.cuda_graph import Mover, mover_for
from contnorm.bench.engine.evaluate import (
    LabelRow,
    Right,
    count_labels,
    count_right,
    drift_of,
    oracle_moments,
)
from contnorm.bench.engine.trainer import Lane, LossNotFiniteError
from contnorm.bench.memory_stats import take_census
from contnorm.bench.models.norm_check import count_norms
from contnorm.bench.signals import StopRequested
from contnorm.bench.user_code import is_own_code
from contnorm.errors import UserError
from contnorm.layers.renorm import BatchRenormBase
from contnorm.moments.reestimate import NonFiniteMomentsError, keeps_moments

__all__ = ["Failed", "Finished", "Lost", "Progress", "Stopped", "Tally", "can_resume", "run_lanes"]


@dataclass(frozen=True)
class Progress:
    """So many steps are done, of so many."""

    done: int
    steps: int
    task: int
    loss: float


@dataclass(frozen=True)
class Finished:
    """The run is through: what goes into its record."""

    found: dict[str, Any]


@dataclass(frozen=True)
class Stopped:
    """The run was asked to stop after so many steps; ``saved`` of them are in its checkpoint, all where it is None."""

    done: int
    steps: int
    saved: int | None = None


@dataclass(frozen=True)
class Failed:
    """The run can't go on; others beside it do."""

    why: str


@dataclass(frozen=True)
class Lost(Failed):
    """Its loss, a parameter or a moment is no longer finite. The run has diverged, and would again."""


What = Progress | Finished | Stopped | Failed


@dataclass
class Tally:
    """What is counted along the way, and saved in every checkpoint."""

    correct: list[list[int | None]] = field(default_factory=list)
    correct_running: list[list[int | None]] = field(default_factory=list)
    correct_task: list[list[int | None]] = field(default_factory=list)  # with the task known
    before: list[int] | None = None
    before_task: list[int] | None = None
    labels: list[dict[str, Any]] = field(default_factory=list)  # of images of several labels, in place of the above
    labels_running: list[dict[str, Any]] = field(default_factory=list)
    drift: list[dict[str, dict[str, float]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "evaluate": 0.0})
    train_by_task: list[float] = field(default_factory=list)  # seconds

    @property
    def tasks(self) -> int:
        """How many tasks are learned and measured."""
        return max(len(self.correct), len(self.labels))


@dataclass
class _Run:
    """A lane with what belongs to it."""

    lane: Lane
    checkpoints: Checkpoints | None
    tally: Tally
    saved: int = 0  # steps in the last checkpoint

    def save(self, saver: Saver, required: bool = False) -> None:
        """Write a checkpoint, unless user code has state that it would not hold: then the one before stays."""
        if self.checkpoints is None:
            return
        changes = self.lane.code_changes()
        if changes:
            _warn_of_state(self.lane, changes)
            return
        progress = {"done": self.lane.done, "tally": vars(self.tally)}
        if self.lane.fresh_code_state:
            progress["code_state"] = self.lane.fresh_code_state
        saver.save(self.checkpoints, self.lane.state(), progress, required)
        self.saved = self.lane.done


def _warn_of_state(lane: Lane, changes: Sequence[str]) -> None:
    strategy = changes[0].startswith("strategy ")
    name = lane.config.strategy.name if strategy else lane.config.model.name
    _warn_once(
        f"{'strategy' if strategy else 'model'} {name!r}: keeps state of its own as it learns "
        f"({', '.join(change.partition(' ')[2] for change in changes[:3])}), which checkpoints do not hold. If it is "
        f"stopped, such a run resumes from its last checkpoint before that, or from step 0."
    )


@cache  # once, however many checkpoints and seeds there are
def _warn_once(text: str) -> None:
    logging.getLogger("contnorm").warning(text)


def can_resume(lane: Lane, checkpoint: Checkpoint) -> bool:
    """Whether a fresh lane can go on from a checkpoint: user code must have the state it had when it was written.

    A checkpoint of user code without a note of that state, as older versions wrote them, is not used.
    """
    fresh = lane.fresh_code_state
    return not fresh or (checkpoint.progress.get("code_state") == fresh and UNREADABLE not in fresh.values())


def resumed(lane: Lane, checkpoints: Checkpoints | None) -> Tally:
    """Load the newest checkpoint that can be used into a lane; returns what had been counted by then."""
    if checkpoints is None:
        return Tally()
    checkpoint = checkpoints.latest()
    _warn_of_broken(checkpoints, checkpoint)
    if checkpoint is None or not can_resume(lane, checkpoint):
        return Tally()
    lane.load(checkpoint.tensors, checkpoint.progress["done"])
    return Tally(**checkpoint.progress["tally"])


def _warn_of_broken(checkpoints: Checkpoints, usable: Checkpoint | None) -> None:
    problems = checkpoints.problems()
    if problems:
        next_step = "the run starts anew" if usable is None else f"resuming after step {usable.progress['done']}"
        logging.getLogger("contnorm").warning(
            f"{checkpoints.folder}: {next_step}, since a newer checkpoint can't be used ({'; '.join(problems)})."
        )


def run_lanes(
    lanes: Sequence[Lane],
    checkpoints: Sequence[Checkpoints | None] | None = None,
    every: int = 500,
    report_every: int = 20,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Lane, What]]:
    """Go through the stream with lanes of one shape, from their checkpoints, which must be of one step.

    Args:
        lanes: The runs.
        checkpoints: Where to save each; None for nowhere.
        every: Steps between checkpoints; one is also written at each task's end, but on a GPU the last's.
        report_every: Steps between reports, each of which looks at the losses.
        stop: Whether to stop. Asked at each report and checkpoint, between slow steps, and between the layers and
            batches of an evaluation. Then the runs are saved and end; an evaluation that was cut short is redone.
    """
    places = checkpoints or [None] * len(lanes)
    tallies = [resumed(lane, place) for lane, place in zip(lanes, places, strict=True)]
    runs = [_Run(*of_run, saved=of_run[0].done) for of_run in zip(lanes, places, tallies, strict=True)]
    with Saver() as saver:
        yield from _learn(runs, saver, every, report_every, stop)


def _learn(
    runs: list[_Run], saver: Saver, every: int, report_every: int, stop: Callable[[], bool]
) -> Iterator[tuple[Lane, What]]:
    ends = runs[0].lane.plan.ends
    try:
        _look_ahead(runs, stop)
    except StopRequested:
        yield from _stopped(runs, saver)
        return
    mover = mover_for([run.lane for run in runs])
    for task in range(min(run.tally.tasks for run in runs), len(ends)):
        while runs and runs[0].lane.done < ends[task]:
            done = runs[0].lane.done
            until = min(ends[task], (done // report_every + 1) * report_every, (done // every + 1) * every)
            started = time.perf_counter()
            losses = mover.advance(until - done, stop)
            _share_time(runs, task, started)
            verdicts = [_verdict(run.lane, task, loss) for run, loss in zip(runs, losses, strict=True)]
            going = _going(runs, verdicts, saver)
            yield from ((run.lane, verdict) for run, verdict in zip(runs, verdicts, strict=True))
            mover, runs = _mover_of(mover, runs, going), going
            if stop():
                yield from _stopped(runs, saver)
                return
            if until % every == 0 and until < ends[task]:
                _save(runs, saver)
        try:
            going = yield from _end_task(runs, task, saver, stop, last=task + 1 == len(ends))
        except StopRequested:  # what was not measured is measured again
            yield from _stopped(runs, saver)
            return
        mover, runs = _mover_of(mover, runs, going), going
    saver.finish([run.checkpoints for run in runs if run.checkpoints is not None])
    yield from ((run.lane, Finished(_found(run.lane, run.tally))) for run in runs)


def _mover_of(mover: Mover, runs: Sequence[_Run], going: Sequence[_Run]) -> Mover:
    """The mover of the runs that continue: a new one where some have ended."""
    return mover_for([run.lane for run in going]) if going and len(going) < len(runs) else mover


def _stopped(runs: Sequence[_Run], saver: Saver) -> Iterator[tuple[Lane, Stopped]]:
    """Save all runs; one without a step has nothing to save."""
    _save([run for run in runs if run.lane.done], saver)
    saver.flush()
    yield from ((run.lane, Stopped(run.lane.done, len(run.lane.plan.steps), run.saved)) for run in runs)


def _end_task(
    runs: list[_Run], task: int, saver: Saver, stop: Callable[[], bool], last: bool
) -> Generator[tuple[Lane, What], None, list[_Run]]:
    """Measure and save; after the last task in the other order, since what is measured then is recorded at once.

    Yields the runs that have diverged, and returns the others.
    """
    if last and runs and runs[0].lane.device.type == "cpu":  # a GPU learns it again sooner than it waits for a disk
        with suppress(UserError):  # without room for a checkpoint there may be room for the record
            _save(runs, saver, required=True)
    runs = yield from _end_diverged(runs, _nonfinite(runs, task), saver)
    # A run whose checkpoint was written after the evaluation has that row already.
    diverged = _evaluate([run for run in runs if run.tally.tasks == task], task, stop)
    runs = yield from _end_diverged(runs, diverged, saver)
    if not last:
        _save(runs, saver, required=True)
    return runs


def _end_diverged(
    runs: list[_Run], diverged: list[tuple[_Run, Lost]], saver: Saver
) -> Generator[tuple[Lane, What], None, list[_Run]]:
    """Yield the runs that have diverged, of which nothing more is saved, and return the others."""
    _forget([run for run, _ in diverged], saver)
    yield from ((run.lane, verdict) for run, verdict in diverged)
    return [run for run in runs if all(run is not ended for ended, _ in diverged)]


def _nonfinite(runs: Sequence[_Run], task: int) -> list[tuple[_Run, Lost]]:
    """The runs whose weights or running moments are not finite, which the last loss of a task can't show."""
    names = [(run, run.lane.nonfinite_tensor()) for run in runs]
    return [(run, Lost(_divergence_message(run.lane, repr(name), task))) for run, name in names if name is not None]


def _look_ahead(runs: Sequence[_Run], stop: Callable[[], bool]) -> None:
    """Measure every task before the first is learned, where that is asked for."""
    for run in runs:
        if run.lane.config.evaluate.ahead and run.tally.before is None:
            (right,) = count_right([run.lane], [len(run.lane.plan.ends)], stop)
            run.tally.before, run.tally.before_task = right


def _going(runs: Sequence[_Run], verdicts: Sequence[Progress | Failed], saver: Saver) -> list[_Run]:
    """The runs that go on; of the others nothing more is saved."""
    _forget([run for run, verdict in zip(runs, verdicts, strict=True) if isinstance(verdict, Failed)], saver)
    return [run for run, verdict in zip(runs, verdicts, strict=True) if isinstance(verdict, Progress)]


def _verdict(lane: Lane, task: int, loss: float) -> Progress | Failed:
    try:
        return Progress(lane.done, len(lane.plan.steps), task, lane.check(loss))
    except LossNotFiniteError as error:
        return Lost(str(error))


def _save(runs: Sequence[_Run], saver: Saver, required: bool = False) -> None:
    for run in runs:
        run.save(saver, required)


def _forget(runs: Sequence[_Run], saver: Saver) -> None:
    """Of runs that are over nothing more is saved."""
    saver.forget([run.checkpoints for run in runs if run.checkpoints is not None])


def _share_time(runs: Sequence[_Run], task: int, started: float) -> None:
    """Lanes that moved together share the time it took."""
    share = (time.perf_counter() - started) / len(runs)
    for run in runs:
        by_task = run.tally.train_by_task
        by_task.extend([0.0] * (task + 1 - len(by_task)))
        by_task[task] += share
        run.tally.seconds["train"] += share


def _evaluate(runs: Sequence[_Run], task: int, stop: Callable[[], bool]) -> list[tuple[_Run, Lost]]:
    """One row after a task: with the running moments, and, where asked for, with the oracle's.

    Returns the runs that turn out to have diverged: the last update before an evaluation can make weights so large
    that no loss shows it yet, but the moments of the data do.
    """
    started = time.perf_counter()
    lanes = [run.lane for run in runs]
    diverged = []
    if lanes and lanes[0].data.stream.several_labels:
        rows: Sequence[LabelRow | Right] = count_labels(lanes, task + 1, stop)
    else:
        tasks = [len(lane.plan.ends) if lane.config.evaluate.ahead else task + 1 for lane in lanes]
        rows = count_right(lanes, tasks, stop)
    for run, row in zip(runs, rows, strict=True):
        try:
            if isinstance(row, LabelRow):
                _write_label_row(run, task, row, stop)
            else:
                _write_row(run, task, row, stop)
        except NonFiniteMomentsError as error:
            what = f"the moments of the training data at layer {error.layer!r}"
            diverged.append((run, Lost(_divergence_message(run.lane, what, task))))
    for run in runs:
        run.tally.seconds["evaluate"] += (time.perf_counter() - started) / len(runs)
    return diverged


def _divergence_message(lane: Lane, what: str, task: int) -> str:
    return (
        f"seed {lane.seed}: {what}: not finite at step {lane.done} of {len(lane.plan.steps)} (after task {task}). Most "
        f"likely the learning rate of {lane.config.train.lr} is too high for norm {lane.config.norm.name!r}."
    )


def _write_row(run: _Run, task: int, right: Right, stop: Callable[[], bool]) -> None:
    """Nothing is written before all is measured: a stop on the way leaves no half of a row."""
    lane, tally, evaluate = run.lane, run.tally, run.lane.config.evaluate
    tasks = len(lane.plan.ends)
    running = _padded(right.all, tasks)
    if (evaluate.moments == "oracle" or evaluate.drift) and keeps_moments(lane.model):
        with oracle_moments(lane, task + 1, stop) as done:
            drift = drift_of(done)
            if evaluate.moments == "oracle":
                (right,) = count_right([lane], [len(right.all)], stop)
                tally.correct_running.append(running)
            tally.drift.append(drift)
    tally.correct.append(_padded(right.all, tasks))
    if right.within is not None:
        tally.correct_task.append(_padded(right.within, tasks))


def _write_label_row(run: _Run, task: int, row: LabelRow, stop: Callable[[], bool]) -> None:
    """As `_write_row`, where images have several labels."""
    lane, tally, evaluate = run.lane, run.tally, run.lane.config.evaluate
    tasks = len(lane.plan.ends)
    running = _in_json(row, tasks)
    if (evaluate.moments == "oracle" or evaluate.drift) and keeps_moments(lane.model):
        with oracle_moments(lane, task + 1, stop) as done:
            drift = drift_of(done)
            if evaluate.moments == "oracle":
                (row,) = count_labels([lane], task + 1, stop)
                tally.labels_running.append(running)
            tally.drift.append(drift)
    tally.labels.append(_in_json(row, tasks))


def _in_json(row: LabelRow, tasks: int) -> dict[str, Any]:
    own = [stats.to_json() for stats in row.own]
    return {"own": [*own, *([None] * (tasks - len(own)))], "tally": row.tally.to_json()}


def _padded(row: list[int], tasks: int) -> list[int | None]:
    return [*row, *([None] * (tasks - len(row)))]


def _found(lane: Lane, tally: Tally) -> dict[str, Any]:
    measured = _labels_found if lane.data.stream.several_labels else _answers_found
    parameters = sum(parameter.numel() for parameter in lane.model.parameters())
    seconds = {**tally.seconds, "train_by_task": tally.train_by_task}
    rest = {"drift": {"by_task": tally.drift}, "seconds": seconds, "parameters": parameters}
    shares = [m.corrected_share() for m in lane.model.modules() if isinstance(m, BatchRenormBase)]
    renorm = {"renorm": {"corrected_share": fmean(shares)}} if shares else {}
    norms = {"norms": count_norms(lane.model)} if is_own_code(lane.config.model.name) else {}
    reached, tasks = len(lane.plan.ends), lane.data.stream.tasks
    part = {"reached": {"tasks": reached, "of": tasks}} if reached < tasks else {}
    return {**measured(lane, tally), **rest, **renorm, **norms, **part, **_chosen_groups(lane)}


def _chosen_groups(lane: Lane) -> dict[str, Any]:
    """The groups of each layer, where the settings left them to be chosen."""
    if lane.config.norm.groups != "auto":
        return {}
    groups = {name: getattr(module, "num_groups", None) for name, module in lane.model.named_modules()}
    return {"norm_groups": {name: number for name, number in groups.items() if isinstance(number, int)}}


def _answers_found(lane: Lane, tally: Tally) -> dict[str, Any]:
    stream = lane.data.stream
    total = np.bincount(stream.test.task, minlength=stream.tasks)[: len(lane.plan.ends)].tolist()
    matrix = {"correct": tally.correct, "total": total, "before": tally.before}
    found: dict[str, Any] = {"matrix": matrix}
    if tally.correct_running:
        found["matrix_running"] = {**matrix, "correct": tally.correct_running}
    if len(tally.correct_task) == len(tally.correct):  # fewer where it was begun by a version that did not count them
        found["matrix_task"] = {**matrix, "correct": tally.correct_task, "before": tally.before_task}
    return found


def _labels_found(lane: Lane, tally: Tally) -> dict[str, Any]:
    """What was counted after each task, what the labels are, and what the memory held of them."""
    source = lane.data.stream.source
    assert isinstance(source, MultiLabelSource)
    found: dict[str, Any] = {"labels": _label_matrix(tally.labels)}
    if tally.labels_running:
        found["labels_running"] = _label_matrix(tally.labels_running)
    found["classes"] = {"names": list(source.class_names), "groups": list(source.class_groups)}
    return {**found, "census": take_census(lane.plan, lane.data.stream).to_json()}


def _label_matrix(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: [row[key] for row in rows] for key in ("own", "tally")}
