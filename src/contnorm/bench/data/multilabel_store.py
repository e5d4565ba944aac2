"""Multi-label data sets on disk: memory-mapped arrays and a manifest.

The folder of a data set has a ``manifest.json``, which names the subfolder of the arrays. The manifest is written last,
so an stopped_runs data set cannot be loaded. ``missing.json`` lists the pictures that were missing in the build.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contnorm.bench.data.dataset import GROUPS, SPLITS, MultiLabelSource
from contnorm.bench.data.stored_arrays import map_array, read_json_manifest, state_path
from contnorm.bench.files import (
    Progress,
    clock_ns,
    is_plain_name,
    is_unchanged,
    load_state,
    save_state,
    signatures,
)
from contnorm.bench.lazy_numpy import np
from contnorm.errors import UserError

__all__ = [
    "MANIFEST",
    "ROWS",
    "VERSION",
    "Manifest",
    "content_fingerprint",
    "find_stored",
    "list_stored",
    "load_stored",
    "read_manifest",
]

MANIFEST = "manifest.json"
KIND = "contnorm multi-label data set"
VERSION = 1
ROWS = 64  # images that are decoded, written and hashed together; an interrupt loses at most these
REQUIRED_KEYS = (
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


def list_stored(root: Path) -> dict[str, Path]:
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
    raw = read_json_manifest(path, KIND, VERSION, "built by `contnorm data`", "build")
    missing = [key for key in REQUIRED_KEYS if key not in raw]
    if missing:
        raise UserError(f"{path}: has no {', '.join(missing)}. Delete {folder} and build it again.")
    problem = _manifest_problem(raw)
    if problem:
        raise UserError(f"{path}: {problem}. Delete {folder} and build it again.")
    return raw


def load_stored(folder: Path, progress: Progress = lambda *_: None) -> MultiLabelSource:
    """Load a built data set, memory-mapped. Its content is verified again only if a file has changed.

    Args:
        folder: Folder of its manifest.
        progress: Called with what is done and how much of it.
    """
    manifest = read_manifest(folder)
    arrays = {
        f"{split}_{part}": map_array(folder / manifest["folder"] / f"{split}_{part}.npy", folder, "build")
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


def _check(folder: Path, manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise an error if the arrays do not have the shapes and values that the manifest implies."""
    side, classes = manifest["size"], len(manifest["class_names"])
    for split in SPLITS:
        count = manifest["images"][split]["images"]
        shapes = {"images": (count, 3, side, side), "labels": (count, classes), "task": (count,)}
        for part, shape in shapes.items():
            if arrays[f"{split}_{part}"].shape != shape:
                raise UserError(
                    f"{folder}: {split}_{part}.npy has shape {arrays[f'{split}_{part}'].shape} instead of {shape}. "
                    f"Delete the folder and build it again."
                )
        _check_values(folder, split, arrays, len(manifest["task_names"]))


def _check_values(folder: Path, split: str, arrays: Mapping[str, np.ndarray], tasks: int) -> None:
    """Check data types, and the ranges of labels and tasks. Pixels can have any value."""
    for part, kind, end in (("images", np.uint8, 256), ("labels", np.uint8, 2), ("task", np.int64, tasks)):
        array = arrays[f"{split}_{part}"]
        if array.dtype != kind or (part != "images" and array.size and not 0 <= array.min() <= array.max() < end):
            raise UserError(
                f"{folder}: {split}_{part}.npy must contain {np.dtype(kind)} values from 0 to {end - 1}. Delete the "
                f"folder and build it again."
            )


