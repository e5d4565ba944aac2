"""The training and test samples of a stream: those of the data set, or a holdout of its training samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from contnorm.bench.data.dataset import Source
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.bench.rng import generator
from contnorm.errors import UserError

__all__ = ["SplitSamples", "split_samples"]

Indices: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True)
class SplitSamples:
    """Samples of a data set that a split may use.

    Attributes:
        labels: Label of each sample of the data set.
        task: Task of each sample, if the data set assigns them; otherwise None.
        usable: Mask of the samples of the split.
    """

    labels: NDArray[np.integer[Any]]
    task: Indices | None
    usable: NDArray[np.bool_]

    def where(self, condition: NDArray[np.bool_]) -> Indices:
        """Return the indices of the usable samples for which a condition holds."""
        return np.flatnonzero(condition & self.usable)


def split_samples(holdout: float | None, source: Source) -> tuple[SplitSamples, SplitSamples]:
    """Return the training and the test samples of a stream.

    Args:
        holdout: Share of the training samples of each class that replaces the test samples; None for the test samples
            of the data set. The held-out samples are the same for all seeds.
        source: The data set.
    """
    task = getattr(source, "train_task", None)
    if holdout is None:
        test_task = getattr(source, "test_task", None)
        return (
            SplitSamples(source.train_labels, task, np.ones(len(source.train_labels), dtype=bool)),
            SplitSamples(source.test_labels, test_task, np.ones(len(source.test_labels), dtype=bool)),
        )
    held = _held_out(holdout, source, task)
    return SplitSamples(source.train_labels, task, ~held), SplitSamples(source.train_labels, task, held)


def _held_out(share: float, source: Source, task: Indices | None) -> NDArray[np.bool_]:
    """Return a mask of the training samples to hold out.

    It is the same share of every class; where the data set assigns tasks to samples, of every class of every task.
    Multi-label samples have no single class, so there it is the share of every task.
    """
    labels = source.train_labels
    part = np.zeros(len(labels), dtype=np.int64) if labels.ndim == 2 else labels.astype(np.int64)
    if task is not None:
        part = part + task * (int(part.max(initial=0)) + 1)
    held = np.zeros(len(labels), dtype=bool)
    rng = generator(0, "holdout")
    for value in np.unique(part):
        indices = np.flatnonzero(part == value)
        count = round(share * len(indices))
        if not 1 <= count < len(indices):
            what = "a task" if labels.ndim == 2 else f"class {int(labels[indices[0]])}"
            raise UserError(
                f"stream.holdout={share:g}: {what} of {source.name} has {len(indices)} training samples, of which "
                f"{count} would be held out. Use a share that leaves samples in both parts."
            )
        held[rng.permutation(indices)[:count]] = True
    return held
