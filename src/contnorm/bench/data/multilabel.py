"""Multi-label data sets with predefined tasks, such as COCOseq and NUS-WIDEseq."""

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
    """A multi-label data set, in memory or memory-mapped. Labels are multi-hot (samples, classes); images are by task.

    Attributes:
        train_task, test_task: Task of each image, numbered in the order of training.
        tasks: Number of tasks.
        class_names: Name of each class, by column of the labels.
        class_groups: Frequency group of each class, one of `GROUPS`, by column. Groups are those of the whole stream,
            also if this is a part of it.
        published_images: Number of images of the published stream, of which this can be a part; None for a user's data
            set.
        missing_images: Number of listed images that were missing when the data set was built.
    """

    train_task: NDArray[np.int64]
    test_task: NDArray[np.int64]
    tasks: int
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    published_images: int | None = None
    missing_images: int = 0


def groups_by_count(counts: Iterable[int]) -> tuple[str, ...]:
    """Return the group of each class by its number of training images: above 900, 200 to 900, below 200.

    Example:
        >>> groups_by_count([901, 900, 200, 199])
        ('majority', 'moderate', 'moderate', 'minority')
    """
    return tuple(
        "majority" if count > MAJORITY_ABOVE else "minority" if count < MINORITY_BELOW else "moderate"
        for count in counts
    )
