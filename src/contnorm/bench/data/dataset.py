"""Data sets in memory and on disk: images with one label, the user's arrays, and images with several labels.

On disk, a data set is a folder with a manifest and one ``.npy`` file per array, memory-mapped when it is loaded. Data
sets that users add, multi-label data sets that are built, and the decoded files of published data sets all have this
format. The manifest has the fields of the data set that are no arrays, and notes on how it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contnorm.atomic_files import write_atomically
from contnorm.errors import UserError

Images: TypeAlias = "NDArray[np.uint8]"
Labels: TypeAlias = "NDArray[np.int64]"
Indices: TypeAlias = "NDArray[np.int64]"
Split = tuple[Images, Labels]
Progress = Callable[[str, int, int], None]  # what is done, units done, units in total

SPLITS = ("train", "test")
GROUPS = ("majority", "moderate", "minority")
MAJORITY_ABOVE, MINORITY_BELOW = 900, 200  # training images, as published for both streams


@dataclass(frozen=True, repr=False)
class Source:
    """A data set, in memory or memory-mapped: uint8 images (samples, channels, height, width) and their labels.

    Attributes:
        classes: Number of classes.
        fingerprint: Hash that identifies samples, labels and split; see `fingerprint_arrays`.
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
class ArraySource(Source):
    """A data set of the user's, of arrays or images. Labels are indices into ``class_names``.

    Attributes:
        class_names: The labels as the user gave them, sorted.
        task_classes: The classes of each task; None if every sample has a task of its own.
        train_task, test_task: The task of each sample; None if tasks are sets of classes.
    """

    class_names: tuple[Any, ...]
    task_classes: tuple[tuple[int, ...], ...] | None
    train_task: Indices | None
    test_task: Indices | None

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        if self.task_classes is not None:
            return len(self.task_classes)
        assert self.train_task is not None
        return int(self.train_task.max()) + 1


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

    train_task: Indices
    test_task: Indices
    tasks: int
    class_names: tuple[str, ...]
    class_groups: tuple[str, ...]
    published_images: int | None = None
    missing_images: int = 0


@cache
def published() -> dict[str, Any]:
    """Return published facts: the long-tailed streams, addresses and hashes of downloads, the order of mini-ImageNet.

    Example:
        >>> len(published()["mini-imagenet"]), list(published()["streams"])
        (100, ['cocoseq', 'nus-wideseq'])
    """
    text = resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


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


# Data sets on disk

MANIFEST = "dataset.json"
VERSION = 2
SOURCE_CLASSES: dict[str, Any] = {cls.__name__: cls for cls in (Source, ArraySource, MultiLabelSource)}
CACHE_FOLDER = ".contnorm"  # name of the cache folder next to the files of a published data set

Manifest = Mapping[str, Any]


def find_stored(name: str, root: Path) -> Path | None:
    """Return the folder of a data set, given its name under the root, its name and digest, or its path.

    None if there is none of this name, or none with this digest (``flowers@1a2b...``).
    """
    plain, _, digest = name.partition("@")
    folder = root / plain
    if name and (folder / MANIFEST).is_file():
        return folder if not digest or read_manifest(folder)["name"] == name else None
    return Path(name) if name and (Path(name) / MANIFEST).is_file() else None


def list_stored(root: Path) -> dict[str, Path]:
    """Return the folders of the data sets directly under a root, by folder name."""
    return {path.parent.name: path.parent for path in sorted(root.glob(f"*/{MANIFEST}"))}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest: the fields of the data set that are no arrays, its ``kind``, and notes in ``about``."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
    if manifest.get("version") != VERSION:
        raise UserError(f"{folder}: was written by another version of contnorm. Delete it, and add or build it again.")
    return manifest


def describe_stored(manifest: Manifest) -> str:
    """Describe a data set by its numbers of tasks, samples and classes.

    Example:
        >>> describe_stored({"tasks": 4, "samples": {"train": 5, "test": 3}, "classes": 7})
        '4 tasks, 8 samples of 7 classes'
    """
    blocks = manifest.get("task_classes", ())
    tasks = "tasks of samples" if blocks is None else f"{manifest.get('tasks', len(blocks))} tasks"
    return f"{tasks}, {sum(manifest['samples'].values()):,} samples of {manifest['classes']} classes"


def load_stored(folder: Path) -> Source:
    """Load a data set, memory-mapped. Arrays are mapped copy-on-write: torch takes writable memory only."""
    manifest = read_manifest(folder)
    values: dict[str, Any] = {}
    for part in fields(kind := SOURCE_CLASSES[manifest["kind"]]):
        file = folder / f"{part.name}.npy"
        is_array = part.name not in manifest
        values[part.name] = np.lib.format.open_memmap(file, mode="c") if is_array else _tuples(manifest[part.name])
    source: Source = kind(**values)
    return source


