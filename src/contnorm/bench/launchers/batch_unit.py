"""A unit of work as a call that returns all its events when it ends, for engines that can't stream them."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import cloudpickle

from contnorm.bench.engine.events import Steps
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.process_pool import pickle_objects
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.user_code import user_code_is_loading
from contnorm.errors import UserError

__all__ = ["BatchUnit", "UnitResult", "stop_file"]

POLL = 0.5  # seconds between two looks for a request to stop


@dataclass(frozen=True)
class UnitResult:
    """What has become of a unit.

    Attributes:
        events: Events of its runs, without the progress between tasks.
        error: The error that ended it; None if it has ended as planned, or on request.
    """

    events: list[Event]
    error: Exception | None = None

    def raise_error(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class BatchUnit:
    """A function without arguments that executes a unit in any process.

    Attributes:
        payload: The pickled `UnitWork`.
        unit: The unit.
        stop: File that requests a stop as soon as it exists.
        folder: The working folder of the program, which paths are relative to.
    """

    payload: bytes
    unit: Unit
    stop: Path
    folder: Path

    @classmethod
    def of(cls, work: UnitWork, units: list[Unit], stop: Path) -> list[BatchUnit]:
        """Return the functions of some units."""
        payload, folder = pickle_objects(work), Path.cwd()
        return [cls(payload, unit, stop, folder) for unit in units]

    def __call__(self) -> UnitResult:
        """Execute the unit, unless a stop was requested before."""
        events: list[Event] = []
        try:
            with _without_interrupts(), _in_folder(self.folder):
                if self.stop.exists():
                    return UnitResult(events)
                with user_code_is_loading():
                    work: UnitWork = cloudpickle.loads(self.payload)
                events += (event for event in work(self.unit, _polled(self.stop)) if not isinstance(event.what, Steps))
        except UserError as error:
            return UnitResult(events, error)
        except (Exception, SystemExit):
            return UnitResult(events, RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
        return UnitResult(events)


def _polled(file: Path) -> Callable[[], bool]:
    """Return a function that says whether a file exists, and looks only now and then: it may be on a network."""
    last, found = -POLL, False

    def exists() -> bool:
        nonlocal last, found
        if not found and time.monotonic() - last >= POLL:
            last, found = time.monotonic(), file.exists()
        return found

    return exists


def _in_folder(folder: Path) -> AbstractContextManager[None]:
    """Context manager that changes to a folder: a worker that joblib reuses is still in that of an earlier program."""
    return chdir(folder) if Path.cwd() != folder and folder.is_dir() else nullcontext()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore SIGINT: Ctrl-C in a terminal reaches workers too, and the process that launched them asks them to stop."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stop_file(folder: Path, name: str, stop: Callable[[], bool]) -> Iterator[Path]:
    """Create a file in a folder when ``stop`` returns True.

    The file is removed at the end, so the block must wait for the workers.
    """
    file, ended = folder / name, threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            if stop():
                file.touch()
                return

    watcher = threading.Thread(target=watch, name="contnorm-stop", daemon=True)
    watcher.start()
    try:
        yield file
    finally:
        ended.set()
        watcher.join()
        file.unlink(missing_ok=True)
