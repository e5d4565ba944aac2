"""The worker on another machine: it executes units and yields messages, in bytes, for the process that launched it.

It needs the same version of this package. Code, data and the folder of runs need not be there: objects come with the
work, code in files and data sets are sent if they are missing, and a temporary folder replaces the folder of runs.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import cloudpickle

import contnorm
from contnorm.bench.components import Component, code_hash, share_components, user_code_is_loading
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.events import Failed, Finished, Steps, Stopped
from contnorm.bench.engine.job import Job
from contnorm.bench.engine.job_events import Event, Waiting
from contnorm.bench.engine.run_dir import RunDir
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.run_files import CheckpointUrl, EndedRun, RunFiles, Uploads, read_ended, write_run
from contnorm.bench.records import Store
from contnorm.errors import UserError

__all__ = [
    "Checkpoint",
    "Ended",
    "Events",
    "Log",
    "MissingData",
    "RemoteWorker",
    "WorkerError",
    "WorkerInfo",
    "WorkerSetup",
    "is_end",
]


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker gets when it starts.

    Attributes:
        work: The pickled `UnitWork`.
        folder: The current folder of the process that launched the worker.
        token: A file in the folder of runs, and its content; None without a folder of runs.
        code: Pickled objects of user code in files, by their names in settings, for workers without these files.
        checkpoints: URL of checkpoints for workers that do not see the folder of runs.
        upload_every: Seconds between two checkpoints of a run that such a worker sends.
        report_every: Seconds between two messages with progress.
    """

    work: bytes
    folder: str
    token: tuple[str, str] | None = None
    code: bytes | None = None
    checkpoints: str | None = None
    upload_every: float = 60.0
    report_every: float = 0.25


@dataclass(frozen=True)
class WorkerInfo:
    """What a worker says about itself: host, process, version, and whether it sees the folder of runs."""

    host: str
    pid: int
    version: str
    shared: bool


@dataclass(frozen=True)
class Events:
    """Events of runs, in order."""

    events: list[Event]


