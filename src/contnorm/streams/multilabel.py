"""Data sets whose images carry several labels, with the tasks they come in: what COCOseq and its like are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contnorm.streams.sources import Source

__all__ = ["GROUPS", "MultiLabelSource"]

GROUPS = ("majority", "moderate", "minority")


@dataclass(frozen=True)
class MultiLabelSource(Source):
    """A data set in memory or mapped, its labels as rows of 0 and 1 (samples, classes), its images in task order.

    Attributes:
        train_task, test_task: The task of each image, numbered in the order the tasks are learned.
        tasks: How many tasks.
        class_names: By column of the labels.
        class_groups: By column, one of `GROUPS`: how common the class is in the whole stream, not in a part of it.
    """

    train_task: NDArray[np.int64]
    test_task: NDArray[np.int64]
    tasks: int
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
