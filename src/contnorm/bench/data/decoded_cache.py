"""Decoded data sets on disk: arrays that are memory-mapped, with checksums that are verified.

A cache is a manifest ``<key>.json`` and the folder of arrays that it names. The manifest is written last, so an
interrupted decode leaves no cache. When a data set is loaded, the cache is compared with its source and with its
checksums. Contents are read for this only if the size, modification time or inode of a file has changed since the last
check; otherwise a start costs a few calls of ``stat``.

`ArrayReader` and `PictureReader` decode data sets in their published formats: array files, and folders of pictures.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contnorm.atomic_files import write_atomically
from contnorm.bench.data.dataset import Images, Labels, Split
from contnorm.bench.data.decoding import RowBlock, decode_blocks, decoder_name, process_pool, row_blocks
from contnorm.bench.data.image_folders import Labelled, PictureList
from contnorm.bench.files import (
    Progress,
    clock_ns,
    file_sha256,
    is_unchanged,
    load_state,
    locked,
    parse_json,
    save_state,
    signatures,
    user_cache,
)
from contnorm.bench.fingerprint import fingerprint_arrays, fingerprint_files
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.errors import UserError, usable

__all__ = [
    "ARRAYS",
    "ArrayReader",
    "CheckLabels",
    "DecodedCache",
    "DecodedData",
    "DecodedSource",
    "PictureReader",
    "Reader",
]


ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
KIND = "contnorm decoded data set"
VERSION = 1
SHORT_OF_RESOURCES = {errno.ENOMEM, errno.EMFILE, errno.ENFILE}  # errors that do not mean a damaged file
CACHE_FOLDER = ".contnorm"  # name of the cache folder next to a source

CheckLabels = Callable[[Labels, Labels], None]


@dataclass(frozen=True)
class DecodedSource:
    """Description of the data that a reader has written.

    Attributes:
        fingerprint: Fingerprint of the data set.
        source: Digest of the source, as `Reader.digest` returns it.
        details: Entries for records about how the data was read.
    """

    fingerprint: str
    source: str
    details: Mapping[str, Any]


class Reader(Protocol):
    """Access to a data set in its published file format."""

    @property
    def folder(self) -> Path:
        """Folder of the source, for relative paths and messages."""

    def inputs(self) -> Sequence[Path]:
        """Files and folders that are unchanged as long as the source is."""

    def digest(self, progress: Progress) -> str:
        """Compute a digest of everything that determines samples, labels and split, without decoding."""

    def write(self, target: Path, check: CheckLabels, progress: Progress, jobs: int) -> DecodedSource:
        """Decode into ``<target>/<name>.npy`` for all names of `ARRAYS`; ``check`` is called before the work starts."""


@dataclass(frozen=True)
class DecodedData:
    """A decoded data set: the arrays in the order of `ARRAYS`, its fingerprint and details for records."""

    arrays: list[np.ndarray]
    fingerprint: str
    details: Mapping[str, Any]


class DecodedCache:
    """The cache of one data set.

    The cache is in ``.contnorm`` next to the source. If that folder is not writable and has no valid cache, the user's
    cache folder is used.

    Args:
        name: Name of the data set.
        source_folder: Folder of its source.
    """

    def __init__(self, name: str, source_folder: Path) -> None:
        cache_folder, state = source_folder / CACHE_FOLDER, f".{name}.checked.json"
        if _writable(cache_folder):
            self.folders = [_CacheFolder(name, cache_folder, name, cache_folder / state)]
        else:
            user, key = user_cache(), f"{name}-{_path_digest(source_folder)}"
            self.folders = [
                _CacheFolder(name, cache_folder, name, user / f".{key}.source.checked.json"),
                _CacheFolder(name, user, key, user / f".{key}.checked.json"),
            ]

    def load(self, reader: Reader, check: CheckLabels, progress: Progress, jobs: int) -> DecodedData:
        """Map the arrays; decode the source first if there is no valid cache.

        Args:
            reader: Access to the source.
            check: Called with the training and test labels; raises an error if the data cannot be used.
            progress: Called with what is done, and how much of it.
            jobs: Processes that decode pictures; with 1, threads of this process do.
        """
        *read_only, writable = self.folders
        for folder in read_only:
            manifest = folder.valid_manifest(reader, progress)
            if manifest is not None:
                return folder.load(manifest, check)
        return writable.load(writable.valid_or_built(reader, check, progress, jobs), check)


class _CacheFolder:
    """A folder that can contain the cache.

    Args:
        name: Name of the data set.
        folder: Folder.
        key: Name of the cache in the folder.
        state: File of the signatures of the last check.
    """

    def __init__(self, name: str, folder: Path, key: str, state: Path) -> None:
        self.name, self.folder, self.key, self.state = name, folder, key, state
        self.manifest = folder / f"{key}.json"

    def valid_or_built(self, reader: Reader, check: CheckLabels, progress: Progress, jobs: int) -> dict[str, Any]:
        """Return the manifest of the cache; builds the cache first if there is no valid one."""
        before = _content(self.manifest)
        manifest = self.valid_manifest(reader, progress)
        if manifest is not None:
            return manifest
        with usable(self.folder, "decoded data cannot be written", _write_hint(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with usable(self.folder, "decoded data cannot be written", _write_hint(self.folder)):
                stack.enter_context(locked(self.folder / f".{self.key}.lock", wait=True))
            # Another process may have decoded it while this one waited.
            manifest = self.valid_manifest(reader, progress) if _content(self.manifest) != before else None
            return manifest or self._build(reader, check, progress, jobs)

    def load(self, manifest: Mapping[str, Any], check: CheckLabels) -> DecodedData:
        """Map the arrays of a manifest."""
        arrays = self._map(manifest)
        check(arrays[1], arrays[3])
        return DecodedData(arrays, manifest["fingerprint"], manifest["details"])

    def valid_manifest(self, reader: Reader, progress: Progress) -> dict[str, Any] | None:
        """Return the manifest if the cache matches the current source and its arrays match their checksums, or None."""
        manifest = _read_manifest(self.manifest)
        if manifest is None:
            return None
        now, state = clock_ns(), load_state(self.state)
        with usable(reader.folder, f"{self.name} cannot be read", "Check its permissions."):
            source = signatures(reader.inputs(), reader.folder)
            same_source = is_unchanged(source, state, "source")
            if not same_source and reader.digest(progress) != manifest["source"]:
                return None
        files = self._files(manifest)
        arrays = signatures(files.values(), self.folder)
        same_arrays = is_unchanged(arrays, state, "arrays")
        if not same_arrays and not self._matches(manifest, files, progress):
            logging.getLogger("contnorm").warning(
                f"{self.folder / manifest['folder']}: decoded data does not match its checksum, and is decoded again "
                f"from {reader.folder}."
            )
            return None
        if not (same_source and same_arrays):
            save_state(self.state, now, source=source, arrays=arrays)
        return manifest

    def _files(self, manifest: Mapping[str, Any]) -> dict[str, Path]:
        return {name: self.folder / manifest["folder"] / f"{name}.npy" for name in ARRAYS}

    def _matches(self, manifest: Mapping[str, Any], files: Mapping[str, Path], progress: Progress) -> bool:
        try:
            checksums = _checksums(files, "checking decoded images", progress)
        except OSError:
            return False
        return checksums == dict(manifest["sha256"])

    def _map(self, manifest: Mapping[str, Any]) -> list[np.ndarray]:
        try:
            # Copy-on-write: torch takes writable memory only, and a write must not reach the file.
            return [np.lib.format.open_memmap(path, mode="c") for path in self._files(manifest).values()]
        except (OSError, ValueError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in SHORT_OF_RESOURCES:
                raise  # the cache is not damaged
            raise UserError(f"{self.folder / manifest['folder']}: cannot be read ({error}). Delete it.") from error

    def _build(self, reader: Reader, check: CheckLabels, progress: Progress, jobs: int) -> dict[str, Any]:
        now = clock_ns()
        with usable(reader.folder, f"{self.name} cannot be read", "Check its permissions."):
            source = signatures(reader.inputs(), reader.folder)  # before reading, to detect a change during it
        target = self.folder / f"{self.key}.{secrets.token_hex(4)}"
        try:
            with usable(target, "decoded data cannot be written", _write_hint(self.folder)):
                target.mkdir()
            content = reader.write(target, check, progress, jobs)
            manifest: dict[str, Any] = {
                "kind": KIND,
                "version": VERSION,
                "name": self.name,
                "fingerprint": content.fingerprint,
                "source": content.source,
                "folder": target.name,
                "details": dict(content.details),
            }
            files = self._files(manifest)
            with usable(target, "decoded data cannot be written", _write_hint(self.folder)):
                manifest["sha256"] = _checksums(files, "checking decoded images", progress)
                manifest["manifest_sha256"] = _seal(manifest)
                write_atomically(self.manifest, json.dumps(manifest, indent=1).encode())
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        self._remove_others(target)
        save_state(self.state, now, source=source, arrays=signatures(files.values(), self.folder))
        return manifest

    def _remove_others(self, target: Path) -> None:
        """Remove arrays of earlier builds; a process that has mapped them keeps them until it ends."""
        for folder in self.folder.glob(f"{self.key}.*/"):
            if folder != target:
                shutil.rmtree(folder, ignore_errors=True)


def _write_hint(folder: Path) -> str:
    """Return the advice for an error when decoded data is written to a folder."""
    if CACHE_FOLDER in folder.parts:
        return "Free disk space there, or check the permissions of the folder."
    return "Free disk space, or set XDG_CACHE_HOME to a folder with more."


def _writable(folder: Path) -> bool:
    """Whether files can be created in a folder, or the folder can be created."""
    if folder.exists() or folder.is_symlink():
        return folder.is_dir() and os.access(folder, os.W_OK)
    return os.access(folder.parent, os.W_OK)


def _path_digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Read a manifest of this version; None if there is none, or if it is damaged."""
    try:
        manifest = parse_json(_content(path))
    except ValueError:
        return None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND or manifest.get("version") != VERSION:
        return None
    return manifest if manifest.get("manifest_sha256") == _seal(manifest) else None


