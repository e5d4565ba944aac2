"""The accuracy matrix of a run and the continual-learning scores computed from it.

``a(i, j)`` is the accuracy on task j after learning task i. Each definition of a score has its own name: several
definitions of "forgetting" are in use, and tables are comparable only if they use the same one.

The functions `average_accuracy`, `learning_accuracy`, `forgetting`, `backward_transfer`, `forward_transfer` and
`average_incremental_accuracy` compute the same scores from an `AccuracyMatrix` or from plain numbers, for training
loops outside of the bench.

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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import fmean
from typing import Any

__all__ = [
    "FORGETTING",
    "MAIN_SCORES",
    "SCORES",
    "SCORE_TITLES",
    "AccuracyMatrix",
    "acc_so_far",
    "average_accuracy",
    "average_incremental_accuracy",
    "backward_transfer",
    "forgetting",
    "forward_transfer",
    "learning_accuracy",
    "score",
]

Row = Sequence[int | None]


@dataclass(frozen=True)
class AccuracyMatrix:
    """Counts of correct predictions: row i after task i, one column per task; None where nothing was measured.

    Attributes:
        correct: (T, T) correct predictions.
        total: (T,) test samples of each task.
        before: (T,) correct predictions of the untrained network; None if not measured.

    Example:
        >>> matrix = AccuracyMatrix(correct=[[90, None], [60, 80]], total=[100, 100])
        >>> acc(matrix), la(matrix), fm(matrix)
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

    def at(self, row: int, task: int) -> float:
        """Accuracy in percent.

        Raises:
            ValueError: If it was not measured.
        """
        count = self.correct[row][task]
        if count is None:
            raise ValueError(
                f"AccuracyMatrix: task {task} was not measured after task {row}. "
                f"Run with --set evaluate.ahead=true to measure tasks before they are learned."
            )
        return 100 * count / self.total[task]

    def at_or_zero(self, row: int, task: int) -> float:
        """Return the accuracy in percent, or 0 if it was not measured."""
        return 0.0 if self.correct[row][task] is None else self.at(row, task)

    def untrained(self) -> list[float]:
        """Return the accuracies of the untrained network in percent.

        Raises:
            ValueError: If they were not measured.
        """
        if self.before is None or any(count is None for count in self.before):
            raise ValueError(
                "AccuracyMatrix: fwt needs the accuracies before the first task. Run with --set evaluate.ahead=true."
            )
        return [100 * (count or 0) / total for count, total in zip(self.before, self.total, strict=True)]


# Tables print the first line of the docstring of a forgetting score as its definition.


def acc(m: Accuracies) -> float:
    """ACC: the mean accuracy on all tasks at the end."""
    return fmean(m.at(m.tasks - 1, j) for j in range(m.tasks))


def la(m: Accuracies) -> float:
    """LA: the mean accuracy on each task right after it was learned."""
    return fmean(m.at(i, i) for i in range(m.tasks))


def acc_so_far(m: Accuracies) -> list[float]:
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


def score(matrix: AccuracyMatrix, name: str) -> float:
    """Compute a score by name, in percent.

    Example:
        >>> score(AccuracyMatrix([[90, None], [60, 80]], [100, 100]), "bwt")
        -30.0
    """
    if name not in SCORES:
        raise ValueError(f"score: unknown score {name!r}. There are {', '.join(SCORES)}.")
    return SCORES[name](matrix)


# Definitions of `forgetting`, by name.
FORGETTING: dict[str, Callable[[Accuracies], float]] = {
    "paper": fm,
    "literal": fm_ctn,
    "facil": fm_facil,
    "max": fm_mammoth,
    "max_all_tasks": fm_raptor,
    "after_learning": fm_first,
}


class _PlainAccuracies:
    """Accuracies from nested sequences or an array: None and NaN are missing, and so are the ends of short rows."""

    def __init__(self, matrix: Iterable[Iterable[Any]], before: Iterable[Any] | None) -> None:
        rows = [[_accuracy(value) for value in row] for row in matrix]
        self.tasks = len(rows)
        if not rows or any(len(row) > self.tasks for row in rows):
            raise ValueError(f"accuracies: expected a (tasks, tasks) matrix, got rows of {[len(row) for row in rows]}.")
        self._rows = [row + [None] * (self.tasks - len(row)) for row in rows]
        self._before = [_accuracy(value) for value in (() if before is None else before)]

    def at(self, row: int, task: int) -> float:
        value = self._rows[row][task]
        if value is None:
            raise ValueError(f"accuracies: the accuracy on task {task} after task {row} is missing, but needed.")
        return value

    def at_or_zero(self, row: int, task: int) -> float:
        return self._rows[row][task] or 0.0

    def untrained(self) -> list[float]:
        values = [value for value in self._before if value is not None]
        if len(values) != self.tasks:
            raise ValueError("untrained: forward transfer needs the accuracy of the untrained network on every task.")
        return values


Accuracies = AccuracyMatrix | _PlainAccuracies
Matrix = AccuracyMatrix | Iterable[Iterable[Any]]


def _accuracy(value: Any) -> float | None:
    number = None if value is None else float(value)
    if number is None or isnan(number):
        return None
    if not 0 <= number <= 100:
        raise ValueError(f"accuracies: {number} is not from 0 to 100, nor a fraction from 0 to 1.")
    return number


def _accuracies(matrix: Matrix, untrained: Iterable[Any] | None = None) -> Accuracies:
    return matrix if isinstance(matrix, AccuracyMatrix) else _PlainAccuracies(matrix, untrained)


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
