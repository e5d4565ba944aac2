"""Multi-label data sets on disk: memory-mapped arrays and a manifest.

The folder of a data set has a ``manifest.json``, which names the subfolder of the arrays. The manifest is written last,
so an stopped_runs data set cannot be loaded. ``missing.json`` lists the pictures that were missing in the build.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contnorm.bench.data.file_state import Progress, clock_ns, load_state, save_state, signatures, trusted, user_cache
from contnorm.bench.data.json_text import parse_json
from contnorm.bench.data.manifest_check import manifest_problem
from contnorm.bench.data.multilabel import MultiLabelSource
from contnorm.bench.data.multilabel_manifest import SPLITS
from contnorm.errors import UserError, usable

__all__ = [
    "MANIFEST",
    "ROWS",
    "VERSION",
    "Manifest",
    "content_fingerprint",
    "find_stored",
    "load_stored",
    "read_manifest",
    "stored_under",
]

MANIFEST = "manifest.json"
KIND = "contnorm multi-label data set"
VERSION = 1
ROWS = 64  # images that are decoded, written and hashed together; an interrupt loses at most these
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
    """Return the folder of a built data set, given its name under the root or its path; None if there is none."""
    for folder in (root / name, Path(name)):
        if name and (folder / MANIFEST).is_file():
            return folder
    return None


def stored_under(root: Path) -> dict[str, Path]:
    """Return the folders of the built data sets directly under a root, by folder name."""
    if not root.is_dir():
        return {}
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{MANIFEST}")) if _has_manifest(path)}


def _has_manifest(path: Path) -> bool:
    try:
        read_manifest(path.parent)
    except UserError:
        return False
    return True


def read_manifest(folder: Path) -> Manifest:
    """Read and check a manifest: counts by task and class, missing pictures, picture size and fingerprint."""
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


def load_stored(folder: Path, progress: Progress = lambda *_: None) -> MultiLabelSource:
    """Load a built data set, memory-mapped. Its content is verified again only if a file has changed.

    Args:
        folder: Folder of its manifest.
        progress: Called with what is done and how much of it.
    """
    manifest = read_manifest(folder)
    arrays = {
        f"{split}_{part}": _map_array(folder, manifest, f"{split}_{part}")
        for split in SPLITS
        for part in ("images", "labels", "task")
    }
    names, groups = tuple(manifest["class_names"]), tuple(manifest["class_groups"])
    _check(folder, manifest, arrays)
    _check_content(folder, manifest, arrays, progress)
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
        details={},
        **arrays,
    )


def _map_array(folder: Path, manifest: Manifest, part: str) -> np.ndarray:
    path = folder / manifest["folder"] / f"{part}.npy"
    try:
        array = np.lib.format.open_memmap(path, mode="c")  # unlike np.load, reads arrays only
    except Exception as error:  # a damaged header can raise any exception
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is broken or not there ({reason}). Delete {folder}, and build it again.") from error
    return array


def _check(folder: Path, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise an error if the arrays do not have the shapes and values that the manifest implies."""
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
    """Check data types, and the ranges of labels and tasks. Pixels can have any value."""
    for part, kind, end in (("images", np.uint8, 256), ("labels", np.uint8, 2), ("task", np.int64, tasks)):
        array = arrays[f"{split}_{part}"]
        if array.dtype != kind or (part != "images" and array.size and not 0 <= array.min() <= array.max() < end):
            raise UserError(
                f"{folder}: {split}_{part}.npy should hold {np.dtype(kind)} below {end}. Delete the folder, and "
                f"build it again."
            )


def _check_content(folder: Path, manifest: Manifest, arrays: Mapping[str, np.ndarray], progress: Progress) -> None:
    """Raise an error if the arrays do not match the fingerprint that was computed when they were built."""
    path = _state_path(folder)
    now, state = clock_ns(), load_state(path)
    files = signatures([folder / MANIFEST, *(folder / manifest["folder"] / f"{name}.npy" for name in arrays)], folder)
    if trusted(files, state, "files"):
        return
    digests = {split: _piece_digests(arrays[f"{split}_images"], split, progress) for split in SPLITS}
    fingerprint = content_fingerprint(manifest["class_names"], manifest["class_groups"], digests, arrays)
    if fingerprint != manifest["fingerprint"]:
        raise UserError(
            f"{folder}: the arrays do not match fingerprint {manifest['fingerprint']} of {MANIFEST}: a file was "
            f"changed or damaged. Delete the folder, and build it again."
        )
    save_state(path, now, files=files)


def _state_path(folder: Path) -> Path:
    if os.access(folder, os.W_OK):
        return folder / ".checked.json"
    return user_cache() / f"checked-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"


def _piece_digests(images: np.ndarray, split: str, progress: Progress) -> list[str]:
    digests = []
    for start in range(0, len(images), ROWS):
        digests.append(hashlib.sha256(np.ascontiguousarray(images[start : start + ROWS]).data).hexdigest())
        progress(f"checking {split} images", min(start + ROWS, len(images)), len(images))
    return digests


def content_fingerprint(
    class_names: Sequence[str],
    class_groups: Sequence[str],
    pieces: Mapping[str, Sequence[str]],
    arrays: Mapping[str, np.ndarray],
) -> str:
    """Compute the fingerprint of pixels, labels, tasks and classes.

    Args:
        class_names, class_groups: Name and group of each class, by column of the labels.
        pieces: SHA-256 of each block of `ROWS` images, by split.
        arrays: ``<split>_labels`` and ``<split>_task``.
    """
    digest = hashlib.sha256(json.dumps([list(class_names), list(class_groups)]).encode())
    for split in SPLITS:
        for piece in pieces[split]:
            digest.update(piece.encode())
        for part in ("labels", "task"):
            digest.update(np.ascontiguousarray(arrays[f"{split}_{part}"]).data)
    return digest.hexdigest()[:16]
