"""Data sets: loaded ones, with one label or several labels per image, and listings of multi-label ones to be built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from contnorm.bench.lazy_numpy import NDArray, np

__all__ = [
    "GROUPS",
    "SPLITS",
    "DatasetListing",
    "Images",
    "Labels",
    "ListedPicture",
    "MultiLabelSource",
    "PictureCounts",
    "Source",
    "Split",
    "groups_by_count",
]

Images: TypeAlias = "NDArray[np.uint8]"
Labels: TypeAlias = "NDArray[np.int64]"
Split = tuple[Images, Labels]

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


@dataclass(frozen=True)
class ListedPicture:
    """A picture of a listing.

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
class PictureCounts:
    """Numbers of pictures per task, per class and without a label."""

    by_task: tuple[int, ...]
    by_class: tuple[int, ...]
    unlabelled: int

    @property
    def images(self) -> int:
        return sum(self.by_task)

    @classmethod
    def of(cls, pictures: Sequence[ListedPicture], tasks: int, classes: int) -> PictureCounts:
        """Count pictures by task and by class.

        Example:
            >>> PictureCounts.of([ListedPicture(7, None, 1, (0, 2)), ListedPicture(8, None, 1, ())], tasks=2, classes=3)
            PictureCounts(by_task=(0, 2), by_class=(1, 0, 1), unlabelled=1)
        """
        by_task: Labels = np.bincount(np.array([p.task for p in pictures], dtype=np.int64), minlength=tasks)
        columns = np.array([column for picture in pictures for column in picture.labels], dtype=np.int64)
        by_class: Labels = np.bincount(columns, minlength=classes)
        return cls(tuple(by_task.tolist()), tuple(by_class.tolist()), sum(not p.labels for p in pictures))


@dataclass(frozen=True)
class DatasetListing:
    """Pictures, labels and tasks of a multi-label data set to be built.

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
        """Return the pictures whose file exists."""
        return [picture for picture in self.pictures(split) if picture.path is not None]

    def missing(self, split: str) -> list[ListedPicture]:
        """Return the pictures whose file does not exist."""
        return [picture for picture in self.pictures(split) if picture.path is None]

    def count(self, pictures: Sequence[ListedPicture]) -> PictureCounts:
        """Count pictures by the tasks and classes of this data set."""
        return PictureCounts.of(pictures, len(self.task_names), len(self.class_names))
