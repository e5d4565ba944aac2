"""Data sets of several labels an image as they are kept: plain arrays that are mapped, and a manifest that is read.

A folder holds ``manifest.json``, which is written last and names the folder of the arrays beside it. So a data set is
there whole or, to whoever loads it, not at all. ``missing.json`` lists the pictures it was built without.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from contnorm.errors import UserError, usable
from contnorm.streams.json_text import parse_json
from contnorm.streams.listed import SPLITS
from contnorm.streams.manifest_check import manifest_problem
from contnorm.streams.multilabel import MultiLabelSource

__all__ = ["MANIFEST", "VERSION", "Manifest", "find_stored", "load_stored", "read_manifest", "stored_under"]

MANIFEST = "manifest.json"
KIND = "contnorm multi-label data set"
VERSION = 1
NEEDED = (
    "version",
    "name",
    "complete",
    "size",
    "fingerprint",
    "made_of",
    "folder",
    "published",
    "images",
    "missing",
    "task_names",
    "class_names",
    "class_groups",
)
Manifest = Mapping[str, Any]


def find_stored(name: str, root: Path) -> Path | None:
    """The folder of a built data set: one of that name under the root, or the folder that the name is the path of."""
    for folder in (root / name, Path(name)):
        if name and (folder / MANIFEST).is_file():
            return folder
    return None


def stored_under(root: Path) -> dict[str, Path]:
    """The built data sets right under a root, by the names of their folders."""
    if not root.is_dir():
        return {}
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{MANIFEST}")) if _is_ours(path)}


def _is_ours(path: Path) -> bool:
    try:
        read_manifest(path.parent)
    except UserError:
        return False
    return True


def read_manifest(folder: Path) -> Manifest:
    """What a built data set says of itself: counts by task and class, what is missing, size and fingerprint."""
    path = folder / MANIFEST
    with usable(path, "it can't be read", "Let yourself read it, or build the data set elsewhere."):
        text = path.read_bytes()
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: is no JSON ({error}). Delete {folder}, and build it again.") from error
    if not isinstance(raw, dict) or raw.get("kind") != KIND:
        raise UserError(f"{path}: is no manifest of a data set that `contnorm data` has built.")
    if type(raw.get("version")) is int and raw["version"] > VERSION:
        raise UserError(
            f"{path}: is of version {str(raw['version'])[:20]}; this contnorm reads {VERSION}. Upgrade contnorm."
        )
    absent = [key for key in NEEDED if key not in raw]
    if absent:
        raise UserError(f"{path}: has no {', '.join(absent)}. Delete {folder}, and build it again.")
    problem = manifest_problem(raw)
    if problem:
        raise UserError(f"{path}: {problem}. Delete {folder}, and build it again.")
    return raw


def load_stored(folder: Path) -> MultiLabelSource:
    """A built data set, memory-mapped."""
    manifest = read_manifest(folder)
    arrays = {
        f"{split}_{part}": _mapped(folder, manifest, f"{split}_{part}")
        for split in SPLITS
        for part in ("images", "labels", "task")
    }
    names, groups = tuple(manifest["class_names"]), tuple(manifest["class_groups"])
    _check(folder, manifest, arrays)
    published = manifest["published"]
    return MultiLabelSource(
        name=manifest["name"],
        classes=len(names),
        fingerprint=manifest["fingerprint"],
        tasks=len(manifest["task_names"]),
        class_names=names,
        class_groups=groups,
        published_images=None if published is None else published["images"],
        missing_images=sum(manifest["missing"][split]["images"] for split in SPLITS),
        **arrays,
    )


def _mapped(folder: Path, manifest: Manifest, part: str) -> np.ndarray:
    path = folder / manifest["folder"] / f"{part}.npy"
    try:
        array = np.lib.format.open_memmap(path, mode="c")  # unlike np.load, reads arrays only
    except Exception as error:  # a damaged header can fail in any way
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is broken or not there ({reason}). Delete {folder}, and build it again.") from error
    return array


def _check(folder: Path, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
    """Files and manifest belong together."""
    side, classes = manifest["size"], len(manifest["class_names"])
    for split in SPLITS:
        count = manifest["images"][split]["images"]
        shapes = {"images": (count, 3, side, side), "labels": (count, classes), "task": (count,)}
        for part, shape in shapes.items():
            if arrays[f"{split}_{part}"].shape != shape:
                raise UserError(
                    f"{folder}: {split}_{part}.npy should be {shape}, and is {arrays[f'{split}_{part}'].shape}. Delete "
                    f"the folder, and build it again."
                )
        _check_values(folder, split, arrays, len(manifest["task_names"]))


def _check_values(folder: Path, split: str, arrays: Mapping[str, np.ndarray], tasks: int) -> None:
    """Data types, and labels and tasks in their range. Pixels may have any value."""
    for part, kind, end in (("images", np.uint8, 256), ("labels", np.uint8, 2), ("task", np.int64, tasks)):
        array = arrays[f"{split}_{part}"]
        if array.dtype != kind or (part != "images" and array.size and not 0 <= array.min() <= array.max() < end):
            raise UserError(
                f"{folder}: {split}_{part}.npy should hold {np.dtype(kind)} below {end}. Delete the folder, and "
                f"build it again."
            )
