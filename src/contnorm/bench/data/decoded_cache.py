"""Decoded data sets on disk: arrays that are memory-mapped, with checksums that are verified.

A cache is a manifest ``<key>.json`` and the folder of arrays that it names. The manifest is written last, so an
interrupted decode leaves no cache. When a data set is loaded, the cache is compared with its source and with its
checksums. Contents are read for this only if the size, modification time or inode of a file has changed since the last
check; otherwise a start costs a few calls of ``stat``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from contnorm.bench.data.file_state import (
    Progress,
    clock_ns,
    file_sha256,
    load_state,
    save_state,
    signatures,
    trusted,
    user_cache,
)
from contnorm.bench.data.formats import Labels
from contnorm.bench.records import write_atomically
from contnorm.errors import UserError, usable

if sys.platform != "win32":
    import fcntl

__all__ = ["ARRAYS", "CheckLabels", "Content", "Decoded", "DecodedCache", "Reader", "write_hint"]

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
KIND = "contnorm decoded data set"
VERSION = 1
SHORT_OF_RESOURCES = {errno.ENOMEM, errno.EMFILE, errno.ENFILE}  # errors that do not mean a damaged file
BESIDE = ".contnorm"  # name of the cache folder next to a source

CheckLabels = Callable[[Labels, Labels], None]


@dataclass(frozen=True)
class Content:
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

    def write(self, target: Path, check: CheckLabels, progress: Progress, jobs: int) -> Content:
        """Decode into ``<target>/<name>.npy`` for all names of `ARRAYS`; ``check`` is called before the work starts."""


@dataclass(frozen=True)
class Decoded:
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
        near: Folder of its source.
    """

    def __init__(self, name: str, near: Path) -> None:
        cache_folder, state = near / BESIDE, f".{name}.checked.json"
        if _writable(cache_folder):
            self.places = [_CacheFolder(name, cache_folder, name, cache_folder / state)]
        else:
            user, key = user_cache(), f"{name}-{_path_digest(near)}"
            self.places = [
                _CacheFolder(name, cache_folder, name, user / f".{key}.source.checked.json"),
                _CacheFolder(name, user, key, user / f".{key}.checked.json"),
            ]

    def load(self, reader: Reader, check: CheckLabels, progress: Progress, jobs: int) -> Decoded:
        """Map the arrays; decode the source first if there is no valid cache.

        Args:
            reader: Access to the source.
            check: Called with the training and test labels; raises an error if the data cannot be used.
            progress: Called with what is done, and how much of it.
            jobs: Processes that decode pictures; with 1, threads of this process do.
        """
        *read_only, last = self.places
        for place in read_only:
            manifest = place.valid(reader, progress)
            if manifest is not None:
                return place.decoded(manifest, check)
        return last.decoded(last.valid_or_built(reader, check, progress, jobs), check)


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
        manifest = self.valid(reader, progress)
        if manifest is not None:
            return manifest
        with usable(self.folder, "decoded data cannot be written", write_hint(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._lock():
            # Another process may have decoded it while this one waited.
            manifest = self.valid(reader, progress) if _content(self.manifest) != before else None
            return manifest or self._build(reader, check, progress, jobs)

    def decoded(self, manifest: Mapping[str, Any], check: CheckLabels) -> Decoded:
        """Map the arrays of a manifest."""
        arrays = self._map(manifest)
        check(arrays[1], arrays[3])
        return Decoded(arrays, manifest["fingerprint"], manifest["details"])

    def valid(self, reader: Reader, progress: Progress) -> dict[str, Any] | None:
        """Return the manifest if the cache matches the current source and its arrays match their checksums, or None."""
        manifest = _read_manifest(self.manifest)
        if manifest is None:
            return None
        now, state = clock_ns(), load_state(self.state)
        with usable(reader.folder, f"{self.name} cannot be read", "Check its permissions."):
            source = signatures(reader.inputs(), reader.folder)
            same_source = trusted(source, state, "source")
            if not same_source and reader.digest(progress) != manifest["source"]:
                return None
        files = self._files(manifest)
        arrays = signatures(files.values(), self.folder)
        same_arrays = trusted(arrays, state, "arrays")
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
            with usable(target, "decoded data cannot be written", write_hint(self.folder)):
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
            with usable(target, "decoded data cannot be written", write_hint(self.folder)):
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

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Let one process decode at a time; the lock ends with the process."""
        with usable(self.folder, "decoded data cannot be written", write_hint(self.folder)):
            file = (self.folder / f".{self.key}.lock").open("w")
        with file:
            if sys.platform != "win32":
                with suppress(OSError):  # file systems without locks: the manifest is still replaced atomically
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield


def write_hint(folder: Path) -> str:
    """Return the advice for an error when decoded data is written to a folder."""
    if BESIDE in folder.parts:
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
        manifest = json.loads(_content(path))
    except (ValueError, RecursionError):
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
