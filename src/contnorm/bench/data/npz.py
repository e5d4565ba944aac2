"""Arrays of a user's ``.npz`` file, by the names that such files use."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contnorm.bench.data.class_share import check_test_share, choose_test_samples
from contnorm.bench.lazy_numpy import np
from contnorm.errors import UserError

__all__ = ["NpzData", "read_npz"]

_NAMES = {
    "x": ("x_train", "train_images", "train_x", "X_train", "x", "X", "images"),
    "y": ("y_train", "train_labels", "train_y", "y", "labels"),
    "x_test": ("x_test", "test_images", "test_x", "X_test"),
    "y_test": ("y_test", "test_labels", "test_y"),
    "task": ("task_train", "train_task", "task"),
    "task_test": ("task_test", "test_task"),
}


@dataclass(frozen=True)
class NpzData:
    """Arrays of a file: samples and labels of both splits, and the task of each sample if the file has it."""

    arrays: tuple[Any, Any, Any, Any]
    task_ids: tuple[Any, Any] | None


def read_npz(path: Path, test_share: float) -> NpzData:
    """Read the samples, labels and optional tasks of both splits; the names of arrays are in the docs of `add_dataset`.

    Args:
        path: The file.
        test_share: Share of each class in the test split, if the file has no test samples.

    Raises:
        UserError: If the file can't be read, or lacks an array.
    """
    content = _load(path)
    parts = {part: next((content[n] for n in names if n in content), None) for part, names in _NAMES.items()}
    for part in ("x", "y"):
        if parts[part] is None:
            raise UserError(
                f"{path}: has the arrays {', '.join(sorted(content)) or 'none'}, but no {_NAMES[part][0]}. Save the "
                f"file with np.savez({path.name!r}, x_train=..., y_train=..., x_test=..., y_test=...)."
            )
    if (parts["x_test"] is None) != (parts["y_test"] is None):
        raise UserError(f"{path}: has one of x_test and y_test. Use both, or neither for a split by class.")
    if parts["x_test"] is None:
        parts = _split(path, parts, test_share)
    if (parts["task"] is None) != (parts["task_test"] is None):
        raise UserError(f"{path}: has one of task_train and task_test. Use both, or neither.")
    task_ids = None if parts["task"] is None else (parts["task"], parts["task_test"])
    return NpzData((parts["x"], parts["y"], parts["x_test"], parts["y_test"]), task_ids)


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file.")
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise UserError(f"{path}: is a single array. Use an .npz file with x_train, y_train, x_test and y_test.")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:200]
        if "pickle" in reason:  # numpy takes any file that it does not know for a pickle, and advises to load it
            reason = "it has Python objects, which are not loaded" if zipfile.is_zipfile(path) else "another format"
        raise UserError(
            f"{path}: can't be read as an .npz file of arrays ({reason}). Save arrays of numbers with np.savez."
        ) from error


def _split(path: Path, parts: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Split the samples of each class into training and test samples, at random with a fixed seed."""
    check_test_share(share)
    labels = np.asarray(parts["y"]).reshape(-1)
    if len(labels) != len(parts["x"]):
        raise UserError(f"{path}: has {len(parts['x'])} samples and {len(labels)} labels. Use one label per sample.")
    test = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        indices = np.flatnonzero(labels == label)
        if len(indices) < 2:
            raise UserError(
                f"{path}: class {label.item()!r} has one sample. Use at least two, or add x_test and y_test."
            )
        test[indices[choose_test_samples(label, len(indices), share)]] = True
    task = None if parts["task"] is None else np.asarray(parts["task"])
    return {
        "x": parts["x"][~test],
        "y": labels[~test],
        "x_test": parts["x"][test],
        "y_test": labels[test],
        "task": None if task is None else task[~test],
        "task_test": None if task is None else task[test],
    }
