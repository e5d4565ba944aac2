"""What is counted of one multi-label evaluation, by class: right answers, answers, labels, and average precision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LabelStats", "average_precision"]

DECIMALS = 8  # of an average precision as it is kept: a record stays short, and reads back as it was written


@dataclass(frozen=True)
class LabelStats:
    """What is counted of one evaluation, by class: all that the scores need.

    Attributes:
        samples: How many images.
        tp: Images of the class that were said to be of it.
        predicted: Images that were said to be of the class.
        positive: Images of the class.
        ap: Its average precision; None where no image is of it.

    Example:
        >>> found = LabelStats.of([[2.0, -1.0], [1.0, 3.0], [-1.0, -2.0]], [[1, 0], [0, 1], [1, 0]])
        >>> found.tp, found.predicted, found.positive
        ((1, 1), (2, 1), (2, 1))
        >>> found.ap
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
        """Count an evaluation.

        Args:
            scores: (images, classes) what the network says: logits, or with ``threshold=0.5`` probabilities.
            targets: (images, classes) of 0 and 1.
            threshold: Above it an image is said to be of the class.
        """
        given, wanted = np.asarray(scores), np.asarray(targets).astype(bool)
        if given.ndim != 2 or given.shape != wanted.shape:
            raise ValueError(f"LabelStats: scores {given.shape} and targets {wanted.shape} must be (images, classes).")
        said = given > threshold
        positive = wanted.sum(0)
        ap = np.round(average_precision(given, wanted), DECIMALS)
        return cls(
            len(given),
            tuple((said & wanted).sum(0).tolist()),
            tuple(said.sum(0).tolist()),
            tuple(positive.tolist()),
            tuple(value if n else None for value, n in zip(ap.tolist(), positive.tolist(), strict=True)),
        )

    @property
    def classes(self) -> int:
        return len(self.positive)

    def counted(self, classes: Collection[int] | None = None) -> list[int]:
        """Those of the classes, or of all, that the images have at least once."""
        asked = range(self.classes) if classes is None else sorted(set(classes))
        return [c for c in asked if self.positive[c]]

    def to_json(self) -> dict[str, Any]:
        """For a record: a line of numbers each, since a record puts every value on a line of its own.

        Example:
            >>> LabelStats(3, (1, 0), (2, 1), (2, 0), (0.75, None)).to_json()
            {'samples': 3, 'tp': '1 0', 'predicted': '2 1', 'positive': '2 0', 'ap': '0.75 -'}
        """
        counts = {name: " ".join(map(str, getattr(self, name))) for name in ("tp", "predicted", "positive")}
        return {"samples": self.samples, **counts, "ap": " ".join("-" if v is None else str(v) for v in self.ap)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LabelStats:
        """What `to_json` wrote; ValueError, KeyError or AttributeError where it is not that."""
        tp, predicted, positive = (tuple(map(int, raw[name].split())) for name in ("tp", "predicted", "positive"))
        ap = tuple(None if word == "-" else float(word) for word in raw["ap"].split())
        return cls(int(raw["samples"]), tp, predicted, positive, ap)


def average_precision(scores: NDArray[Any], targets: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Average precision of each class: of its images, the mean precision among all that score as high or higher.

    Args:
        scores: (images, classes).
        targets: (images, classes), True where an image is of the class.

    Returns:
        (classes,) values from 0 to 1; not a number where no image is of the class.

    Example:
        >>> average_precision(np.array([[0.9], [0.8], [0.8]]), np.array([[True], [False], [True]]))
        array([0.83333333])
    """
    if not np.isfinite(scores).all():
        raise ValueError("average_precision: some scores are not finite, so that images can't be put in order.")
    order = np.argsort(-scores, axis=0, kind="stable")
    ordered, hit = (np.take_along_axis(values, order, 0) for values in (scores, targets))
    found = np.cumsum(hit, axis=0)
    last = _last_of_ties(ordered)
    precision = np.take_along_axis(found, last, 0) / (last + 1)
    with np.errstate(invalid="ignore"):  # a class without images is 0 / 0
        ap: NDArray[np.float64] = (precision * hit).sum(0) / hit.sum(0)
    return ap


def _last_of_ties(ordered: NDArray[Any]) -> NDArray[np.int64]:
    """For each place of each sorted column, the last place of the same score: ties are found together."""
    n = len(ordered)
    places = np.broadcast_to(np.arange(n)[:, None], ordered.shape)
    differs = np.ones(ordered.shape, dtype=bool)
    differs[:-1] = ordered[1:] != ordered[:-1]
    ends = np.where(differs, places, n)
    return np.minimum.accumulate(ends[::-1], axis=0)[::-1]