def _tuples(value: Any) -> Any:
    """Return a value with tuples in place of the lists of JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def save_source(source: Source, folder: Path, **about: Any) -> None:
    """Write a data set; arrays that were decoded into their files are kept. The manifest is written last.

    Args:
        source: The data set.
        folder: The folder.
        **about: Notes on how it was made, for the manifest.
    """
    samples = {"train": len(source.train_labels), "test": len(source.test_labels)}
    shape = source.train_images.shape[1:]
    manifest: dict[str, Any] = {"version": VERSION, "kind": type(source).__name__, "samples": samples, "shape": shape}
    for part in fields(source):
        value, file = getattr(source, part.name), folder / f"{part.name}.npy"
        if not isinstance(value, np.ndarray):
            manifest[part.name] = value
        elif not file.exists():
            np.save(file, value, allow_pickle=False)
    write_atomically(folder / MANIFEST, json.dumps({**manifest, "about": about}, indent=1).encode())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager that gives a temporary folder, which replaces the folder at the end; not after an exception."""
    partial = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(folder, ignore_errors=True)  # a process that has mapped it keeps it
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_decoded(name: str, folder: Path, inputs: Sequence[Path], decode: Callable[[Path], Source]) -> Source:
    """Load the decoded copy of a published data set; decode it first if there is none or its files have changed.

    The copy is in ``.contnorm`` next to the files, or in the user's cache if that folder is not writable.

    Args:
        name: Name of the data set.
        folder: Folder of its files.
        inputs: Files and folders that change whenever the data set does.
        decode: Returns the data set; may write arrays into the given folder, under the names of its fields.
    """
    from filelock import FileLock

    cache = folder / CACHE_FOLDER
    if os.access(cache if cache.exists() else folder, os.W_OK):
        cache.mkdir(exist_ok=True)  # first, since it changes the time of the folder
        copy = cache / name
    else:
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "contnorm"
        copy = user_cache / f"{name}-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:8]}"
    signature = {
        os.path.relpath(path, folder): [path.is_file() * path.stat().st_size, path.stat().st_mtime_ns]
        for path in inputs
    }

    def is_current(stored: Path) -> bool:
        return (stored / MANIFEST).is_file() and read_manifest(stored)["about"]["inputs"] == signature

    if is_current(cache / name):
        return load_stored(cache / name)
    copy.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(copy.with_name(f".{copy.name}.lock")):  # another process may be decoding it
        if not is_current(copy):
            with new_folder(copy) as partial:
                save_source(decode(partial), partial, inputs=signature)
    return load_stored(copy)


# --- Fingerprints ----------------------------------------------------------------------------------------------------
# A fingerprint has its version in front, as in "2:0123456789abcdef". Version 2 is of the samples in their order, their
# labels and their split, so the same images in another file format have the same one. A text without a version is of
# version 1: of file names and contents, and of the content of data sets that `contnorm data` builds.

VERSION = 2


def fingerprint_arrays(train: tuple[Images, NDArray[Any]], test: tuple[Images, NDArray[Any]]) -> str:
    """Fingerprint of decoded images and their labels.

    Example:
        >>> images, labels = np.zeros((2, 1, 4, 4), dtype=np.uint8), np.array([0, 1])
        >>> fingerprint_arrays((images, labels), (images, labels))[:2]
        '2:'
    """
    digest = hashlib.sha256(b"images\n")
    for name, (images, labels) in (("train", train), ("test", test)):
        digest.update(f"{name} {list(images.shape)}\n".encode())
        digest.update(np.ascontiguousarray(images).data)
        digest.update(np.ascontiguousarray(labels, dtype="<i8").data)
    return f"{VERSION}:{digest.hexdigest()[:16]}"


def fingerprint_files(train: Sequence[tuple[bytes, int]], test: Sequence[tuple[bytes, int]]) -> str:
    """Fingerprint of image files: for each the SHA-256 of its bytes and its label, in order.

    JPEG files are identified by their encoded bytes, not by decoded pixels. JPEG decoders differ in the last bit of a
    pixel between versions, so a fingerprint of pixels would call the same files different data after an upgrade of
    Pillow. File names count through what they decide: the order, the label and the split. The decoder that was used
    is recorded next to the fingerprint.
    """
    digest = hashlib.sha256(b"files\n")
    for name, files in (("train", train), ("test", test)):
        digest.update(f"{name} {len(files)}\n".encode())
        digest.update(b"".join(content + label.to_bytes(8, "little") for content, label in files))
    return f"{VERSION}:{digest.hexdigest()[:16]}"


def compare_fingerprints(a: object, b: object) -> Literal["same", "different", "unknown"]:
    """Compare two fingerprints from records; unknown if their versions differ or if one is missing.

    Example:
        >>> compare_fingerprints("2:00ff", "2:00ff"), compare_fingerprints("2:00ff", "00ff")
        ('same', 'unknown')
    """
    if not (isinstance(a, str) and isinstance(b, str)) or not_comparable(a, b):
        return "unknown"
    return "same" if a == b else "different"


def not_comparable(a: object, b: object) -> str:
    """Reason why two fingerprints cannot be compared; empty if they can be, or if one is missing.

    Example:
        >>> not_comparable("2:00ff", "00ff")
        'fingerprints 2:00ff and 00ff are of different versions and cannot be compared'
    """
    if not (isinstance(a, str) and isinstance(b, str)):
        return ""
    first, second = (text.rpartition(":")[0] or "1" for text in (a, b))
    return "" if first == second else f"fingerprints {a} and {b} are of different versions and cannot be compared"
