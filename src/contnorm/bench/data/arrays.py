"""Data sets of the user's: arrays, ``.npz`` files and class folders of images; checked once, and split into tasks."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.dataset import ArraySource, Images, Indices, Progress
from contnorm.bench.data.formats import decode_pictures
from contnorm.bench.rng import generator
from contnorm.errors import UserError, usable

CHANNELS = (1, 2, 3, 4)  # numbers of channels that images in files have
SMALL_BYTE = 16  # bytes up to this are hardly images
RANGE_RATIO = 4  # ranges of training and test samples that differ by more are reported
TEST_FOLDERS = ("test", "val", "valid", "validation")
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def array_source(
    x: object,
    y: object,
    x_test: object,
    y_test: object,
    *,
    tasks: int | Sequence[Sequence[Any]] | None,
    task_ids: tuple[Any, Any] | None,
    name: str,
    copy: bool = False,
) -> ArraySource:
    """Check arrays and make a data set of them.

    Args:
        x, x_test: Samples, one per row: NumPy arrays, tensors or nested lists.
        y, y_test: The label of each sample.
        tasks: Number of tasks that the classes are split over, in sorted order; or the classes of each task.
        task_ids: The task of each training and of each test sample, instead of ``tasks``.
        name: Name of the data set in tables and records.
        copy: Whether to copy samples that have the right type already, so that they may be changed afterwards.
    """
    train, test = _samples(x, "x", copy), _samples(x_test, "x_test", copy)
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise UserError(
            f"x has {train.dtype} samples of shape {train.shape[1:]}, and x_test {test.dtype} samples of shape "
            f"{test.shape[1:]}. Use the same type and shape."
        )
    if hasattr(x, "columns") and hasattr(x_test, "columns") and list(x.columns) != list(x_test.columns):
        raise UserError("x and x_test have other columns, or in another order. Use x_test[x.columns].")
    train_names, test_names = _labels(y, "y", len(train)), _labels(y_test, "y_test", len(test))
    names = np.unique(np.concatenate([train_names, test_names]))
    untrained = np.setdiff1d(test_names, train_names)
    if len(untrained):
        raise UserError(f"class {untrained[0].item()!r} of y_test has no training samples in y. Add some.")
    labels, test_labels = np.searchsorted(names, train_names), np.searchsorted(names, test_names)
    class_names = tuple(names.tolist())
    if (tasks is None) == (task_ids is None):
        raise UserError("give tasks (a number of tasks, or the classes of each task) or task_ids.")
    ids: tuple[Indices | None, Indices | None] = (None, None)
    task_classes = None
    if task_ids is not None:
        ids = np.asarray(task_ids[0], dtype=np.int64), np.asarray(task_ids[1], dtype=np.int64)
        for i, (task, samples) in enumerate(zip(ids, (train, test), strict=True)):
            if task.shape != (len(samples),) or not np.array_equal(np.unique(task), np.arange(ids[0].max() + 1)):
                raise UserError(
                    f"task_ids[{i}]: give the task of each of the {len(samples)} samples, from 0 without gaps, with "
                    f"training and test samples in each."
                )
    elif tasks is not None:
        task_classes = _task_classes(tasks, class_names)
        untested = np.setdiff1d(np.concatenate(task_classes), test_labels)
        if len(untested):
            raise UserError(f"class {class_names[untested[0]]!r} of y has no test samples in y_test. Add some.")
    source = ArraySource(name, train, labels, test, test_labels, len(class_names), "", class_names, task_classes, *ids)
    _remark(source, isinstance(tasks, int))
    about = (train.shape, test.shape, str(train.dtype), class_names, task_classes)
    digest = hashlib.sha256(repr(about).encode())
    for array in (train, labels, test, test_labels, *ids):
        digest.update(b"" if array is None else np.ascontiguousarray(array).data)
    fingerprint = digest.hexdigest()[:16]
    return replace(source, name=f"{name}@{fingerprint[:12]}", fingerprint=f"2:{fingerprint}")


def _array(values: Any) -> NDArray[Any]:
    if hasattr(values, "detach"):  # a tensor; NumPy has no bfloat16
        tensor = values.detach().cpu()
        values = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    return np.asarray(values)


def _samples(values: object, what: str, copy: bool) -> NDArray[Any]:
    """Return samples as uint8, if they are, or float32; images of shape (height, width) get a channel."""
    array = _array(values)
    if array.ndim < 2 or array.size == 0:
        raise UserError(f"{what} has shape {array.shape}. Use one row per sample, and at least one sample.")
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim == 4 and array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS:
        raise UserError(
            f"{what} has shape {array.shape}, with channels last. Use (samples, channels, height, width): "
            f"{what}.transpose(0, 3, 1, 2)."
        )
    kind = np.uint8 if array.dtype == np.uint8 else np.float32  # bytes are images; other numbers are taken as they are
    samples = np.array(array, dtype=kind, order="C", copy=True if copy else None)
    if samples.dtype == np.float32 and not np.isfinite(samples).all():
        raise UserError(f"{what} contains NaN or infinity. Remove or replace these values.")
    return samples


def _labels(values: object, what: str, samples: int) -> NDArray[Any]:
    """Return labels as int64 or text."""
    array = _array(values)
    if array.shape == (samples, 1):
        array = array[:, 0]
    if array.shape != (samples,):
        raise UserError(
            f"{what} has shape {array.shape} for {samples} samples. Use one label per sample; images with several "
            f"labels are built from a table with `contnorm data NAME --csv FILE`."
        )
    if array.dtype.kind == "O":  # such as a column of a table
        array = np.array(array.tolist())
    if array.dtype.kind not in "biuf":
        return array.astype(str)
    if array.dtype.kind == "f" and not (np.floor(array) == array).all():
        raise UserError(f"{what} has labels that are not whole numbers. Use class indices or names.")
    return array.astype(np.int64)


def _task_classes(tasks: int | Sequence[Sequence[Any]], names: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the class indices of each task."""
    if isinstance(tasks, int | np.integer):
        if not 1 <= tasks <= len(names):
            raise UserError(f"tasks={tasks}: the {len(names)} classes can be split over 1 to {len(names)} tasks.")
        return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(len(names)), tasks))
    flat = [name for classes in tasks for name in classes]
    if not all(map(len, tasks)) or len(set(flat)) < len(flat) or not set(flat) <= set(names):
        raise UserError(
            f"tasks={tasks!r}: give each class once, and at least one per task; for shared classes use task_ids. "
            f"Classes are {', '.join(map(str, names[:20]))}."
        )
    return tuple(tuple(names.index(name) for name in classes) for classes in tasks)