def _seal(manifest: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of all other entries, to reject a manifest that was edited or damaged."""
    entries = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _checksums(files: Mapping[str, Path], what: str, progress: Progress) -> dict[str, str]:
    total, done = sum(path.stat().st_size for path in files.values()), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, total)

    return {name: file_sha256(path, advance) for name, path in files.items()}


BLOCK_SIZE = 64  # pictures per unit of work: an interrupt waits for one unit of each worker
PROCESSES_FROM = 2000  # pictures; with fewer, starting processes takes longer than decoding

_READ_HINT = "Check its permissions, or fetch it again."


@dataclass(frozen=True)
class ArrayReader:
    """Data sets whose files hold arrays: MNIST's idx files, CIFAR's batches.

    Attributes:
        paths: Files.
        read: Returns images and labels of the training and the test split.
        check_images: Raises an error if arrays of a split are not of the expected shape or have unknown labels.
    """

    paths: Sequence[Path]
    read: Callable[[Sequence[Path]], tuple[Split, Split]]
    check_images: Callable[[str, Images, Labels], None]

    @property
    def folder(self) -> Path:
        return self.paths[0].parent

    def inputs(self) -> Sequence[Path]:
        return self.paths

    def digest(self, progress: Progress) -> str:
        lines = [f"{path.name} {file_sha256(path)}\n" for path in self.paths]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def write(self, target: Path, check: CheckLabels, progress: Progress, jobs: int) -> DecodedSource:
        with usable(self.folder, "cannot be read", _READ_HINT):
            source = self.digest(progress)
            train, test = self.read(self.paths)
        self.check_images("train", *train)
        self.check_images("test", *test)
        check(train[1], test[1])
        with usable(target, "decoded data cannot be written", _write_hint(target)):
            for split, (images, labels) in (("train", train), ("test", test)):
                _save(target / f"{split}_images.npy", images)
                _save(target / f"{split}_labels.npy", labels)
        return DecodedSource(fingerprint_arrays(train, test), source, {})


@dataclass(frozen=True)
class PictureReader:
    """Data sets that are folders of pictures.

    Attributes:
        folder: Folder of the data set.
        paths: Files or folders that its layout names.
        find_inputs: Returns the files and folders that change whenever the data set does.
        list_pictures: Returns the pictures with their labels.
        side: Height and width that pictures are resized to.
    """

    folder: Path
    paths: Sequence[Path]
    find_inputs: Callable[[Sequence[Path]], list[Path]]
    list_pictures: Callable[[Sequence[Path]], PictureList]
    side: int

    def inputs(self) -> Sequence[Path]:
        return self.find_inputs(self.paths)

    def digest(self, progress: Progress) -> str:
        listed = self.list_pictures(self.paths)
        pictures = [path for path, _ in (*listed.train, *listed.test)]
        parts = [pictures[start : start + BLOCK_SIZE] for start in range(0, len(pictures), BLOCK_SIZE)]
        digests: list[bytes] = []
        pool = ThreadPoolExecutor()
        try:
            for part in pool.map(_file_digests, parts):
                digests += part
                progress("checking pictures", len(digests), len(pictures))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return _source(listed, _fingerprint(listed, digests))

    def write(self, target: Path, check: CheckLabels, progress: Progress, jobs: int) -> DecodedSource:
        with usable(self.folder, "cannot be read", _READ_HINT):
            listed = self.list_pictures(self.paths)
        check(_labels(listed.train), _labels(listed.test))
        with usable(target, "decoded data cannot be written", _write_hint(target)):
            blocks: list[RowBlock] = []
            for split, pictures in (("train", listed.train), ("test", listed.test)):
                array, paths = target / f"{split}_images.npy", [path for path, _ in pictures]
                offset = _create_array(array, len(pictures), self.side)
                # Synced once at the end: if decoding is interrupted, the arrays are deleted.
                blocks += row_blocks(
                    split, array, offset, self.side, paths, BLOCK_SIZE, resampling="bilinear", sync=False
                )
                _save(target / f"{split}_labels.npy", _labels(pictures))
            digests = _decode(blocks, progress, jobs)
            for split in ("train", "test"):
                _sync(target / f"{split}_images.npy")
        fingerprint = _fingerprint(listed, digests)
        details = {"decoder": decoder_name()} | ({"split": listed.split} if listed.split else {})
        return DecodedSource(fingerprint, _source(listed, fingerprint), details)


def _fingerprint(listed: PictureList, digests: Sequence[bytes]) -> str:
    labels = [label for _, label in (*listed.train, *listed.test)]
    entries = list(zip(digests, labels, strict=True))
    return fingerprint_files(entries[: len(listed.train)], entries[len(listed.train) :])


def _source(listed: PictureList, fingerprint: str) -> str:
    return f"{fingerprint} {listed.split}".strip()


def _file_digests(paths: Sequence[Path]) -> list[bytes]:
    return [hashlib.sha256(path.read_bytes()).digest() for path in paths]


def _labels(pictures: Labelled) -> Labels:
    return np.array([label for _, label in pictures], dtype=np.int64)


def _create_array(path: Path, count: int, side: int) -> int:
    """Create the file of an array of images; returns the position of its first row."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, 3, side, side))
    return int(array.offset)


def _decode(blocks: Sequence[RowBlock], progress: Progress, jobs: int) -> list[bytes]:
    """Decode all blocks; returns the digests of the picture files in order."""
    total, done = sum(len(block.pictures) for block in blocks), 0
    digests: dict[tuple[str, int], tuple[bytes, ...]] = {}
    progress("decoding pictures", 0, total)
    with closing(decode_blocks(blocks, _workers(jobs, total))) as results:
        for result in results:
            if result.problems:
                raise UserError(f"{result.problems[0]}. Replace it.")
            block = result.block
            digests[block.split, block.number] = result.file_digests
            done += len(block.pictures)
            progress("decoding pictures", done, total)
    return [digest for block in blocks for digest in digests[block.split, block.number]]


def _workers(jobs: int, pictures: int) -> Executor:
    """Return a pool of processes for many pictures, otherwise of threads.

    Processes scale with cores. Threads compete for the interpreter lock, which opening small files acquires often.
    """
    return ThreadPoolExecutor() if jobs < 2 or pictures < PROCESSES_FROM else process_pool(jobs)


def _save(path: Path, array: NDArray[np.uint8] | Labels) -> None:
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array))
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Sync a file to disk before the manifest is written, so that a crash cannot leave a manifest of an empty file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
