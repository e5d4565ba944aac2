"""Data sets in memory or memory-mapped: images with one label, the user's arrays, and images with several labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Images: TypeAlias = "NDArray[np.uint8]"
Labels: TypeAlias = "NDArray[np.int64]"
Indices: TypeAlias = "NDArray[np.int64]"
Split = tuple[Images, Labels]
Progress = Callable[[str, int, int], None]  # what is done, units done, units in total

SPLITS = ("train", "test")
GROUPS = ("majority", "moderate", "minority")
MAJORITY_ABOVE, MINORITY_BELOW = 900, 200  # training images, as published for both streams


@dataclass(frozen=True, repr=False)
class Source:
    """A data set, in memory or memory-mapped: uint8 images (samples, channels, height, width) and their labels.

    Attributes:
        classes: Number of classes.
        fingerprint: Hash that identifies samples, labels and split; see `contnorm.bench.fingerprint`.
        details: Further entries for records: number of missing images, how the data was split and decoded.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    fingerprint: str
    details: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __repr__(self) -> str:
        train, test = (tuple(images.shape) for images in (self.train_images, self.test_images))
        return f"{type(self).__name__}({self.name!r}, train={train}, test={test}, classes={self.classes})"


@dataclass(frozen=True, repr=False)
class ArraySource(Source):
    """A data set of the user's, of arrays or images. Labels are indices into ``class_names``.

    Attributes:
        class_names: The labels as the user gave them, sorted.
        task_classes: The classes of each task; None if every sample has a task of its own.
        train_task, test_task: The task of each sample; None if tasks are sets of classes.
    """

    class_names: tuple[Any, ...]
    task_classes: tuple[tuple[int, ...], ...] | None
    train_task: Indices | None
    test_task: Indices | None

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        if self.task_classes is not None:
            return len(self.task_classes)
        assert self.train_task is not None
        return int(self.train_task.max()) + 1


@dataclass(frozen=True, repr=False)
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

    train_task: Indices
    test_task: Indices
    tasks: int
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    published_images: int | None = None
    missing_images: int = 0


@cache
def published() -> dict[str, Any]:
    """Return published facts: the long-tailed streams, addresses and hashes of downloads, the order of mini-ImageNet.

    Example:
        >>> len(published()["mini-imagenet"]), list(published()["streams"])
        (100, ['cocoseq', 'nus-wideseq'])
    """
    text = resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


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
