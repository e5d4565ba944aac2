"""Scores after one task: on the test samples of each task, and on all tasks learned so far."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.metrics.multilabel import LabelMatrix, LabelStats, c_f1, mean_ap, o_f1

__all__ = ["TaskScores", "accuracy_scores", "label_scores", "rows_of"]

_LABEL_SCORES = {"c_f1": c_f1, "o_f1": o_f1, "map": mean_ap}


@dataclass(frozen=True)
class TaskScores:
    """Scores after a task, in percent, by name: ``accuracy``, or ``c_f1``, ``o_f1`` and ``map`` of multi-label data.

    Attributes:
        by_task: Scores on the test samples of each task; None where nothing was measured.
        so_far: Scores on all tasks learned so far. Accuracy is the mean over these tasks.

    Example:
        >>> TaskScores({"accuracy": [60.0, 80.0]}, {"accuracy": 70.0}).so_far["accuracy"]
        70.0
    """

    by_task: Mapping[str, Sequence[float | None]]
    so_far: Mapping[str, float]


def accuracy_scores(correct: Sequence[int | None], total: Sequence[int], task: int) -> TaskScores:
    """Return the accuracies after a task.

    Args:
        correct: Correct predictions on each task; None where nothing was measured.
        total: Test samples of each task.
        task: Index of the task that was learned last.

    Example:
        >>> accuracy_scores([60, 80, None], [100, 100, 100], task=1)
        TaskScores(by_task={'accuracy': [60.0, 80.0, None]}, so_far={'accuracy': 70.0})
    """
    values = [None if count is None else 100 * count / of for count, of in zip(correct, total, strict=True)]
    learned = [value for value in values[: task + 1] if value is not None]
    return TaskScores({"accuracy": values}, {"accuracy": fmean(learned)})


def label_scores(own: Sequence[LabelStats | None], tally: LabelStats) -> TaskScores:
    """Return the multi-label scores after a task.

    Args:
        own: Statistics on the test images of each task; None where nothing was measured.
        tally: Statistics on the test images of all tasks learned so far.

    Example:
        >>> stats = LabelStats(4, (1,), (2,), (2,), (0.5,))
        >>> label_scores([stats, None], stats).by_task["map"]
        [50.0, None]
    """
    by_task = {
        name: [None if stats is None else score(stats) for stats in own] for name, score in _LABEL_SCORES.items()
    }
    return TaskScores(by_task, {name: score(tally) for name, score in _LABEL_SCORES.items()})


def rows_of(counted: AccuracyMatrix | LabelMatrix) -> Iterator[TaskScores]:
    """Yield the scores after each task of a finished run.

    Example:
        >>> matrix = AccuracyMatrix(correct=[[90, None], [60, 80]], total=[100, 100])
        >>> [scores.so_far["accuracy"] for scores in rows_of(matrix)]
        [90.0, 70.0]
    """
    if isinstance(counted, LabelMatrix):
        yield from (label_scores(own, tally) for own, tally in zip(counted.own, counted.tally, strict=True))
    else:
        yield from (accuracy_scores(row, counted.total, task) for task, row in enumerate(counted.correct))
