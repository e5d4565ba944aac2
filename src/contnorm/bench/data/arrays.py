"""Data sets of the user: arrays in memory, with the task of each sample or the classes of each task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from contnorm.bench.data.dataset import Source
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.errors import UserError

__all__ = ["ArraySource", "array_source"]

Integers: TypeAlias = "NDArray[np.int64]"
CHANNELS = (1, 2, 3, 4)  # numbers of channels that images in files have


@dataclass(frozen=True, repr=False)
class ArraySource(Source):
    """A data set from arrays. Labels are indices into ``class_names``.

    Attributes:
        class_names: The labels as the user gave them, sorted.
        task_classes: The classes of each task; None if every sample has a task of its own.
        train_task, test_task: The task of each sample; None if tasks are sets of classes.
    """

    class_names: tuple[Any, ...]
    task_classes: tuple[tuple[int, ...], ...] | None
    train_task: Integers | None
    test_task: Integers | None

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        if self.task_classes is not None:
            return len(self.task_classes)
        assert self.train_task is not None
        return int(self.train_task.max()) + 1

    def is_unchanged(self) -> bool:
        """Whether the arrays, which may be those of the user, still have the fingerprint of the data set."""
        return self.fingerprint == f"2:{_hash(self)}"


def array_source(
    x: object,
    y: object,
    x_test: object,
    y_test: object,
    *,
    tasks: int | Sequence[Sequence[Any]] | None,
    task_ids: tuple[object, object] | None,
    name: str,
) -> ArraySource:
    """Check arrays and make a data set of them.

    Args:
        x, x_test: Samples, one per row: NumPy arrays, tensors or nested lists.
        y, y_test: The label of each sample.
        tasks: Number of tasks that the classes are split over, in sorted order; or the classes of each task.
        task_ids: The task of each training and of each test sample, instead of ``tasks``.
        name: Name of the data set in tables and records.
    """
    train, test = _samples(x, "x"), _samples(x_test, "x_test")
    if train.shape[1:] != test.shape[1:]:
        raise UserError(f"x has samples of shape {train.shape[1:]} and x_test of {test.shape[1:]}. Use the same shape.")
    if train.dtype != test.dtype:
        raise UserError(f"x is {train.dtype} and x_test is {test.dtype}. Use the same type for both.")
    train_names, test_names = _labels(y, "y", len(train)), _labels(y_test, "y_test", len(test))
    if (train_names.dtype.kind == "i") != (test_names.dtype.kind == "i"):
        raise UserError("y and y_test: one has numbers and the other has text. Use the same labels in both.")
    names = np.unique(np.concatenate([train_names, test_names]))
    untrained = np.setdiff1d(test_names, train_names)
    if len(untrained):
        raise UserError(
            f"class {untrained[0].item()!r} of y_test has no training samples in y. Add some, or remove the class."
        )
    labels, test_labels = np.searchsorted(names, train_names), np.searchsorted(names, test_names)
    class_names = tuple(names.tolist())
    task_classes: tuple[tuple[int, ...], ...] | None = None
    ids: tuple[Integers, Integers] | tuple[None, None] = (None, None)
    if task_ids is not None:
        if tasks is not None:
            raise UserError("Use either tasks or task_ids, not both.")
        ids = _task_ids(task_ids, (len(train), len(test)))
    else:
        task_classes = _task_classes(tasks, class_names)
        untested = np.setdiff1d([label for classes in task_classes for label in classes], test_labels)
        if len(untested):
            raise UserError(
                f"class {class_names[untested[0]]!r} of y has no test samples in y_test. Add some, or leave the class "
                f"out."
            )
    source = ArraySource(name, train, labels, test, test_labels, len(class_names), "", class_names, task_classes, *ids)
    fingerprint = _hash(source)
    return replace(source, name=f"{name}@{fingerprint[:12]}", fingerprint=f"2:{fingerprint}")


def _hash(source: ArraySource) -> str:
    train, test = source.train_images, source.test_images
    about = (train.shape, test.shape, str(train.dtype), source.class_names, source.task_classes)
    digest = hashlib.sha256(repr(about).encode())
    for array in (train, source.train_labels, test, source.test_labels, source.train_task, source.test_task):
        digest.update(b"" if array is None else np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]


def _array(values: object, what: str) -> NDArray[Any]:
    detach = getattr(values, "detach", None)  # a tensor
    try:
        if detach is None:
            return np.asarray(values)
        tensor = detach().cpu()
        return np.asarray((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy())
    except (ValueError, TypeError, NotImplementedError) as error:  # the last one for tensors on the meta device
        raise UserError(f"{what}: can't be used as an array ({error}). Use one row per sample.") from error


def _samples(values: object, what: str) -> NDArray[Any]:
    """Return samples as uint8 or float32; images of shape (height, width) get a channel."""
    array = _array(values, what)
    if array.ndim < 2 or len(array) == 0 or array.size == 0:
        raise UserError(f"{what} has shape {array.shape}. Use one row per sample, and at least one sample.")
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim == 4 and array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS:
        raise UserError(
            f"{what} has shape {array.shape}, with channels last. Use (samples, channels, height, width): "
            f"{what}.transpose(0, 3, 1, 2)."
        )
    if array.dtype == np.bool_:
        return array.astype(np.float32)
    if np.issubdtype(array.dtype, np.integer):
        if array.dtype != np.uint8 and (array.min() < 0 or array.max() > 255):
            raise UserError(
                f"{what} has integers from {array.min()} to {array.max()}. Use 0 to 255, which are scaled to [0, 1], "
                f"or floating-point values, which are used as they are."
            )
        return np.ascontiguousarray(array, dtype=np.uint8)
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"{what} is of type {array.dtype}. Use numbers.")
    samples = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(samples).all():
        raise UserError(f"{what} contains NaN or infinity. Remove or replace these values.")
    return samples


def _labels(values: object, what: str, samples: int) -> NDArray[Any]:
    array = _array(values, what)
    if array.ndim == 2 and array.shape[1] > 1:
        raise UserError(
            f"{what} has shape {array.shape}. Arrays take one label per sample; `contnorm data NAME --csv FILE` builds "
            f"a stream of images with several labels."
        )
    array = array.reshape(-1) if array.ndim == 2 else array
    if array.ndim != 1 or len(array) != samples:
        raise UserError(f"{what} has shape {array.shape} for {samples} samples. Use one label per sample.")
    if array.dtype.kind == "O":
        array = _typed_labels(array, what)
    if array.dtype.kind not in "fbiu":
        return array.astype(str)
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == array.round()).all()):
        raise UserError(f"{what} has labels that are not whole numbers. Use class indices or names.")
    if array.dtype.kind in "fu" and (np.abs(array) >= 2**63).any():
        raise UserError(f"{what} has the label {array[np.abs(array) >= 2**63][0]}. Use numbers below 2**63, or names.")
    return array.astype(np.int64)


def _typed_labels(array: NDArray[Any], what: str) -> NDArray[Any]:
    """Return labels of an array of objects, such as a column of a table, as numbers or as text."""
    labels = array.tolist()
    for kind in (str, (bool, int, float, np.number, np.bool_)):
        if all(isinstance(label, kind) for label in labels):
            return np.array(labels)
    kinds = sorted({type(label).__name__ for label in labels})
    raise UserError(f"{what} has labels of type {', '.join(kinds)}. Use either whole numbers or text for all of them.")


def _task_ids(ids: tuple[object, object], samples: tuple[int, int]) -> tuple[Integers, Integers]:
    if not isinstance(ids, tuple | list) or len(ids) != 2:
        raise UserError("task_ids must be a pair: the task of each training sample, and of each test sample.")
    arrays = [_array(values, f"task_ids[{i}]") for i, values in enumerate(ids)]
    for i, (array, count) in enumerate(zip(arrays, samples, strict=True)):
        if array.shape != (count,) or array.dtype.kind not in "iu":
            raise UserError(
                f"task_ids[{i}] has shape {array.shape} and type {array.dtype}. Use an integer for each of the "
                f"{count} samples."
            )
    train, test = (array.astype(np.int64) for array in arrays)
    expected = np.arange(int(train.max()) + 1)
    for i, array in enumerate((train, test)):
        if not np.array_equal(np.unique(array), expected):
            raise UserError(
                f"task_ids[{i}] has the tasks {np.unique(array).tolist()}. Number tasks from 0 without gaps, with "
                f"training and test samples in each."
            )
    return train, test


def _task_classes(tasks: int | Sequence[Sequence[Any]] | None, names: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the class indices of each task."""
    if tasks is None:
        raise UserError("tasks is missing. Give a number of tasks, the classes of each task, or task_ids.")
    if isinstance(tasks, int | np.integer) and not isinstance(tasks, bool):
        if not 1 <= tasks <= len(names):
            raise UserError(f"tasks={tasks}: the {len(names)} classes can be split over 1 to {len(names)} tasks.")
        return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(len(names)), tasks))
    index = {name: i for i, name in enumerate(names)}
    blocks = _class_lists(tasks)
    unknown = [name for classes in blocks for name in classes if name not in index]
    if unknown:
        raise UserError(f"tasks: there is no class {unknown[0]!r}. Classes are {', '.join(map(str, names[:20]))}.")
    flat = [name for classes in blocks for name in classes]
    if not flat or any(not classes for classes in blocks) or len(set(flat)) < len(flat):
        raise UserError(
            "tasks: give at least one class per task, and each class once. For shared classes use task_ids."
        )
    return tuple(tuple(index[name] for name in classes) for classes in blocks)


def _class_lists(tasks: object) -> list[list[Any]]:
    """Return the classes of each task as a list of lists."""
    if isinstance(tasks, Iterable) and not isinstance(tasks, str | bytes):
        blocks = list(tasks)
        if all(isinstance(classes, Iterable) and not isinstance(classes, str | bytes) for classes in blocks):
            return [[name.item() if isinstance(name, np.generic) else name for name in classes] for classes in blocks]
    raise UserError(f"tasks={tasks!r}: use a number of tasks, or a list of the classes of each task, as [[0, 1], [2]].")
