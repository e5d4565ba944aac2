"""The measurements of a run, such as the rows of its accuracy matrix, and its results as they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from contnorm.bench.data.dataset import MultiLabelSource
from contnorm.bench.engine.evaluate import (
    CorrectCounts,
    LabelRow,
    count_correct,
    count_labels,
    count_with_task_moments,
    drift_of,
    memory_moments,
    oracle_moments,
)
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.metrics.memory_stats import take_census
from contnorm.bench.metrics.multilabel import LabelStats
from contnorm.bench.metrics.task_scores import TaskScores, accuracy_scores, label_scores
from contnorm.bench.models.norm_layers import count_norms
from contnorm.moments.reestimate import keeps_moments
from contnorm.norms.renorm import BatchRenormBase

Row = TypeVar("Row", CorrectCounts, LabelRow)

__all__ = ["Measurements", "add_accuracy_row", "add_label_row", "run_results", "task_scores"]


@dataclass
class Measurements:
    """The measurements of a run so far; saved in every checkpoint."""

    correct: list[list[int | None]] = field(default_factory=list)
    correct_running: list[list[int | None]] = field(default_factory=list)
    correct_task: list[list[int | None]] = field(default_factory=list)  # task-aware evaluation
    correct_task_running: list[list[int | None]] = field(default_factory=list)
    correct_memory: list[list[int | None]] = field(default_factory=list)  # beside the moments of the settings
    correct_task_memory: list[list[int | None]] = field(default_factory=list)
    before: list[int] | None = None
    before_task: list[int] | None = None
    labels: list[dict[str, Any]] = field(default_factory=list)  # of multi-label streams, instead of the above
    labels_running: list[dict[str, Any]] = field(default_factory=list)
    labels_memory: list[dict[str, Any]] = field(default_factory=list)
    drift: list[dict[str, dict[str, float]]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"train": 0.0, "evaluate": 0.0})
    train_by_task: list[float] = field(default_factory=list)  # seconds

    @property
    def tasks(self) -> int:
        """Number of tasks that were learned and evaluated."""
        return max(len(self.correct), len(self.labels))


def add_accuracy_row(
    trainer: Trainer, measured: Measurements, task: int, right: CorrectCounts, stop: Callable[[], bool]
) -> None:
    """Add a row of the accuracy matrix; only after all is measured, so that a stop leaves no partial row."""
    tasks = len(trainer.plan.ends)

    def count() -> CorrectCounts:
        return count_correct([trainer], [len(right.all)], stop)[0]

    other, drift = _measure(trainer, task, count, stop)
    memory = _measure_memory(trainer, task, count, stop)
    if trainer.config.evaluate.moments == "task" and keeps_moments(trainer.model):
        trainer.save_moments_of(task)
        other = count_with_task_moments(trainer, right, task, stop)
    counted = right if other is None else other
    if counted.all is not right.all:
        measured.correct_running.append(_padded(right.all, tasks))
    if counted.within is not right.within and right.within is not None:
        measured.correct_task_running.append(_padded(right.within, tasks))
    measured.correct.append(_padded(counted.all, tasks))
    if counted.within is not None:
        measured.correct_task.append(_padded(counted.within, tasks))
    if memory is not None:
        measured.correct_memory.append(_padded(memory.all, tasks))
        if memory.within is not None:
            measured.correct_task_memory.append(_padded(memory.within, tasks))
    if drift is not None:
        measured.drift.append(drift)


def add_label_row(trainer: Trainer, measured: Measurements, task: int, row: LabelRow, stop: Callable[[], bool]) -> None:
    """As `add_accuracy_row`, for multi-label streams."""
    tasks = len(trainer.plan.ends)

    def count() -> LabelRow:
        return count_labels([trainer], task + 1, stop)[0]

    other, drift = _measure(trainer, task, count, stop)
    memory = _measure_memory(trainer, task, count, stop)
    if other is not None:
        measured.labels_running.append(_label_row_json(row, tasks))
    measured.labels.append(_label_row_json(row if other is None else other, tasks))
    if memory is not None:
        measured.labels_memory.append(_label_row_json(memory, tasks))
    if drift is not None:
        measured.drift.append(drift)


def _measure(
    trainer: Trainer, task: int, count: Callable[[], Row], stop: Callable[[], bool]
) -> tuple[Row | None, dict[str, dict[str, float]] | None]:
    """Evaluate with oracle or memory moments, and measure the drift, if the settings say so.

    Args:
        trainer: The trainer.
        task: The task that was learned last.
        count: Evaluates the network as it is.
        stop: As in `count_correct`.

    Returns:
        The row of that evaluation, and the drift; None for what is not measured.
    """
    evaluate = trainer.config.evaluate
    other: Row | None = None
    drift = None
    if not keeps_moments(trainer.model):
        return other, drift
    if evaluate.moments == "oracle" or evaluate.drift:
        with oracle_moments(trainer, task + 1, stop) as done:
            drift = drift_of(done)
            other = count() if evaluate.moments == "oracle" else None
    if evaluate.moments == "memory":
        with memory_moments(trainer, task, stop):
            other = count()
    return other, drift


def _measure_memory(trainer: Trainer, task: int, count: Callable[[], Row], stop: Callable[[], bool]) -> Row | None:
    """Evaluate with memory moments beside those of the settings, if the run is to be; None if there are none.

    Moments that can't be estimated, such as those of a memory with one sample, do not end the run.
    """
    is_measured = trainer.memory_moments and trainer.config.evaluate.moments != "memory"
    if not is_measured or not trainer.plan.slots or not keeps_moments(trainer.model):
        return None
    try:
        estimated = memory_moments(trainer, task, stop)
    except ValueError:  # includes moments that are not finite
        return None
    with estimated:
        return count()


def _label_row_json(row: LabelRow, tasks: int) -> dict[str, Any]:
    by_task = [stats.to_json() for stats in row.own]
    return {"own": [*by_task, *([None] * (tasks - len(by_task)))], "tally": row.tally.to_json()}


def _padded(row: list[int], tasks: int) -> list[int | None]:
    return [*row, *([None] * (tasks - len(row)))]


def task_scores(trainer: Trainer, measured: Measurements, task: int) -> TaskScores:
    if measured.labels:
        row = measured.labels[task]
        own = [None if stats is None else LabelStats.from_json(stats) for stats in row["own"]]
        return label_scores(own, LabelStats.from_json(row["tally"]))
    return accuracy_scores(measured.correct[task], _test_samples(trainer), task)


def run_results(trainer: Trainer, measured: Measurements) -> dict[str, Any]:
    """Return the measured part of a run's record."""
    scores = _label_results if trainer.data.sequence.multi_label else _accuracy_results
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    seconds = {**measured.seconds, "train_by_task": measured.train_by_task}
    rest = {"drift": {"by_task": measured.drift}, "seconds": seconds, "parameters": parameters}
    rest["task_ends"] = list(trainer.plan.ends)  # steps, for logs that are made of records
    shares = [m.corrected_share() for m in trainer.model.modules() if isinstance(m, BatchRenormBase)]
    renorm = {"renorm": {"corrected_share": fmean(shares)}} if shares else {}
    norms = {"norms": count_norms(trainer.model)}
    reached, tasks = len(trainer.plan.ends), trainer.data.sequence.tasks
    part = {"reached": {"tasks": reached, "of": tasks}} if reached < tasks else {}
    return {**scores(trainer, measured), **rest, **renorm, **norms, **part, **_chosen_groups(trainer)}


