"""Scores of a multi-label run: C-F1, O-F1, mAP and the forgetting of each.

A class counts only if at least one evaluated image has it. All scores are in percent.

| name | what it is |
|---|---|
| `c_f1` | the harmonic mean of macro precision and macro recall (not the mean of the classes' F1) |
| `o_f1` | F1 over all labels (micro average) |
| `map` | the mean over classes of average precision, as in scikit-learn |
| `fm_c_f1`, `fm_o_f1`, `fm_map` | normalized forgetting: the part of a task's best score that was lost at the end |

The first three are computed at the end, over the test images of all tasks (`LabelMatrix.tally`). Forgetting is computed
on the test images of each task and averaged over all tasks but the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.metrics import AccuracyMatrix, TaskScores, accuracy_scores

DECIMALS = 8  # average precisions are rounded to these decimals, in memory and in records


@dataclass(frozen=True)
class LabelStats:
    """Per-class statistics of one evaluation, from which all multi-label scores are computed.

    Attributes:
        samples: Number of images.
        tp: True positives of each class.
        predicted: Predicted positives of each class.
        positive: Images of each class.
        ap: Average precision of each class; None for a class without images.

    Example:
        >>> stats = LabelStats.of([[2.0, -1.0], [1.0, 3.0], [-1.0, -2.0]], [[1, 0], [0, 1], [1, 0]])
        >>> stats.tp, stats.predicted, stats.positive
        ((1, 1), (2, 1), (2, 1))
        >>> stats.ap
        (0.83333333, 1.0)
    """

    samples: int
    tp: tuple[int, ...]
    predicted: tuple[int, ...]
    positive: tuple[int, ...]
    ap: tuple[float | None, ...]

    def __post_init__(self) -> None:
        counts = zip(self.tp, self.predicted, self.positive, self.ap, strict=True)
        for tp, predicted, positive, ap in counts:
            possible = 0 <= tp <= min(predicted, positive) <= max(predicted, positive) <= self.samples
            if not possible or (ap is None) != (positive == 0) or not 0 <= (ap or 0) <= 1:
                raise ValueError(
                    f"LabelStats: tp={tp}, predicted={predicted}, positive={positive}, ap={ap} can't be of a class in "
                    f"{self.samples} images."
                )

    @classmethod
    def of(cls, scores: Any, targets: Any, threshold: float = 0.0) -> LabelStats:
        """Compute the statistics of an evaluation.

        Args:
            scores: (images, classes) outputs of the network: logits, or probabilities with ``threshold=0.5``.
            targets: (images, classes) of 0 and 1.
            threshold: A score above it is a positive prediction.
        """
        outputs, labels = np.asarray(scores), np.asarray(targets).astype(bool)
        if outputs.ndim != 2 or outputs.shape != labels.shape:
            raise ValueError(
                f"LabelStats: scores {outputs.shape} and targets {labels.shape} must be (images, classes)."
            )
        predicted = outputs > threshold
        positive = labels.sum(0)
        ap = np.round(average_precision(outputs, labels), DECIMALS)
        return cls(
            len(outputs),
            tuple((predicted & labels).sum(0).tolist()),
            tuple(predicted.sum(0).tolist()),
            tuple(positive.tolist()),
            tuple(value if n else None for value, n in zip(ap.tolist(), positive.tolist(), strict=True)),
        )

    @property
    def classes(self) -> int:
        return len(self.positive)

    def counted(self, classes: Collection[int] | None = None) -> list[int]:
        """Classes with at least one image, among the given classes or among all."""
        candidates = range(self.classes) if classes is None else sorted(set(classes))
        return [c for c in candidates if self.positive[c]]

    def to_json(self) -> dict[str, Any]:
        """Convert for a record: numbers are joined to one string, since a record has one list element per line.

        Example:
            >>> LabelStats(3, (1, 0), (2, 1), (2, 0), (0.75, None)).to_json()
            {'samples': 3, 'tp': '1 0', 'predicted': '2 1', 'positive': '2 0', 'ap': '0.75 -'}
        """
        counts = {name: " ".join(map(str, getattr(self, name))) for name in ("tp", "predicted", "positive")}
        return {"samples": self.samples, **counts, "ap": " ".join("-" if v is None else str(v) for v in self.ap)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LabelStats:
        """Inverse of `to_json`.

        Raises:
            ValueError, KeyError, AttributeError: If ``raw`` does not have the format of `to_json`.
        """
        tp, predicted, positive = (tuple(map(int, raw[name].split())) for name in ("tp", "predicted", "positive"))
        ap = tuple(None if word == "-" else float(word) for word in raw["ap"].split())
        return cls(int(raw["samples"]), tp, predicted, positive, ap)


def average_precision(scores: NDArray[Any], targets: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Average precision of each class: the mean, over its images, of the precision at the score of the image.

    Args:
        scores: (images, classes).
        targets: (images, classes), True if the image has the class.

    Returns:
        (classes,) values from 0 to 1; NaN for a class without images.

    Example:
        >>> average_precision(np.array([[0.9], [0.8], [0.8]]), np.array([[True], [False], [True]]))
        array([0.83333333])
    """
    if not np.isfinite(scores).all():
        raise ValueError("average_precision: some scores are not finite, so that images can't be put in order.")
    order = np.argsort(-scores, axis=0, kind="stable")
    ordered, hit = (np.take_along_axis(values, order, 0) for values in (scores, targets))
    true_positives = np.cumsum(hit, axis=0)
    last = _last_of_ties(ordered)
    precision = np.take_along_axis(true_positives, last, 0) / (last + 1)
    with np.errstate(invalid="ignore"):  # a class without images is 0 / 0
        ap: NDArray[np.float64] = (precision * hit).sum(0) / hit.sum(0)
    return ap


