"""Readers of data sets in their published formats, for the decoded cache: array files, and folders of pictures."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.data.decoded_cache import CheckLabels, Content, write_hint
from contnorm.bench.data.decoding import Batch, decode_batch, decoder_name, settle
from contnorm.bench.data.file_state import Progress, file_sha256
from contnorm.bench.data.formats import Images, Labels
from contnorm.bench.data.image_folders import Labelled, PictureList
from contnorm.bench.fingerprint import fingerprint_arrays, fingerprint_files
from contnorm.bench.signals import block_signals
from contnorm.errors import UserError, usable

__all__ = ["ArrayReader", "PictureReader", "Split"]

Split = tuple[Images, Labels]
BATCH = 64  # pictures per unit of work: an interrupt waits for one unit of each worker
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

    def write(self, target: Path, check: CheckLabels, progress: Progress, jobs: int) -> Content:
        with usable(self.folder, "cannot be read", _READ_HINT):
            source = self.digest(progress)
            train, test = self.read(self.paths)
        self.check_images("train", *train)
        self.check_images("test", *test)
        check(train[1], test[1])
        with usable(target, "decoded data cannot be written", write_hint(target)):
            for split, (images, labels) in (("train", train), ("test", test)):
                _save(target / f"{split}_images.npy", images)
                _save(target / f"{split}_labels.npy", labels)
        return Content(fingerprint_arrays(train, test), source, {})


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
        batches = [pictures[start : start + BATCH] for start in range(0, len(pictures), BATCH)]
        digests: list[bytes] = []
        with _pool(ThreadPoolExecutor()) as pool:
            for part in pool.map(_digests, batches):
                digests += part
                progress("checking pictures", len(digests), len(pictures))
        return _source(listed, _fingerprint(listed, digests))

    def write(self, target: Path, check: CheckLabels, progress: Progress, jobs: int) -> Content:
        with usable(self.folder, "cannot be read", _READ_HINT):
            listed = self.list_pictures(self.paths)
        check(_labels(listed.train), _labels(listed.test))
        with usable(target, "decoded data cannot be written", write_hint(target)):
            batches: list[Batch] = []
            for split, pictures in (("train", listed.train), ("test", listed.test)):
                array, offset = _empty_array(target / f"{split}_images.npy", len(pictures), self.side)
                batches += _batches(pictures, array, offset, self.side, sum(len(b.pictures) for b in batches))
                _save(target / f"{split}_labels.npy", _labels(pictures))
            digests = _decode(batches, progress, jobs)
            for split in ("train", "test"):
                _sync(target / f"{split}_images.npy")
        fingerprint = _fingerprint(listed, digests)
        details = {"decoder": decoder_name()} | ({"split": listed.split} if listed.split else {})
        return Content(fingerprint, _source(listed, fingerprint), details)


def _fingerprint(listed: PictureList, digests: Sequence[bytes]) -> str:
    labels = [label for _, label in (*listed.train, *listed.test)]
    entries = list(zip(digests, labels, strict=True))
    return fingerprint_files(entries[: len(listed.train)], entries[len(listed.train) :])


def _source(listed: PictureList, fingerprint: str) -> str:
    return f"{fingerprint} {listed.split}".strip()


def _digests(paths: Sequence[Path]) -> list[bytes]:
    return [hashlib.sha256(path.read_bytes()).digest() for path in paths]


def _labels(pictures: Labelled) -> Labels:
    return np.array([label for _, label in pictures], dtype=np.int64)


def _empty_array(path: Path, count: int, side: int) -> tuple[Path, int]:
    """Create the file of an array of images; returns it with the position of its first row."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(count, 3, side, side))
    return path, int(array.offset)


def _batches(pictures: Labelled, array: Path, offset: int, side: int, start: int) -> Iterator[Batch]:
    for first in range(0, len(pictures), BATCH):
        paths = tuple(path for path, _ in pictures[first : first + BATCH])
        yield Batch(start + first, array, offset + first * 3 * side * side, side, paths)


def _decode(batches: Sequence[Batch], progress: Progress, jobs: int) -> list[bytes]:
    """Decode all batches; returns the digests of the encoded files in order."""
    total, done = sum(len(batch.pictures) for batch in batches), 0
    by_start: dict[int, list[bytes]] = {}
    progress("decoding pictures", 0, total)
    with _pool(_workers(jobs, total)) as pool:
        # Only this process handles Ctrl-C: workers, which the first tasks start, must not end with a traceback.
        with block_signals([signal.SIGINT]):
            futures: dict[Future[list[bytes]], Batch] = {pool.submit(decode_batch, batch): batch for batch in batches}
        try:
            for future in as_completed(futures):
                batch = futures[future]
                by_start[batch.start] = future.result()
                done += len(batch.pictures)
                progress("decoding pictures", done, total)
        except UserError as error:
            raise UserError(f"{error}. Replace it.") from error
        except BrokenProcessPool as error:
            raise UserError(
                "a process that decoded pictures was ended, perhaps for lack of memory. Run it again."
            ) from error
    return [digest for start in sorted(by_start) for digest in by_start[start]]


def _workers(jobs: int, pictures: int) -> Executor:
    """Return a pool of processes for many pictures, otherwise of threads.

    Processes scale with cores. Threads compete for the interpreter lock, which opening small files acquires often.
    """
    if jobs < 2 or pictures < PROCESSES_FROM:
        return ThreadPoolExecutor()
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=settle)


@contextmanager
def _pool(pool: Executor) -> Iterator[Executor]:
    """Shut the pool down at the end: wait for running tasks, and cancel the others, which an error made useless."""
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _save(path: Path, array: NDArray[np.uint8] | Labels) -> None:
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array))
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Sync a file to disk before the manifest is written, so that a crash cannot leave a manifest of an empty file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
