"""Per-class statistics of a multi-label evaluation: true positives, predictions, labels and average precision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LabelStats", "average_precision"]

DECIMALS = 8  # of a stored average precision: keeps records short, and loading returns the exact same value


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
        sizes = {len(values) for values in (self.tp, self.predicted, self.positive, self.ap)}
        if len(sizes) != 1:
            raise ValueError(f"LabelStats: all need one value a class, got {sorted(sizes)} of them.")
        for c, (tp, predicted, positive, ap) in enumerate(
            zip(self.tp, self.predicted, self.positive, self.ap, strict=True)
        ):
            if not 0 <= tp <= min(predicted, positive) <= max(predicted, positive) <= self.samples:
                raise ValueError(
                    f"LabelStats: class {c}: tp={tp}, predicted={predicted}, positive={positive} can't be counted of "
                    f"{self.samples} images."
                )
            if (ap is None) != (positive == 0) or not 0 <= (ap or 0) <= 1:
                raise ValueError(f"LabelStats: class {c}: ap={ap} can't be, with positive={positive}.")

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
