"""Data sets whose images carry several labels, with the tasks they come in: what COCOseq and its like are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.dataset import Source

__all__ = ["GROUPS", "MultiLabelSource", "groups_by_count"]

GROUPS = ("majority", "moderate", "minority")
MAJORITY_ABOVE, MINORITY_BELOW = 900, 200  # training images, as published for both streams


@dataclass(frozen=True)
class MultiLabelSource(Source):
    """A data set in memory or mapped, its labels as rows of 0 and 1 (samples, classes), its images in task order.

    Attributes:
        train_task, test_task: The task of each image, numbered in the order the tasks are learned.
        tasks: How many tasks.
        class_names: By column of the labels.
        class_groups: By column, one of `GROUPS`: how common the class is in the whole stream, not in a part of it.
        published_images: How many images the published stream has, of which this may be a part; None for a set of
            one's own.
        missing_images: How many of the images listed for it were not there when it was built.
    """

    train_task: NDArray[np.int64]
    test_task: NDArray[np.int64]
    tasks: int
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    published_images: int | None = None
    missing_images: int = 0


def groups_by_count(counts: Iterable[int]) -> tuple[str, ...]:
    """The group of each class by its number of training images: above 900, 200 to 900, below 200.

    Example:
        >>> groups_by_count([901, 900, 200, 199])
        ('majority', 'moderate', 'moderate', 'minority')
    """
    return tuple(
        "majority" if count > MAJORITY_ABOVE else "minority" if count < MINORITY_BELOW else "moderate"
        for count in counts
    )