def _last_of_ties(ordered: NDArray[Any]) -> NDArray[np.int64]:
    """For each position of each sorted column, the last position with the same score: ties share one threshold."""
    n = len(ordered)
    places = np.broadcast_to(np.arange(n)[:, None], ordered.shape)
    differs = np.ones(ordered.shape, dtype=bool)
    differs[:-1] = ordered[1:] != ordered[:-1]
    ends = np.where(differs, places, n)
    return np.minimum.accumulate(ends[::-1], axis=0)[::-1]


def c_f1(stats: LabelStats, classes: Collection[int] | None = None) -> float:
    """C-F1: the harmonic mean of macro precision and macro recall; a class never predicted has precision 0.

    Args:
        stats: Statistics of an evaluation.
        classes: Classes to include; all by default.

    Example:
        >>> c_f1(LabelStats(3, (1, 1), (2, 1), (2, 1), (0.8, 1.0)))  # precision 1/2 and 1, recall 1/2 and 1
        75.0
    """
    counted = stats.counted(classes)
    if not counted:
        return nan
    precision = fmean(stats.tp[c] / stats.predicted[c] if stats.predicted[c] else 0.0 for c in counted)
    recall = fmean(stats.tp[c] / stats.positive[c] for c in counted)
    return 100 * 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def o_f1(stats: LabelStats, classes: Collection[int] | None = None) -> float:
    """O-F1: F1 over all labels (micro average).

    Args:
        stats: Statistics of an evaluation.
        classes: Classes to include; all by default.

    Example:
        >>> o_f1(LabelStats(3, (1, 1), (2, 1), (2, 1), (0.8, 1.0)))  # precision 2/3, recall 2/3
        66.6666666
    """
    counted = stats.counted(classes)
    if not counted:
        return nan
    tp, predicted, positive = (
        sum(values[c] for c in counted) for values in (stats.tp, stats.predicted, stats.positive)
    )
    return 100 * 2 * tp / (predicted + positive)


def mean_ap(stats: LabelStats, classes: Collection[int] | None = None) -> float:
    """mAP: the mean over classes of average precision.

    Args:
        stats: Statistics of an evaluation.
        classes: Classes to include; all by default.

    Example:
        >>> mean_ap(LabelStats(3, (1, 1), (2, 1), (2, 1), (0.8, 1.0)))
        90.0
    """
    precisions = [ap for ap in (stats.ap[c] for c in stats.counted(classes)) if ap is not None]
    return 100 * fmean(precisions) if precisions else nan


def normalized_forgetting(values: Sequence[float]) -> float:
    """Part of a task's best score that was lost at the end, in percent; negative if the score increased.

    If the best score is 0, forgetting is 100 if the final score is 0 too, and minus the final score otherwise.

    Args:
        values: Score of one task in percent, after that task and after each later one. The last value is the final
            score; the best is the maximum of the others.

    Example:
        >>> normalized_forgetting([40.0, 50.0, 30.0]), normalized_forgetting([40.0, 44.0])
        (40.0, -10.0)
        >>> normalized_forgetting([0.0, 0.0]), normalized_forgetting([0.0, 20.0])
        (100.0, -20.0)
    """
    if len(values) < 2:
        raise ValueError(f"normalized_forgetting: needs a value before the last, got {list(values)}.")
    *before, final = values
    best = max(before)
    if best == 0:
        return -final if final > 0 else 100.0
    return 100 * (best - final) / best


