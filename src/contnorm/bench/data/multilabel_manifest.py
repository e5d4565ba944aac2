"""Contents of a multi-label data set to be built: the pictures of each task, and which of them are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPLITS", "Counted", "Listed", "ListedPicture", "counted"]

SPLITS = ("train", "test")


@dataclass(frozen=True)
class ListedPicture:
    """A picture of a list.

    Attributes:
        id: Name or number in the list.
        path: File; None if it is missing.
        task: Index of its task, in the order of training.
        labels: Columns of its labels.
    """

    id: int | str
    path: Path | None
    task: int
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Listed:
    """A data set to be built.

    Attributes:
        task_names: Name of each task in the list, in the order of training.
        train, test: Pictures by task.
        published_images: Number of images of the published stream; None for a user's data set.
        as_published: Whether the lists are identical to the published ones.
    """

    name: str
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    task_names: tuple[str, ...]
    train: tuple[ListedPicture, ...]
    test: tuple[ListedPicture, ...]
    published_images: int | None = None
    as_published: bool = False

    def pictures(self, split: str) -> tuple[ListedPicture, ...]:
        return self.train if split == "train" else self.test

    def present(self, split: str) -> list[ListedPicture]:
        return [picture for picture in self.pictures(split) if picture.path is not None]

    def absent(self, split: str) -> list[ListedPicture]:
        return [picture for picture in self.pictures(split) if picture.path is None]

    def count(self, pictures: Iterable[ListedPicture]) -> Counted:
        return counted(list(pictures), len(self.task_names), len(self.class_names))


@dataclass(frozen=True)
class Counted:
    """Numbers of pictures per task, per class and without a label."""

    by_task: tuple[int, ...]
    by_class: tuple[int, ...]
    unlabelled: int

    @property
    def images(self) -> int:
        return sum(self.by_task)


def counted(pictures: Sequence[ListedPicture], tasks: int, classes: int) -> Counted:
    """Count pictures by task and by class.

    Example:
        >>> counted([ListedPicture(7, None, 1, (0, 2)), ListedPicture(8, None, 1, ())], tasks=2, classes=3)
        Counted(by_task=(0, 2), by_class=(1, 0, 1), unlabelled=1)
    """
    by_task: NDArray[np.int64] = np.bincount(np.array([p.task for p in pictures], dtype=np.int64), minlength=tasks)
    columns = np.array([column for picture in pictures for column in picture.labels], dtype=np.int64)
    by_class: NDArray[np.int64] = np.bincount(columns, minlength=classes)
    return Counted(tuple(by_task.tolist()), tuple(by_class.tolist()), sum(not p.labels for p in pictures))
