"""Files of runs whose worker does not see the folder of runs.

Such a worker uses a temporary folder. It gets the newest checkpoint of each run, and sends newer ones and the record.
The process that launched it holds the locks of these runs and writes what it gets to the folder of runs. Checkpoints
can also be stored at a URL of fsspec, such as ``s3://bucket/checkpoints``, which all workers use directly.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import fsspec

from contnorm.atomic_files import write_atomically
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.events import Failed, Finished
from contnorm.bench.engine.job import Job
from contnorm.bench.engine.job_events import Event, Waiting
from contnorm.bench.engine.run_dir import RunDir
from contnorm.bench.engine.runner import known_divergence
from contnorm.bench.records import Store
from contnorm.errors import UserError, usable

__all__ = ["CheckpointUrl", "EndedRun", "HeldRuns", "RunFiles", "Uploads", "read_ended", "read_run", "write_run"]

_FILE = re.compile(r"[0-9]{1,18}\.(json|safetensors)")
KEPT = 2  # checkpoints at a URL


@dataclass(frozen=True)
class RunFiles:
    """The files of an unfinished run.

    Attributes:
        note: Content of its note; None if it has none.
        checkpoint: Files of its newest usable checkpoint by name.
    """

    note: bytes | None
    checkpoint: Mapping[str, bytes]


@dataclass(frozen=True)
class EndedRun:
    """The files of a run that has ended.

    Attributes:
        record: Content of its record; None if it has none.
        weights: Content of the file of its weights, if they are saved.
        resumable: Whether its checkpoints are kept.
    """

    record: bytes | None
    weights: bytes | None
    resumable: bool


def read_run(run_dir: RunDir) -> RunFiles:
    """Read the note and the newest checkpoint of a run."""
    return RunFiles(_content(run_dir.note), run_dir.checkpoints.latest_files())


def write_run(run_dir: RunDir, files: RunFiles) -> None:
    """Write a note and a checkpoint to the folder of a run."""
    if files.note is not None:
        write_atomically(run_dir.note, files.note)
    if files.checkpoint:
        run_dir.checkpoints.add_files(files.checkpoint)


def read_ended(run_dir: RunDir) -> EndedRun:
    """Read the record of a run that has ended, if it has one."""
    record = _content(run_dir.record)
    weights = None if record is None else _content(weights_path(run_dir.record))
    return EndedRun(record, weights, run_dir.folder.is_dir())


def _content(path: Any) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


class Uploads:
    """Chooses which checkpoints a worker sends: a newer one, at most every so many seconds, and the last one.

    Args:
        every: Seconds between two checkpoints of a run.
    """

    def __init__(self, every: float) -> None:
        self.every = every
        self._sent: dict[Job, tuple[str, float]] = {}  # the newest file that was sent, and when

    def start(self, job: Job, run_dir: RunDir) -> None:
        """Note the checkpoint that a run starts from, which is not sent back."""
        self._sent[job] = (_newest(run_dir), time.monotonic())

    def due(self, job: Job, run_dir: RunDir, at_once: bool = False) -> RunFiles | None:
        """Return the files to send now; None if there is nothing new, or the last ones were sent just before."""
        newest, (last, when) = _newest(run_dir), self._sent.get(job, ("", float("-inf")))
        if newest in ("", last) or (not at_once and time.monotonic() < when + self.every):
            return None
        with suppress(OSError):  # a newer checkpoint may replace the files meanwhile
            files = read_run(run_dir)
            if files.checkpoint:
                self._sent[job] = (newest, time.monotonic())
                return files
        return None


def _newest(run_dir: RunDir) -> str:
    """Return the name of the newest checkpoint, without reading it; empty if there is none."""
    steps = [int(path.stem) for path in run_dir.checkpoints.folder.glob("*.json") if _FILE.fullmatch(path.name)]
    return str(max(steps)) if steps else ""


class HeldRuns:
    """Runs that this process has locked for workers that do not see the folder of runs.

    Args:
        store: The folder of runs.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._held: dict[Job, RunDir] = {}

    def acquire(self, jobs: Sequence[Job]) -> tuple[list[Job], list[Event]]:
        """Lock runs. Returns those that can be executed, and the events of the others."""
        free, events = [], []
        for job in jobs:
            run_dir = self._held.get(job) or RunDir.of(job, self.store)
            if job not in self._held and not run_dir.acquire():
                events.append(Event(job, Waiting(run_dir.lock.holder()), run_dir.record))
                continue
            self._held[job] = run_dir
            if run_dir.record.is_file():
                run_dir.clear()
                self._release(job)
                events.append(Event(job, known_divergence(job, self.store) or "recorded", run_dir.record))
            else:
                free.append(job)
        return free, events

    def read(self, job: Job) -> RunFiles:
        """Return the files that the worker of a run gets."""
        return read_run(self._held[job])

    def save_checkpoint(self, job: Job, files: RunFiles) -> None:
        """Write a checkpoint that a worker has sent."""
        with usable(self.store.root, "a checkpoint can't be written", "Free disk space, and run it again."):
            write_run(self._held[job], files)

    def end(self, event: Event, ended: EndedRun) -> Event:
        """Write the record of a run that has ended, and release it. Returns its event with the path of the record."""
        run_dir = self._held[event.job]
        with usable(run_dir.record, "the record can't be written", "Free disk space, and run it again."):
            if ended.weights is not None:  # before the record: every record then has its weights
                write_atomically(weights_path(run_dir.record), ended.weights)
            if ended.record is not None:
                write_atomically(run_dir.record, ended.record)
        if isinstance(event.what, Finished | Failed) and not ended.resumable:
            run_dir.clear()
        self._release(event.job)
        return self.located(event)

    def located(self, event: Event) -> Event:
        """Return an event of a worker with the path that the record has here."""
        return replace(event, path=self.store.path(event.job.config, event.job.seed))

    def _release(self, job: Job) -> None:
        self._held.pop(job).lock.release()

    def close(self) -> None:
        """Release all runs."""
        for job in list(self._held):
            self._release(job)