def _remark(source: ArraySource, by_number: bool) -> None:
    """Warn of what is allowed but rarely meant, and would change scores."""
    train, test = source.train_images, source.test_images
    (low, high), (test_low, test_high) = ((part.min().item(), part.max().item()) for part in (train, test))
    spans = high - low, test_high - test_low
    warning = logging.getLogger("contnorm").warning
    shifted = low * test_low <= 0 and abs(low - test_low) > 0.3 * min(spans)  # one part looks standardized
    if max(spans) > RANGE_RATIO * min(spans) or shifted or test_low > high or low > test_high:
        ranges = f"x has values from {low:g} to {high:g} and x_test from {test_low:g} to {test_high:g}"
        warning(f"{source.name}: {ranges}. Scale both alike.")
    if train.dtype == np.uint8 and max(high, test_high) <= SMALL_BYTE:
        warning(
            f"{source.name}: x has bytes up to {high}, which are divided by 255. Use floats, if these are no images."
        )
    sizes = [len(classes) for classes in source.task_classes or ()]
    if by_number and len(set(sizes)) > 1:
        split = f"{source.classes} classes over {len(sizes)} tasks have {max(sizes)} or {min(sizes)} classes each"
        warning(f"{source.name}: {split}. Use a divisor, or list the classes of each task.")
    if isinstance(source.class_names[0], int) and source.class_names[0] < 0:
        warning(f"{source.name}: {source.class_names[0]} is a class as any other. Leave samples without a label out.")
    known = {hash(row.tobytes()) for row in train}
    if shared := sum(hash(row.tobytes()) in known for row in test):
        warning(f"{source.name}: {shared:,} of {len(test):,} test samples are also training samples. Remove them.")


