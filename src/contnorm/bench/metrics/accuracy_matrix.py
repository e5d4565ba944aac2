"""The accuracy matrix of a run and the continual-learning scores computed from it.

``a(i, j)`` is the accuracy on task j after learning task i. Each definition of a score has its own name: seven
definitions of "forgetting" are in use, and tables are comparable only if they use the same one.

| name | best value over | averaged over |
|---|---|---|
| `fm` | rows from the task's own to the last but one (the paper's, as it is used) | all tasks but the last |
| `fm_ctn` | all rows before the last, also those before it was learned (the paper's, literally) | all but the last |
| `fm_facil` | all rows before the last, zero where nothing was measured | all but the last |
| `fm_mammoth` | all rows, the last included, zero where nothing was measured; so never negative | all but the last |
| `fm_raptor` | as `fm_mammoth` | all tasks |
| `fm_first` | the row where the task was learned; the negative of `bwt` | all but the last |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

__all__ = ["SCORES", "AccuracyMatrix", "acc_so_far", "score"]

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
                f"Run with the tasks not learned yet evaluated too."
            )
        return 100 * count / self.total[task]

    def at_or_zero(self, row: int, task: int) -> float:
        return 0.0 if self.correct[row][task] is None else self.at(row, task)


# Tables print the first line of the docstring of a forgetting score as its definition.


def acc(m: AccuracyMatrix) -> float:
    """ACC: the mean accuracy on all tasks at the end."""
    return fmean(m.at(m.tasks - 1, j) for j in range(m.tasks))


def la(m: AccuracyMatrix) -> float:
    """LA: the mean accuracy on each task right after it was learned."""
    return fmean(m.at(i, i) for i in range(m.tasks))


def acc_so_far(m: AccuracyMatrix) -> list[float]:
    """Mean accuracy on all tasks learned so far, after each task.

    Example:
        >>> acc_so_far(AccuracyMatrix(correct=[[90, None], [60, 80]], total=[100, 100]))
        [90.0, 70.0]
    """
    return [fmean(m.at(i, j) for j in range(i + 1)) for i in range(m.tasks)]


def aia(m: AccuracyMatrix) -> float:
    """Average incremental accuracy: the mean over time of the mean accuracy on the tasks so far."""
    return fmean(acc_so_far(m))


def fm(m: AccuracyMatrix) -> float:
    """FM, the paper's: from the best since the task was learned, the last row excluded, to the end."""
    last = m.tasks - 1
    return _mean(max(m.at(i, j) for i in range(j, last)) - m.at(last, j) for j in range(last))


def fm_ctn(m: AccuracyMatrix) -> float:
    """The paper's formula literally: the best over all rows before the last, also before the task was learned."""
    last = m.tasks - 1
    return _mean(max(m.at(i, j) for i in range(last)) - m.at(last, j) for j in range(last))


def fm_facil(m: AccuracyMatrix) -> float:
    """FACIL's and Renate's: the best over the rows before the last, zero where nothing was measured."""
    last = m.tasks - 1
    return _mean(max(m.at_or_zero(i, j) for i in range(last)) - m.at(last, j) for j in range(last))


def fm_mammoth(m: AccuracyMatrix) -> float:
    """Mammoth's and PyCIL's: the best over all rows, so that it is never negative."""
    return _mean(_from_best(m, j) for j in range(m.tasks - 1))


def fm_raptor(m: AccuracyMatrix) -> float:
    """RaptorMai's: as mammoth's, but averaged over all tasks, so smaller by (T - 1) / T."""
    return _mean(_from_best(m, j) for j in range(m.tasks))


def fm_first(m: AccuracyMatrix) -> float:
    """Avalanche's: from the accuracy when the task had just been learned."""
    return -bwt(m)


def bwt(m: AccuracyMatrix) -> float:
    """Backward transfer: mean change of a task's accuracy from right after it was learned to the end."""
    last = m.tasks - 1
    return _mean(m.at(last, j) - m.at(j, j) for j in range(last))


def fwt(m: AccuracyMatrix) -> float:
    """Forward transfer: accuracy on a task right before it is learned, minus that of the untrained network."""
    if m.before is None or any(count is None for count in m.before):
        raise ValueError(
            "AccuracyMatrix: fwt needs the accuracies before the first task. Run with --set evaluate.ahead=true."
        )
    untrained = [100 * (count or 0) / total for count, total in zip(m.before, m.total, strict=True)]
    return _mean(m.at(j - 1, j) - untrained[j] for j in range(1, m.tasks))


def _from_best(m: AccuracyMatrix, task: int) -> float:
    return max(m.at_or_zero(i, task) for i in range(m.tasks)) - m.at(m.tasks - 1, task)


def _mean(values: object) -> float:
    """Mean; NaN for no values, such as the forgetting of a single task."""
    numbers = list(values)  # type: ignore[call-overload]
    return fmean(numbers) if numbers else float("nan")


SCORES: dict[str, Callable[[AccuracyMatrix], float]] = {
    function.__name__: function
    for function in (acc, fm, la, fm_ctn, fm_facil, fm_mammoth, fm_raptor, fm_first, bwt, fwt, aia)
}


def score(matrix: AccuracyMatrix, name: str) -> float:
    """Compute a score by name, in percent.

    Example:
        >>> score(AccuracyMatrix([[90, None], [60, 80]], [100, 100]), "bwt")
        -30.0
    """
    if name not in SCORES:
        raise ValueError(f"score: unknown score {name!r}. There are {', '.join(SCORES)}.")
    return SCORES[name](matrix)