class CheckpointUrl:
    """Checkpoints at a URL of fsspec, as ``<url>/<hash>/<seed>/<step>.json`` and ``.safetensors``.

    Args:
        url: The URL, such as ``s3://bucket/checkpoints``.

    Raises:
        UserError: If fsspec does not know the protocol, or a library that it needs is not installed.

    Example:
        >>> CheckpointUrl("no-such-protocol://checkpoints")
        Traceback (most recent call last):
        contnorm.errors.UserError: checkpoints='no-such-protocol://checkpoints': can't be used (...
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # of the library of a protocol
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"checkpoints={url!r}: can't be used ({reason}). Use a URL that fsspec knows.") from error

    def _folder(self, job: Job) -> str:
        return f"{self._root.rstrip('/')}/{job.config.hash}/{job.seed}"

    def read(self, job: Job) -> dict[str, bytes]:
        """Return the files of a run by name; empty if there are none."""
        return {name: self._files.cat_file(path) for name, path in self._list(job).items()}

    def save(self, job: Job, files: Mapping[str, bytes]) -> None:
        """Write the files of a checkpoint, then delete all but the last two."""
        folder = self._folder(job)
        self._files.makedirs(folder, exist_ok=True)
        for name in sorted(files, key=lambda name: name.endswith(".json")):
            self._files.pipe_file(f"{folder}/{name}", files[name])
        present = self._list(job)
        steps = sorted({int(name.partition(".")[0]) for name in present})
        for name, path in present.items():
            if int(name.partition(".")[0]) not in steps[-KEPT:]:
                self._files.rm_file(path)

    def delete(self, job: Job) -> None:
        """Delete the files of a run."""
        with suppress(FileNotFoundError):
            self._files.rm(self._folder(job), recursive=True)

    def _list(self, job: Job) -> dict[str, str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._folder(job), detail=False)
        except FileNotFoundError:
            return {}
        return {name: path for path in paths if _FILE.fullmatch(name := path.rpartition("/")[2])}