def choose_test_samples(labels: Sequence[Any] | NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Return a mask of test samples: a share of each class, at random with a fixed seed, at least one and not all.

    Example:
        >>> choose_test_samples(["cat"] * 10 + ["dog"] * 2, 0.3).nonzero()[0].tolist()
        [1, 3, 4, 11]
    """
    if not 0 < share < 1:
        raise UserError(f"test_share={share}: use a number between 0 and 1.")
    labels = np.asarray(labels)
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        indices = np.flatnonzero(labels == label)
        if len(indices) < 2:
            raise UserError(f"class {label.item()!r} has one sample. Use at least two, so that one is a test sample.")
        count = min(len(indices) - 1, max(1, round(share * len(indices))))
        test[indices[generator(0, f"test {label}").permutation(len(indices))[:count]]] = True
    return test


def read_npz(path: Path, *, tasks: int | Sequence[Sequence[Any]] | None, test_share: float, name: str) -> ArraySource:
    """Make a data set of an ``.npz`` file; the names of arrays are in the docs of `contnorm.bench.add_dataset`.

    Args:
        path: The file.
        tasks, name: As in `array_source`; the file may have the task of each sample.
        test_share: Share of each class in the test split, if the file has no test samples.
    """
    # TypeError: a single array is no context manager.
    with (
        usable(path, "can't be read as an .npz file of arrays", "Save it with np.savez.", ValueError, TypeError),
        np.load(path, allow_pickle=False) as archive,
    ):
        content = {key: archive[key] for key in archive.files}
    x, y, task = (content.get(f"{name}_train", content.get(name)) for name in ("x", "y", "task"))
    x_test, y_test, task_test = (content.get(f"{name}_test") for name in ("x", "y", "task"))
    if x is None or y is None or (x_test is None) != (y_test is None):
        raise UserError(
            f"{path}: has the arrays {', '.join(sorted(content)) or 'none'}. Save it with np.savez({path.name!r}, "
            f"x_train=..., y_train=..., x_test=..., y_test=...); without the last two, a part of each class is tested."
        )
    if x_test is None:
        labels = y.reshape(-1)
        test = choose_test_samples(labels, test_share)
        x, y, x_test, y_test = x[~test], labels[~test], x[test], labels[test]
        task, task_test = (None, None) if task is None else (task[~test], task[test])
    if (task is None) != (task_test is None):
        raise UserError(f"{path}: has one of task_train and task_test. Use both, or neither.")
    task_ids = None if task is None else (task, task_test)
    return array_source(x, y, x_test, y_test, tasks=tasks, task_ids=task_ids, name=name)


def read_class_folders(
    folder: Path,
    size: int | None,
    test_share: float,
    target: Path | None = None,
    progress: Progress = lambda *_: None,
) -> tuple[Images, list[str], Images, list[str]]:
    """Read the images of a folder as uint8, with the names of their class folders.

    Args:
        folder: The folder.
        size: Height and width to resize and center-crop to; None if all images have the same size.
        test_share: Share of each class in the test split, if the folder has no subfolder of `TEST_FOLDERS`.
        target: Folder for the files ``train_images.npy`` and ``test_images.npy``; None to keep the images in memory.
        progress: Called with what is done, and how much of it.

    Returns:
        Training images, their labels, test images and their labels.
    """
    tested = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and tested is not None:
        train, test = _list_images(folder / "train"), _list_images(tested)
    else:
        listed = _list_images(folder / "train" if (folder / "train").is_dir() else folder)
        chosen = choose_test_samples([label for _, label in listed], test_share)
        train, test = ([listed[i] for i in np.flatnonzero(mask)] for mask in (~chosen, chosen))
    splits = {"train": [path for path, _ in train], "test": [path for path, _ in test]}
    images, _ = decode_pictures(splits, size, "crop", target, progress)
    return images["train"], [label for _, label in train], images["test"], [label for _, label in test]


def _list_images(folder: Path) -> list[tuple[Path, str]]:
    """Return the image files in the class folders of a folder, with the names of their classes."""
    images = [
        (path, entry.name)
        for entry in (sorted(folder.iterdir()) if folder.is_dir() else ())
        if entry.is_dir() and not entry.name.startswith(".")
        for path in sorted(entry.rglob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if len({label for _, label in images}) < 2:
        raise UserError(f"{folder}: has no images in folders of two or more classes, such as {folder}/cats/1.png.")
    return images
