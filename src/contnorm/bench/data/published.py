"""Published facts about data sets: images per class, and the two long-tailed streams of Kim et al. (2020).

A stream is described by its classes, groups, sizes and order of tasks, and by lists of the pictures of each task, which
are read from a folder or downloaded. This module uses the published indices of tasks; built data sets number the tasks
in the order of training. Groups of classes are those of the whole stream, and are never computed from a part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from contnorm.bench.data.dataset import GROUPS, SPLITS, DatasetListing, Labels, ListedPicture
from contnorm.bench.data.fetch import Fetchable, fetch
from contnorm.bench.files import Progress, parse_json
from contnorm.bench.lazy_numpy import np
from contnorm.errors import UserError, usable

__all__ = [
    "ALLOW_MISSING",
    "PUBLISHED_STREAMS",
    "IdLists",
    "PublishedCounts",
    "PublishedStream",
    "check_counts",
    "find_lists",
    "list_stream",
    "published_stream",
    "read_lists",
]

PUBLISHED_STREAMS = ("cocoseq", "nus-wideseq")


@dataclass(frozen=True)
class PublishedStream:
    """Published description of a stream.

    Attributes:
        class_names: Names of the classes, by column of the labels.
        class_groups: Groups of the classes, by column.
        task_order: Indices of the tasks in the order of training.
        sizes: Number of images of each task, by its index, for ``"train"`` and ``"test"``.
        lists: Address and hashes of the lists of images of each task.
    """

    name: str
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    task_order: tuple[int, ...]
    sizes: dict[str, tuple[int, ...]]
    lists: Fetchable

    @property
    def images(self) -> int:
        return sum(map(sum, self.sizes.values()))


@cache
def published_stream(name: str) -> PublishedStream:
    """Return one of `PUBLISHED_STREAMS`.

    Example:
        >>> stream = published_stream("cocoseq")
        >>> stream.images, len(stream.class_names), stream.class_groups.count("minority"), stream.task_order
        (41438, 70, 14, (0, 3, 1, 2))
    """
    text = resources.files("contnorm.bench.data").joinpath("published_streams.json").read_text(encoding="utf-8")
    raw = json.loads(text)[name]
    group_of = {class_name: group for group in GROUPS for class_name in raw[group]}
    return PublishedStream(
        name,
        tuple(raw["class_names"]),
        tuple(group_of[class_name] for class_name in raw["class_names"]),
        tuple(raw["task_order"]),
        {"train": tuple(raw["train_sizes"]), "test": tuple(raw["test_sizes"])},
        Fetchable(raw["lists_at"], raw["lists"], folder="ids"),
    )


@dataclass(frozen=True)
class IdLists:
    """Picture numbers by split and by the published index of the task.

    Attributes:
        ids: Lists of numbers.
        as_published: Whether all lists are identical to the published ones.
        files: File of each list, for messages.
    """

    ids: Mapping[str, Sequence[Sequence[int]]]
    as_published: bool
    files: Mapping[str, Sequence[Path]]


def list_stream(
    stream: PublishedStream, lists: IdLists, picture: Callable[[str, int, int], ListedPicture]
) -> DatasetListing:
    """Return the pictures of the lists by task, in the order of training.

    Args:
        stream: Published stream.
        lists: Published or modified lists.
        picture: Returns the picture for a split, a number of the list, and a task.
    """
    train, test = (
        tuple(
            picture(split, number, task)
            for task, index in enumerate(stream.task_order)
            for number in lists.ids[split][index]
        )
        for split in SPLITS
    )
    return DatasetListing(
        stream.name,
        stream.class_names,
        stream.class_groups,
        tuple(map(str, stream.task_order)),
        train,
        test,
        stream.images,
        lists.as_published,
    )


def find_lists(
    stream: PublishedStream,
    folder: Path | None,
    pictures: Path,
    out: Path,
    base: str | None = None,
    progress: Progress = lambda *_: None,
) -> Path:
    """Return the folder of the lists.

    This is ``folder``, or the subfolder ``ids`` of the pictures if it exists. Otherwise the lists are downloaded once
    into the folder of the data set.

    Args:
        stream: Published stream.
        folder: Folder of the lists; None to search for them.
        pictures: Folder of the pictures.
        out: Folder of the data set to be built.
        base: Address to download from, in place of the default.
        progress: Called with the name of a file, its bytes received so far, and its size.
    """
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--ids {folder}: is not a folder. Use the folder of {next(iter(stream.lists.files))}.")
        return folder
    if (pictures / "ids").is_dir():
        return pictures / "ids"
    try:
        with usable(out, "the lists cannot be written there", "Use another folder with --out."):
            fetch(stream.lists, out, base, progress)
    except ImportError as error:
        raise UserError(
            'downloading the lists needs pooch. Run pip install "contnorm[bench]", or use --ids DIR.'
        ) from error
    except UserError as error:
        raise UserError(f"{error} If you have the lists, use --ids DIR.") from error
    return out / stream.lists.folder


def read_lists(stream: PublishedStream, folder: Path) -> IdLists:
    """Read the lists of all tasks: ``train_task0_id_coco.json``, the published name, or ``train_task0.json``."""
    ids: dict[str, list[list[int]]] = {}
    files: dict[str, list[Path]] = {}
    as_published = True
    for split, sizes in stream.sizes.items():
        files[split] = [_file(stream, folder, split, task) for task in range(len(sizes))]
        ids[split] = [_numbers(path) for path in files[split]]
        as_published &= all(
            _hash(numbers) == stream.lists.files[_published_name(stream, split, task)]
            for task, numbers in enumerate(ids[split])
        )
    return IdLists(ids, as_published, files)


def _published_name(stream: PublishedStream, split: str, task: int) -> str:
    return next(name for name in stream.lists.files if name.startswith(f"{split}_task{task}_"))


def _file(stream: PublishedStream, folder: Path, split: str, task: int) -> Path:
    names = (_published_name(stream, split, task), f"{split}_task{task}.json")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UserError(
        f"{folder}: has no {split} list of task {task}. Add {' or '.join(names)}, or use --ids DIR for the folder "
        f"of the lists."
    )


def _numbers(path: Path) -> list[int]:
    with usable(path, "cannot be read", "Check the permissions."):
        text = path.read_bytes()
    try:
        numbers = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error}). Download it again.") from error
    if not isinstance(numbers, list) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise UserError(f"{path}: must be a list of integers of at least 0, such as [813, 1392].")
    return numbers


def _hash(numbers: Sequence[int]) -> str:
    """Hash a list in the format of the published files, that of ``json.dumps``; white space in the file is ignored."""
    return f"sha256:{hashlib.sha256(json.dumps(numbers).encode()).hexdigest()}"


ALLOW_MISSING = "CONTNORM_ALLOW_MISSING"


@dataclass(frozen=True)
class PublishedCounts:
    """Images per class, by label, in the training and the test split."""

    train: tuple[int, ...]
    test: tuple[int, ...]

    @property
    def images(self) -> int:
        return sum(self.train) + sum(self.test)


def check_counts(
    name: str, folder: Path, published: PublishedCounts, train: Labels, test: Labels, allow_missing: bool
) -> dict[str, Any]:
    """Compare the labels of a data set with the published counts.

    Args:
        name: Data set.
        folder: Folder, for the message.
        published: Expected counts.
        train, test: Labels of both splits, from 0 to the number of classes minus 1.
        allow_missing: Accept other counts than published; also set by the environment variable `ALLOW_MISSING`.

    Returns:
        Entries for records that describe the deviation; empty if there is none.

    Raises:
        UserError: If the counts deviate and that is not allowed.
    """
    deviations = {
        split: np.bincount(labels, minlength=len(counts)) - np.array(counts)
        for split, labels, counts in (("train", train, published.train), ("test", test, published.test))
    }
    missing = {split: int(-by_class[by_class < 0].sum()) for split, by_class in deviations.items()}
    extra = sum(int(by_class[by_class > 0].sum()) for by_class in deviations.values())
    if not (any(missing.values()) or extra):
        return {}
    classes = int(np.any([by_class != 0 for by_class in deviations.values()], axis=0).sum())
    if not (allow_missing or os.environ.get(ALLOW_MISSING, "") not in ("", "0")):
        raise UserError(_deviation_message(name, folder, published, missing, extra, classes))
    details = {
        "images": len(train) + len(test),
        "published_images": published.images,
        "missing_images": sum(missing.values()),
        "missing_by_split": missing,
        "deviating_classes": classes,
    }
    return details | ({"extra_images": extra} if extra else {})


def _deviation_message(
    name: str, folder: Path, published: PublishedCounts, missing: dict[str, int], extra: int, classes: int
) -> str:
    parts = []
    if any(missing.values()):
        splits = ", ".join(f"{count:,} {split}" for split, count in missing.items())
        parts.append(f"{sum(missing.values()):,} of {published.images:,} images are missing ({splits})")
    if extra:
        parts.append(f"{extra:,} images are more than published")
    return (
        f"{folder}: {name} is not the published data set: {' and '.join(parts)}, in {classes} of "
        f"{len(published.train)} classes. Complete it, or use it as it is with --allow-missing; the record states this."
    )
