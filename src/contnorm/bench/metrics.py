"""Scores of continual learning, from the counts in a record or from plain accuracies. Needs no torch.

``a(i, j)`` is the accuracy on task j after learning task i. Each definition of a score has its own name: several
definitions of "forgetting" are in use, and tables are comparable only if they use the same one.

For a training loop of your own, collect a (tasks, tasks) matrix of accuracies: row i after learning task i, column j on
the test samples of task j.

Example:
    >>> matrix = [[91.0], [78.0, 88.0], [70.0, 81.0, 90.0]]
    >>> round(average_accuracy(matrix), 2), round(forgetting(matrix), 2), round(learning_accuracy(matrix), 2)
    (80.33, 14.0, 89.67)

| name in records | best value over | averaged over |
|---|---|---|
| `fm` | rows from the task's own to the last but one (the paper's, as it is used) | all tasks but the last |
| `fm_ctn` | all rows before the last, also those before it was learned (the paper's, literally) | all but the last |
| `fm_facil` | all rows before the last, zero where nothing was measured | all but the last |
| `fm_mammoth` | all rows, the last included, zero where nothing was measured; so never negative | all but the last |
| `fm_raptor` | as `fm_mammoth` | all tasks |
| `fm_first` | the row where the task was learned; the negative of `bwt` | all but the last |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from statistics import fmean
from typing import Any

__all__ = [
    "FORGETTING",
    "AccuracyMatrix",
    "average_accuracy",
    "average_incremental_accuracy",
    "backward_transfer",
    "forgetting",
    "forward_transfer",
    "learning_accuracy",
]

Row = Sequence[int | None]


class Accuracies:
    """Accuracies after each task, in percent or as fractions; None where nothing was measured.

    Args:
        rows: (T, up to T) accuracies: row i after task i, one column per task.
        before: (T,) accuracies of the untrained network; None if not measured.
    """

    def __init__(self, rows: Iterable[Iterable[Any]], before: Iterable[Any] | None = None) -> None:
        self.rows = [[_accuracy(value) for value in row] for row in rows]
        self.before = [_accuracy(value) for value in (() if before is None else before)]
        self.tasks = len(self.rows)
        if not self.rows or any(len(row) > self.tasks for row in self.rows):
            lengths = [len(row) for row in self.rows]
            raise ValueError(f"accuracies: expected a (tasks, tasks) matrix, got rows of {lengths}.")

    def at_or_zero(self, row: int, task: int) -> float:
        """Accuracy, or 0 if it was not measured."""
        return (self.rows[row][task] if task < len(self.rows[row]) else None) or 0.0

    def at(self, row: int, task: int) -> float:
        """Accuracy; a `ValueError` if it was not measured."""
        value = self.rows[row][task] if task < len(self.rows[row]) else None
        if value is None:
            raise ValueError(
                f"accuracies: the one on task {task} after task {row} is missing. The setting evaluate.ahead=true "
                f"measures tasks before they are learned."
            )
        return value

    def untrained(self) -> list[float]:
        """Accuracies of the untrained network; a `ValueError` if they were not measured."""
        values = [value for value in self.before if value is not None]
        if len(values) != self.tasks:
            raise ValueError(
                "accuracies: forward transfer needs those of the untrained network on every task, which the setting "
                "evaluate.ahead=true measures."
            )
        return values


def _accuracy(value: Any) -> float | None:
    number = None if value is None else float(value)
    if number is None or isnan(number):
        return None
    if not 0 <= number <= 100:
        raise ValueError(f"accuracies: {number} is not from 0 to 100, nor a fraction from 0 to 1.")
    return number


@dataclass(frozen=True)
class AccuracyMatrix:
    """Counts of correct predictions: row i after task i, one column per task; None where nothing was measured.

    Attributes:
        correct: (T, T) correct predictions.
        total: (T,) test samples of each task.
        before: (T,) correct predictions of the untrained network; None if not measured.

    Example:
        >>> matrix = AccuracyMatrix(correct=[[90, None], [60, 80]], total=[100, 100])
        >>> average_accuracy(matrix), learning_accuracy(matrix), forgetting(matrix)
        (70.0, 85.0, 30.0)
    """

    correct: Sequence[Row]
    total: Sequence[int]
    before: Row | None = None

    def __post_init__(self) -> None:
        tasks = len(self.total)
        rows = [*self.correct, *([self.before] if self.before is not None else [])]
        if len(self.correct) != tasks or any(len(row) != tasks for row in rows):
            shape = f"{len(self.correct)} rows of {sorted({len(row) for row in rows})}"
            raise ValueError(f"AccuracyMatrix: {tasks} tasks need {tasks} rows of {tasks} counts, got {shape}.")
        if tasks == 0 or any(count < 1 for count in self.total):
            raise ValueError(f"AccuracyMatrix: every task needs test samples, got total={list(self.total)}.")
        for i, row in enumerate(rows):
            for j, count in enumerate(row):
                if count is not None and not 0 <= count <= self.total[j]:
                    raise ValueError(
                        f"AccuracyMatrix: {count} right answers in row {i}, task {j}, of {self.total[j]} samples."
                    )

    @property
    def tasks(self) -> int:
        return len(self.total)

    @cached_property
    def percent(self) -> Accuracies:
        """Accuracies in percent."""
        *rows, before = (
            [None if count is None else 100 * count / total for count, total in zip(row, self.total, strict=False)]
            for row in [*self.correct, self.before or ()]
        )
        return Accuracies(rows, before)

    def at(self, row: int, task: int) -> float:
        """Accuracy in percent; a `ValueError` if it was not measured."""
        return self.percent.at(row, task)

    def scores(self) -> dict[str, float]:
        """The scores that the measurements allow, by name; forward transfer needs those of later tasks, too."""
        values = {}
        for name in SCORES:
            with suppress(ValueError):
                values[name] = score(self, name)
        return values


# Tables print the first line of the docstring of a forgetting score as its definition.


def acc(m: Accuracies) -> float:
    """ACC: the mean accuracy on all tasks at the end."""
    return fmean(m.at(m.tasks - 1, j) for j in range(m.tasks))


def la(m: Accuracies) -> float:
    """LA: the mean accuracy on each task right after it was learned."""
    return fmean(m.at(i, i) for i in range(m.tasks))


def acc_so_far(m: Accuracies | AccuracyMatrix) -> list[float]:
    """Mean accuracy on all tasks learned so far, after each task.

    Example:
        >>> acc_so_far(AccuracyMatrix(correct=[[90, None], [60, 80]], total=[100, 100]))
        [90.0, 70.0]
    """
    return [fmean(m.at(i, j) for j in range(i + 1)) for i in range(m.tasks)]


def aia(m: Accuracies) -> float:
    """Mean over the stream (average incremental accuracy): the mean over time of the accuracy on the tasks so far."""
    return fmean(acc_so_far(m))


def fm(m: Accuracies) -> float:
    """The paper's FM: a task's best accuracy since it was learned, before the last task, minus that at the end."""
    last = m.tasks - 1
    return _mean(max(m.at(i, j) for i in range(j, last)) - m.at(last, j) for j in range(last))


def fm_ctn(m: Accuracies) -> float:
    """The paper's formula literally: the best over all rows before the last, also before the task was learned."""
    last = m.tasks - 1
    return _mean(max(m.at(i, j) for i in range(last)) - m.at(last, j) for j in range(last))