@dataclass(frozen=True)
class Ended:
    """The last event of a run that is not in the folder of runs, with its files."""

    event: Event
    files: EndedRun


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run that is not in the folder of runs."""

    job: Job
    files: RunFiles


@dataclass(frozen=True)
class Log:
    """A log message of this package."""

    level: int
    text: str


@dataclass(frozen=True)
class MissingData:
    """The worker does not have a data set, or has another one of its name; the unit was not started."""

    name: str


@dataclass(frozen=True)
class WorkerError:
    """The work function raised an error."""

    error: BaseException


def is_end(event: Event) -> bool:
    """Whether an event is the last one of a run on its worker.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> job = Job(from_dict({}), 0)
        >>> is_end(Event(job, "recorded", None)), is_end(Event(job, Steps(1, 2, 0, 0.5), None))
        (True, False)
    """
    return isinstance(event.what, Finished | Failed | Stopped | Waiting | str)


@dataclass
class RemoteWorker:
    """Executes units. One thread calls `setup` and `run`; another one may call `stop`."""

    _halted: threading.Event = field(default_factory=threading.Event)
    _logs: deque[Log] = field(default_factory=deque)
    _code: list[Component] = field(default_factory=list)

    def setup(self, content: bytes) -> WorkerInfo:
        """Load the work function.

        Args:
            content: The pickled `WorkerSetup`.
        """
        setup: WorkerSetup = cloudpickle.loads(content)
        with suppress(OSError):  # names of files and folders in settings are relative to it
            os.chdir(setup.folder)
        _collect_logs(self._logs)
        with user_code_is_loading():
            self._work: UnitWork = cloudpickle.loads(setup.work)
            self._code = _missing_code(setup.code)  # kept: those that are passed are found as long as they exist
            share_components(self._code)
        runs = self._work.environment.runs
        self._setup, self._url = setup, None
        self._shared = runs is None or _sees_token(runs, setup.token)
        if not self._shared and setup.checkpoints is not None:
            self._url = CheckpointUrl(setup.checkpoints)
        return WorkerInfo(socket.gethostname(), os.getpid(), contnorm.__version__, self._shared)

    def stop(self) -> None:
        """Ask the runs to stop at the next step, and to save."""
        self._halted.set()

    def run(self, content: bytes, *data: bytes) -> Iterator[bytes]:
        """Execute a unit; yields pickled messages.

        Args:
            content: The pickled unit, and the files of its runs if the folder of runs is not visible here.
            data: Pickled data sets that this machine does not have, and gets once.
        """
        unit, files = cloudpickle.loads(content)
        for source in map(cloudpickle.loads, data):
            self._add_source(source)
        try:
            for message in self._run(unit, files):
                while self._logs:
                    yield cloudpickle.dumps(self._logs.popleft())
                yield cloudpickle.dumps(message)
        except UserError as error:
            yield cloudpickle.dumps(WorkerError(error))
        except (Exception, SystemExit):
            text = f"in a worker on {socket.gethostname()}:\n{traceback.format_exc()}"
            yield cloudpickle.dumps(WorkerError(RuntimeError(text)))

    def _run(self, unit: Unit, files: Mapping[Job, RunFiles]) -> Iterator[object]:
        for name in dict.fromkeys(job.source for job in unit.jobs):
            if not self._has_data(name):
                yield MissingData(name)
                return
        if self._shared:
            yield from _batches(self._work(unit, self._halted.is_set), self._setup.report_every)
            return
        with tempfile.TemporaryDirectory(prefix="contnorm-") as folder:
            self._work.environment = replace(self._work.environment, runs=Path(folder))
            yield from self._run_apart(self._work, unit, files)

    def _run_apart(self, work: UnitWork, unit: Unit, files: Mapping[Job, RunFiles]) -> Iterator[object]:
        """Execute a unit in a temporary folder, and send its checkpoints and records."""
        store, uploads = work.environment.store, Uploads(self._setup.upload_every)
        for job in unit.jobs:
            run_dir = RunDir.of(job, store)
            write_run(run_dir, files[job])
            if self._url is not None and (stored := self._url.read(job)):
                run_dir.checkpoints.add_files(stored)
            uploads.start(job, run_dir)
        for batch in _batches(work(unit, self._halted.is_set), self._setup.report_every):
            for event in batch.events:
                if is_end(event):
                    yield from self._upload(event.job, store, uploads, at_once=True)
                    yield self._ended(event, store)
                else:
                    yield Events([event])
            for job in unit.jobs:
                yield from self._upload(job, store, uploads)

    def _upload(self, job: Job, store: Store, uploads: Uploads, at_once: bool = False) -> Iterator[Checkpoint]:
        files = uploads.due(job, RunDir.of(job, store), at_once)
        if files is None:
            return
        if self._url is not None:
            self._url.save(job, files.checkpoint)
            files = RunFiles(files.note, {})
        yield Checkpoint(job, files)

    def _ended(self, event: Event, store: Store) -> Ended:
        files = read_ended(RunDir.of(event.job, store))
        if self._url is not None and not files.resumable:
            self._url.delete(event.job)
        return Ended(event, files)

    def _has_data(self, name: str) -> bool:
        """Whether this machine has the data set of the process that launched the worker."""
        environment, expected = self._work.environment, self._work.fingerprints.get(name)
        if name in environment.sources:
            return True
        try:
            source = environment.load(name)
        except UserError:
            return False
        if expected is not None and source.fingerprint != expected:
            return False
        self._add_source(source)
        return True

    def _add_source(self, source: Source) -> None:
        sources = {**self._work.environment.sources, source.name: source}
        self._work = self._work.replace_environment(sources=sources)


def _batches(events: Iterator[Event], every: float) -> Iterator[Events]:
    """Collect events of progress, which are many, for some time."""
    batch: list[Event] = []
    started = time.monotonic()
    for event in events:
        batch.append(event)
        if not isinstance(event.what, Steps) or time.monotonic() > started + every:
            yield Events(batch)
            batch, started = [], time.monotonic()
    if batch:
        yield Events(batch)


def _sees_token(runs: Path, token: tuple[str, str] | None) -> bool:
    """Whether the folder of runs is that of the process that launched the worker, and can be written."""
    if token is None:
        return False
    try:
        return (runs / token[0]).read_text() == token[1] and os.access(runs, os.W_OK)
    except OSError:
        return False


def _missing_code(content: bytes | None) -> list[Component]:
    """Return the objects of user code whose files are missing here, or have another content."""
    components: list[Component] = [] if content is None else cloudpickle.loads(content)
    return [known for known in components if code_hash(known.kind, known.name) != known.code]


class _LogCollector(logging.Handler):
    def __init__(self, logs: deque[Log]) -> None:
        super().__init__(logging.WARNING)
        self._logs = logs

    def emit(self, record: logging.LogRecord) -> None:
        self._logs.append(Log(record.levelno, record.getMessage()))


def _collect_logs(logs: deque[Log]) -> None:
    logger = logging.getLogger("contnorm")
    logger.handlers[:] = [_LogCollector(logs)]
    logger.propagate = False