Score = Callable[[LabelStats, Collection[int] | None], float]
_OF_STATS: dict[str, Score] = {"c_f1": c_f1, "o_f1": o_f1, "map": mean_ap}
LABEL_SCORES = (*_OF_STATS, *(f"fm_{name}" for name in _OF_STATS))


@dataclass(frozen=True)
class LabelMatrix:
    """Statistics of a multi-label run: row i after task i.

    Attributes:
        own: (T, T) on the test images of each task; None where nothing was measured.
        tally: (T,) on the test images of all tasks learned so far.

    Example:
        >>> stats = [LabelStats(4, (right,), (2,), (2,), (right / 2,)) for right in (2, 1)]
        >>> matrix = LabelMatrix(own=[[stats[0], None], [stats[1], stats[0]]], tally=stats)
        >>> label_score(matrix, "map"), label_score(matrix, "fm_map")
        (50.0, 50.0)
    """

    own: Sequence[Sequence[LabelStats | None]]
    tally: Sequence[LabelStats]

    def __post_init__(self) -> None:
        tasks = len(self.tally)
        if tasks == 0 or len(self.own) != tasks or any(len(row) != tasks for row in self.own):
            shape = f"{len(self.own)} rows of {sorted({len(row) for row in self.own})}"
            raise ValueError(f"LabelMatrix: a tally of {tasks} needs {tasks} rows of {tasks}, got {shape}.")
        if any(self.own[i][j] is None for i in range(tasks) for j in range(i + 1)):
            raise ValueError("LabelMatrix: every task needs to be measured from when it was learned on.")
        classes = {stats.classes for row in (*self.own, self.tally) for stats in row if stats is not None}
        if len(classes) != 1:
            raise ValueError(f"LabelMatrix: all must be of the same classes, got {sorted(classes)} of them.")

    @property
    def tasks(self) -> int:
        return len(self.tally)

    def since_learned(self, task: int) -> list[LabelStats]:
        """Statistics on the test images of a task, after it was learned and after each later task."""
        return [stats for row in self.own[task:] if (stats := row[task]) is not None]

    def scores(self) -> dict[str, float]:
        """All scores over all classes, by name."""
        return {name: label_score(self, name) for name in LABEL_SCORES}

    def to_json(self) -> dict[str, Any]:
        """Convert for a record."""
        return {
            "own": [[None if stats is None else stats.to_json() for stats in row] for row in self.own],
            "tally": [stats.to_json() for stats in self.tally],
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LabelMatrix:
        """Inverse of `to_json`.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: If ``raw`` does not have the format of `to_json`.
        """
        own = [[None if stats is None else LabelStats.from_json(stats) for stats in row] for row in raw["own"]]
        return cls(own, [LabelStats.from_json(stats) for stats in raw["tally"]])


def label_score(matrix: LabelMatrix, name: str, classes: Collection[int] | None = None) -> float:
    """Compute a score by name, in percent.

    Args:
        matrix: Statistics of the run.
        name: One of `LABEL_SCORES`.
        classes: Classes to include, such as those of a group; all by default. If no test image has any of them, the
            score is NaN, and the task does not count for forgetting.
    """
    if name not in LABEL_SCORES:
        raise ValueError(f"label_score: unknown score {name!r}. There are {', '.join(LABEL_SCORES)}.")
    score = _OF_STATS[name.removeprefix("fm_")]
    if not name.startswith("fm_"):
        return score(matrix.tally[-1], classes)
    forgotten = []
    for task in range(matrix.tasks - 1):
        values = [score(stats, classes) for stats in matrix.since_learned(task)]
        if not any(map(isnan, values)):
            forgotten.append(normalized_forgetting(values))
    return fmean(forgotten) if forgotten else nan


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
    scores = _OF_STATS.items()
    by_task = {name: [None if stats is None else score(stats, None) for stats in own] for name, score in scores}
    return TaskScores(by_task, {name: score(tally, None) for name, score in scores})


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