def fm_facil(m: Accuracies) -> float:
    """FACIL's and Renate's: the best over the rows before the last, zero where nothing was measured."""
    last = m.tasks - 1
    return _mean(max(m.at_or_zero(i, j) for i in range(last)) - m.at(last, j) for j in range(last))


def fm_mammoth(m: Accuracies) -> float:
    """Mammoth's and PyCIL's: the best over all rows, so that it is never negative."""
    return _mean(_from_best(m, j) for j in range(m.tasks - 1))


def fm_raptor(m: Accuracies) -> float:
    """RaptorMai's: as mammoth's, but averaged over all tasks, so smaller by (T - 1) / T."""
    return _mean(_from_best(m, j) for j in range(m.tasks))


def fm_first(m: Accuracies) -> float:
    """Avalanche's: from the accuracy when the task had just been learned."""
    return -bwt(m)


def bwt(m: Accuracies) -> float:
    """Backward transfer: mean change of a task's accuracy from right after it was learned to the end."""
    last = m.tasks - 1
    return _mean(m.at(last, j) - m.at(j, j) for j in range(last))


def fwt(m: Accuracies) -> float:
    """Forward transfer: accuracy on a task right before it is learned, minus that of the untrained network."""
    untrained = m.untrained()
    return _mean(m.at(j - 1, j) - untrained[j] for j in range(1, m.tasks))