def _chosen_groups(trainer: Trainer) -> dict[str, Any]:
    """Return the number of groups of each layer, if the settings have ``norm.groups=auto``."""
    if trainer.config.norm.groups != "auto":
        return {}
    groups = {name: getattr(module, "num_groups", None) for name, module in trainer.model.named_modules()}
    return {"norm_groups": {name: number for name, number in groups.items() if isinstance(number, int)}}


def _accuracy_results(trainer: Trainer, measured: Measurements) -> dict[str, Any]:
    matrix = {"correct": measured.correct, "total": _test_samples(trainer), "before": measured.before}
    results: dict[str, Any] = {"matrix": matrix}
    if measured.correct_running:
        results["matrix_running"] = {**matrix, "correct": measured.correct_running}
    for name, rows, before in (  # fewer rows if moments could not be estimated, or the run started without them
        ("matrix_memory", measured.correct_memory, measured.before),
        ("matrix_task_memory", measured.correct_task_memory, measured.before_task),
    ):
        if rows and len(rows) == len(measured.correct):
            results[name] = {**matrix, "correct": rows, "before": before}
    if len(measured.correct_task) == len(measured.correct):  # fewer if an older version started the run
        results["matrix_task"] = {**matrix, "correct": measured.correct_task, "before": measured.before_task}
    if measured.correct_task_running and len(measured.correct_task_running) == len(measured.correct):
        running = {"correct": measured.correct_task_running, "before": measured.before_task}
        results["matrix_task_running"] = {**matrix, **running}
    return results


def _test_samples(trainer: Trainer) -> list[int]:
    """Return the number of test samples of each task that is learned."""
    stream = trainer.data.sequence
    samples: list[int] = np.bincount(stream.test.task, minlength=stream.tasks)[: len(trainer.plan.ends)].tolist()
    return samples


def _label_results(trainer: Trainer, measured: Measurements) -> dict[str, Any]:
    """Return the label counts after each task, the class names and groups, and the memory's class counts."""
    source = trainer.data.sequence.source
    assert isinstance(source, MultiLabelSource)
    results: dict[str, Any] = {"labels": _label_matrix(measured.labels)}
    if measured.labels_running:
        results["labels_running"] = _label_matrix(measured.labels_running)
    if measured.labels_memory and len(measured.labels_memory) == len(measured.labels):
        results["labels_memory"] = _label_matrix(measured.labels_memory)
    results["classes"] = {"names": list(source.class_names), "groups": list(source.class_groups)}
    return {**results, "census": take_census(trainer.plan, trainer.data.sequence).to_json()}


def _label_matrix(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: [row[key] for row in rows] for key in ("own", "tally")}
