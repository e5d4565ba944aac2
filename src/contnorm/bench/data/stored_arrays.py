"""Folders of memory-mapped arrays with a JSON manifest: what built and added data sets have in common."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Literal

from contnorm.bench.files import parse_json, user_cache
from contnorm.bench.lazy_numpy import np
from contnorm.errors import UserError, usable

__all__ = ["map_array", "read_json_manifest", "state_path"]

Action = Literal["build", "add"]  # how the user makes the folder again


def read_json_manifest(path: Path, kind: str, version: int, written_by: str, action: Action) -> dict[str, Any]:
    """Read a manifest; checks that it is one of a kind and of a version that is supported.

    Args:
        path: The manifest, in the folder of its data set.
        kind: Expected value of its entry ``kind``.
        version: Newest supported value of its entry ``version``.
        written_by: What writes such manifests, for messages.
        action: How the data set is made again, for messages.
    """
    with usable(path, "cannot be read", "Check its permissions."):
        text = path.read_bytes()
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise UserError(f"{path}: is not valid JSON ({error}). Delete {path.parent} and {action} it again.") from error
    if not isinstance(raw, dict) or raw.get("kind") != kind:
        raise UserError(f"{path}: is not the manifest of a data set {written_by}.")
    if type(raw.get("version")) is int and raw["version"] > version:
        raise UserError(
            f"{path}: has version {str(raw['version'])[:20]}; this contnorm supports {version}. Upgrade contnorm."
        )
    return raw


def map_array(path: Path, folder: Path, action: Action) -> np.ndarray:
    """Map an array file into memory, copy-on-write.

    Args:
        path: The ``.npy`` file.
        folder: The folder of its data set, for messages.
        action: How the data set is made again, for messages.
    """
    try:
        return np.lib.format.open_memmap(path, mode="c")  # unlike np.load, reads arrays only
    except Exception as error:  # a damaged header can raise any exception
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is missing or damaged ({reason}). Delete {folder} and {action} it again.") from error


def state_path(folder: Path) -> Path:
    """Return the file that says which files of a folder were verified; in the user's cache if it can't be written."""
    if os.access(folder, os.W_OK):
        return folder / ".checked.json"
    return user_cache() / f"checked-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"