def _from_best(m: Accuracies, task: int) -> float:
    return max(m.at_or_zero(i, task) for i in range(m.tasks)) - m.at(m.tasks - 1, task)


def _mean(values: Iterable[float]) -> float:
    """Mean; NaN for no values, such as the forgetting of a single task."""
    numbers = list(values)
    return fmean(numbers) if numbers else float("nan")


SCORES: dict[str, Callable[[Accuracies], float]] = {
    function.__name__: function
    for function in (acc, aia, fm, la, fm_ctn, fm_facil, fm_mammoth, fm_raptor, fm_first, bwt, fwt)
}

MAIN_SCORES = ("acc", "aia", "fm", "la")  # those of every table
SCORE_TITLES = {"acc": "ACC", "aia": "mean over the stream", "fm": "FM", "la": "LA", "bwt": "BWT", "fwt": "FWT"}
SCORE_TITLES |= {"c_f1": "C-F1", "o_f1": "O-F1", "map": "mAP", "fm_c_f1": "FM C-F1", "fm_o_f1": "FM O-F1"}
SCORE_TITLES |= {"fm_map": "FM mAP"}


def score_title(name: str) -> str:
    """Name of a score in a sentence or a table.

    Example:
        >>> score_title("acc"), score_title("aia"), score_title("fm_mammoth")
        ('ACC', 'mean over the stream', 'fm_mammoth')
    """
    return SCORE_TITLES.get(name, name)


def score(matrix: AccuracyMatrix, name: str) -> float:
    """Compute a score by name, in percent.

    Example:
        >>> score(AccuracyMatrix([[90, None], [60, 80]], [100, 100]), "bwt")
        -30.0
    """
    if name not in SCORES:
        raise ValueError(f"score: unknown score {name!r}. There are {', '.join(SCORES)}.")
    return SCORES[name](matrix.percent)


# Definitions of `forgetting`, by name.
FORGETTING: dict[str, Callable[[Accuracies], float]] = {
    "paper": fm,
    "literal": fm_ctn,
    "facil": fm_facil,
    "max": fm_mammoth,
    "max_all_tasks": fm_raptor,
    "after_learning": fm_first,
}


Matrix = AccuracyMatrix | Iterable[Iterable[Any]]


def _accuracies(matrix: Matrix, untrained: Iterable[Any] | None = None) -> Accuracies:
    return matrix.percent if isinstance(matrix, AccuracyMatrix) else Accuracies(matrix, untrained)


def average_accuracy(matrix: Matrix) -> float:
    """Average accuracy (ACC): mean accuracy on all tasks after the last task.

    Args:
        matrix: (tasks, tasks) accuracies: row i is measured after task i, column j on the test samples of task j. A
            NumPy array, nested lists, or an `AccuracyMatrix`. None, NaN and the ends of short rows are missing values;
            entries above the diagonal (tasks that are not learned yet) can be missing.

    Returns:
        The score, in the scale of the accuracies. Scores of records and of an `AccuracyMatrix` are in percent (0 to
        100), so pass percentages to compare with them.

    Raises:
        ValueError: If an accuracy that the score needs is missing, or if a value is not an accuracy.

    Example:
        >>> average_accuracy([[90.0], [60.0, 80.0]])
        70.0
    """
    return acc(_accuracies(matrix))