def _check_content(folder: Path, manifest: Manifest, arrays: Mapping[str, np.ndarray], progress: Progress) -> None:
    """Raise an error if the arrays do not match the fingerprint that was computed when they were built."""
    path = state_path(folder)
    now, state = clock_ns(), load_state(path)
    files = signatures([folder / MANIFEST, *(folder / manifest["folder"] / f"{name}.npy" for name in arrays)], folder)
    if is_unchanged(files, state, "files"):
        return
    digests = {split: _block_digests(arrays[f"{split}_images"], split, progress) for split in SPLITS}
    fingerprint = content_fingerprint(manifest["class_names"], manifest["class_groups"], digests, arrays)
    if fingerprint != manifest["fingerprint"]:
        raise UserError(
            f"{folder}: the arrays do not match fingerprint {manifest['fingerprint']} of {MANIFEST}, so a file was "
            f"changed or damaged. Delete the folder and build it again."
        )
    save_state(path, now, files=files)


def _block_digests(images: np.ndarray, split: str, progress: Progress) -> list[str]:
    digests = []
    for start in range(0, len(images), ROWS):
        digests.append(hashlib.sha256(np.ascontiguousarray(images[start : start + ROWS]).data).hexdigest())
        progress(f"checking {split} images", min(start + ROWS, len(images)), len(images))
    return digests


def content_fingerprint(
    class_names: Sequence[str],
    class_groups: Sequence[str],
    blocks: Mapping[str, Sequence[str]],
    arrays: Mapping[str, np.ndarray],
) -> str:
    """Compute the fingerprint of pixels, labels, tasks and classes.

    Args:
        class_names, class_groups: Name and group of each class, by column of the labels.
        blocks: SHA-256 of each block of `ROWS` images, by split.
        arrays: ``<split>_labels`` and ``<split>_task``.
    """
    digest = hashlib.sha256(json.dumps([list(class_names), list(class_groups)]).encode())
    for split in SPLITS:
        for block in blocks[split]:
            digest.update(block.encode())
        for part in ("labels", "task"):
            digest.update(np.ascontiguousarray(arrays[f"{split}_{part}"]).data)
    return digest.hexdigest()[:16]


MAX_SIDE = 2**14


def _manifest_problem(raw: Mapping[str, Any]) -> str:
    """Return the problem of a manifest that has all of its keys, as the end of a sentence; empty if it is valid."""
    checks = {
        "version": _is_count(raw["version"]),
        "name": _is_text(raw["name"]),
        "complete": type(raw["complete"]) is bool,
        "size": _is_count(raw["size"]) and 0 < raw["size"] <= MAX_SIDE,
        "fingerprint": _is_text(raw["fingerprint"]),
        "made_of": _is_text(raw["made_of"]),
        "folder": is_plain_name(raw["folder"]),
        "published": raw["published"] is None or _is_published(raw["published"]),
        "task_names": _are_texts(raw["task_names"]),
        "class_names": _are_texts(raw["class_names"]),
        "class_groups": _are_texts(raw["class_groups"]) and set(raw["class_groups"]) <= set(GROUPS),
    }
    wrong = [key for key, passed in checks.items() if not passed]
    if wrong:
        return f"has an unusable value of {wrong[0]!r}"
    if len(raw["class_groups"]) != len(raw["class_names"]):
        return "does not have one group per class"
    for part in ("images", "missing"):
        if not isinstance(raw[part], dict) or not all(_are_counts(raw[part].get(split), raw) for split in SPLITS):
            return f"has counts in {part!r} that do not fit its tasks and classes"
    return ""


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: Any) -> bool:
    return type(value) is str and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_text, value))


def _is_published(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("images")) and type(value.get("lists_as_published")) is bool


def _are_counts(value: Any, raw: Mapping[str, Any]) -> bool:
    if not isinstance(value, dict) or not all(_is_count(value.get(key)) for key in ("images", "unlabelled")):
        return False
    by_task, by_class = value.get("by_task"), value.get("by_class")
    if not isinstance(by_task, list) or not isinstance(by_class, dict):
        return False
    counted = all(map(_is_count, by_task)) and all(map(_is_count, by_class.values()))
    return counted and len(by_task) == len(raw["task_names"]) and set(by_class) == set(raw["class_names"])
