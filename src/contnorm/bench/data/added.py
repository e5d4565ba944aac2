"""Data sets that a user adds under the data root: a folder of arrays with a manifest, memory-mapped when it is loaded.

``ROOT/NAME/`` holds `MANIFEST` and one ``.npy`` file per array. A data set is written to a temporary folder and renamed
when it is complete. Its content is verified again only if a file has changed since.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from contnorm.atomic_files import write_atomically
from contnorm.bench.data.arrays import ArraySource, array_source
from contnorm.bench.data.image_folders import read_class_folders
from contnorm.bench.data.npz import read_npz
from contnorm.bench.data.stored_arrays import map_array, read_json_manifest, state_path
from contnorm.bench.files import (
    Progress,
    clock_ns,
    is_plain_name,
    is_unchanged,
    load_state,
    locked,
    save_state,
    signatures,
)
from contnorm.bench.lazy_numpy import np
from contnorm.errors import UserError, usable

__all__ = ["MANIFEST", "add_arrays", "find_added", "list_added", "load_added", "read_added"]

MANIFEST = "dataset.json"
KIND, VERSION = "contnorm data set", 1
_REQUIRED = {"name": str, "stream": str, "source": str, "fingerprint": str, "class_names": list, "samples": dict}
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
_TASKS = ("train_task", "test_task")


def find_added(name: str, root: Path) -> Path | None:
    """Return the folder of an added data set by its name, or by its name and digest (``flowers@1a2b...``).

    None if there is none of this name, or none with this digest.
    """
    plain, _, digest = name.partition("@")
    folder = root / plain
    if not is_plain_name(plain) or not (folder / MANIFEST).is_file():
        return None
    return folder if not digest or read_added(folder)["source"] == name else None


def list_added(root: Path) -> dict[str, Path]:
    """Return the folders of the added data sets under a root, by name."""
    if not root.is_dir():
        return {}
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{MANIFEST}"))}


def read_added(folder: Path) -> Mapping[str, Any]:
    """Read and check the manifest of an added data set."""
    path = folder / MANIFEST
    raw = read_json_manifest(path, KIND, VERSION, "that `contnorm data add` wrote", "add")
    bad = next((key for key, kind in _REQUIRED.items() if not isinstance(raw.get(key), kind)), None)
    if bad is not None or raw["stream"] not in ("arrays", "folder"):
        raise UserError(
            f"{path}: its entry {bad or 'stream'!r} is missing or damaged. Delete {folder} and add it again."
        )
    return raw


def add_arrays(
    name: str,
    root: Path,
    *,
    folder: Path | None = None,
    npz: Path | None = None,
    tasks: int | Sequence[Sequence[Any]] | None = None,
    size: int | None = None,
    test_share: float = 0.2,
    progress: Progress = lambda *_: None,
) -> Path:
    """Read a user's data, check it, and write it under the data root. See `contnorm.bench.add_dataset`."""
    target = root / name
    with _new_folders(root), _only_writer(root, name):
        if target.exists():
            raise UserError(f"{target}: exists. Use another name, or delete it to add the data set again.")
        partial = root / f".{name}.unfinished"
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
        partial.mkdir()
        try:
            source = _read(name, partial, folder, npz, tasks, size, test_share, progress)
            _write(source, partial, name, "folder" if folder is not None else "arrays")
            os.replace(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


@contextmanager
def _new_folders(root: Path) -> Iterator[None]:
    """Create a folder and its parents. If the block fails, those that are new and empty are removed again."""
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    with usable(root, "no data set can be written there", "Use another folder (root= or --data-root)."):
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    try:
        yield
    except BaseException:
        with suppress(OSError):  # not empty: another process has written there
            for folder in new:
                folder.rmdir()
        raise


@contextmanager
def _only_writer(root: Path, name: str) -> Iterator[None]:
    path = root / f".{name}.lock"
    try:
        with locked(path, wait=False):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    except BlockingIOError:
        raise UserError(f"{root / name}: another process is adding it. Wait until it has finished.") from None


def _read(
    name: str,
    partial: Path,
    folder: Path | None,
    npz: Path | None,
    tasks: int | Sequence[Sequence[Any]] | None,
    size: int | None,
    test_share: float,
    progress: Progress,
) -> ArraySource:
    if folder is not None:
        arrays = read_class_folders(folder, size, test_share, _allocator(partial), progress)
        return array_source(*arrays, tasks=tasks, task_ids=None, name=name)
    assert npz is not None
    data = read_npz(npz, test_share)
    return array_source(*data.arrays, tasks=tasks, task_ids=data.task_ids, name=name)


def _allocator(folder: Path) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """Return a function that allocates an array of bytes in a file, so that images need not fit into memory."""

    def allocate(split: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.lib.format.open_memmap(folder / f"{split}_images.npy", mode="w+", dtype=np.uint8, shape=shape)

    return allocate


def _write(source: ArraySource, folder: Path, name: str, stream: str) -> None:
    parts = [*_ARRAYS, *(part for part in _TASKS if getattr(source, part) is not None)]
    for part in parts:
        path = folder / f"{part}.npy"
        if not path.exists():  # images of a folder were decoded into their file
            np.save(path, getattr(source, part), allow_pickle=False)
    manifest = {
        "kind": KIND,
        "version": VERSION,
        "name": name,
        "stream": stream,
        "source": source.name,
        "fingerprint": source.fingerprint,
        "class_names": source.class_names,
        "task_classes": source.task_classes,
        "samples": {"train": len(source.train_labels), "test": len(source.test_labels)},
        "shape": source.train_images.shape[1:],
        "arrays": parts,
    }
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def load_added(folder: Path) -> ArraySource:
    """Load an added data set, memory-mapped. Its content is verified again only if a file has changed."""
    manifest = read_added(folder)
    arrays: dict[str, Any] = {part: map_array(folder / f"{part}.npy", folder, "add") for part in _ARRAYS}
    tasks: dict[str, Any] = dict.fromkeys(_TASKS)
    for part in _TASKS:
        if (folder / f"{part}.npy").is_file():
            tasks[part] = map_array(folder / f"{part}.npy", folder, "add")
    classes = manifest.get("task_classes")
    try:
        source = ArraySource(
            name=manifest["source"],
            **arrays,
            classes=len(manifest["class_names"]),
            fingerprint=manifest["fingerprint"],
            class_names=tuple(manifest["class_names"]),
            task_classes=None if classes is None else tuple(tuple(block) for block in classes),
            **tasks,
        )
        _verify(folder, source, [*arrays, *(part for part, array in tasks.items() if array is not None)])
    except (TypeError, ValueError, IndexError) as error:
        raise UserError(f"{folder}: its files are damaged ({error}). Delete the folder and add it again.") from error
    return source


def _verify(folder: Path, source: ArraySource, parts: Sequence[str]) -> None:
    """Raise an error if the arrays do not match the fingerprint that was computed when they were added."""
    checked = state_path(folder)
    now, state = clock_ns(), load_state(checked)
    files = signatures([folder / MANIFEST, *(folder / f"{part}.npy" for part in parts)], folder)
    if is_unchanged(files, state, "files"):
        return
    if not source.is_unchanged() or source.name != f"{folder.name}@{source.fingerprint.partition(':')[2][:12]}":
        raise UserError(
            f"{folder}: the arrays do not match the fingerprint in {MANIFEST}, so a file was changed or damaged. "
            f"Delete the folder and add the data set again."
        )
    save_state(checked, now, files=files)