def learning_accuracy(matrix: Matrix) -> float:
    """Learning accuracy (LA): mean accuracy on each task right after it was learned.

    Args:
        matrix: (tasks, tasks) accuracies; see `average_accuracy`.

    Example:
        >>> learning_accuracy([[90.0], [60.0, 80.0]])
        85.0
    """
    return la(_accuracies(matrix))


def average_incremental_accuracy(matrix: Matrix) -> float:
    """Mean over the stream: mean, over all rows, of the mean accuracy on the tasks learned so far.

    Args:
        matrix: (tasks, tasks) accuracies; see `average_accuracy`.

    Example:
        >>> average_incremental_accuracy([[90.0], [60.0, 80.0]])
        80.0
    """
    return aia(_accuracies(matrix))


def forgetting(matrix: Matrix, definition: str = "paper") -> float:
    """Forgetting: mean drop of the accuracy on each task, from a reference value to that after the last task.

    | definition | name in records | reference value of a task | averaged over |
    |---|---|---|---|
    | ``"paper"`` | ``fm`` | best since it was learned, without the last row | all tasks but the last |
    | ``"literal"`` | ``fm_ctn`` | best of all rows but the last, also before it was learned | all tasks but the last |
    | ``"facil"`` | ``fm_facil`` | the same, 0 for missing values | all tasks but the last |
    | ``"max"`` | ``fm_mammoth`` | best of all rows, 0 for missing values; never negative | all tasks but the last |
    | ``"max_all_tasks"`` | ``fm_raptor`` | the same | all tasks |
    | ``"after_learning"`` | ``fm_first`` | accuracy right after it was learned | all tasks but the last |

    ``"literal"`` is the formula as printed in the paper. It differs from ``"paper"`` only if a task was better before
    it was learned, and needs all values above the diagonal.

    Args:
        matrix: (tasks, tasks) accuracies; see `average_accuracy`.
        definition: One of `FORGETTING`.

    Returns:
        The score, in the scale of the accuracies; NaN for a single task, except with ``"max_all_tasks"``.

    Example:
        >>> matrix = [[80.0], [90.0, 70.0], [60.0, 75.0, 85.0]]
        >>> {name: forgetting(matrix, name) for name in ("paper", "max", "after_learning")}
        {'paper': 12.5, 'max': 15.0, 'after_learning': 7.5}
    """
    if definition not in FORGETTING:
        raise ValueError(f"forgetting: unknown definition {definition!r}. Use one of {', '.join(FORGETTING)}.")
    return FORGETTING[definition](_accuracies(matrix))


def backward_transfer(matrix: Matrix) -> float:
    """Backward transfer (BWT): mean change of the accuracy on each task, from right after it was learned to the end.

    Args:
        matrix: (tasks, tasks) accuracies; see `average_accuracy`.

    Example:
        >>> backward_transfer([[80.0], [90.0, 70.0], [60.0, 75.0, 85.0]])
        -7.5
    """
    return bwt(_accuracies(matrix))


def forward_transfer(matrix: Matrix, untrained: Iterable[Any] | None = None) -> float:
    """Forward transfer (FWT): mean accuracy on each task right before it is learned, minus the untrained accuracy.

    Args:
        matrix: (tasks, tasks) accuracies; see `average_accuracy`. The values right above the diagonal are needed.
        untrained: (tasks,) accuracies of the untrained network; an `AccuracyMatrix` has them itself.

    Example:
        >>> forward_transfer([[80.0, 12.0, 10.0], [90.0, 70.0, 15.0], [60.0, 75.0, 85.0]], untrained=[10.0, 8.0, 5.0])
        7.0
    """
    return fwt(_accuracies(matrix, untrained))


# --- Scores after one task -------------------------------------------------------------------------------------------


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
