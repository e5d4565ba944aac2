"""The right to run a run: a lock that the system releases when its process ends, however it ends."""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from contnorm.bench.records import write_atomically

__all__ = ["Claim"]

TRIES = 100  # a folder can vanish between two looks at it, each time its run has just been recorded
WITHOUT_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}  # file systems without flock


class Claim:
    """A lock on a run, with a note that names its host and process.

    The lock is flock's, so it ends with its process, also after ``kill -9``. Where a file system has none, a lock file
    of `filelock.SoftFileLock` serves, which another process on the same host removes when its process is no more. It
    has a name of its own, ``<path>.soft``: the attempt to use flock leaves an empty file at ``path``, which a
    SoftFileLock there would take for the lock of another process.

    Args:
        path: The lock file. It is created, with its folder, and removed when the lock is released.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "lock"
        >>> first, second = Claim(path), Claim(path)
        >>> first.take(), second.take(), second.holder() == f"process {os.getpid()} on {socket.gethostname()}"
        (True, False, True)
        >>> first.give_back()
        >>> second.take(), second.give_back()
        (True, None)
    """

    def __init__(self, path: Path) -> None:
        self.path, self.note = path, path.with_name(f"{path.name}.json")
        self.soft = path.with_name(f"{path.name}.soft")
        self._lock: BaseFileLock | None = None
        self._file: os.stat_result | None = None  # the lock file as it was when it was locked

    def take(self) -> bool:
        """Acquire the lock without waiting; False where another process, or another claim in this one, holds it."""
        for _ in range(TRIES):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = self._acquired()
                self._file = os.stat(self._lock.lock_file)
                write_atomically(self.note, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
            except Timeout:
                return False
            except FileNotFoundError:  # the folder has just been removed
                self._release()
                continue
            except BaseException:
                self._release()
                raise
            return True
        return False

    def _acquired(self) -> BaseFileLock:
        # Not local to a thread: whoever drives a run may release it from another one.
        lock: BaseFileLock = FileLock(self.path, timeout=0, thread_local=False)
        try:
            lock.acquire()
        except OSError as error:
            if isinstance(error, Timeout) or error.errno not in WITHOUT_LOCKS:
                raise
            lock = SoftFileLock(self.soft, timeout=0, thread_local=False)
            lock.acquire()
        return lock

    def is_free(self) -> bool:
        """Whether nobody holds the lock; a process that waits can ask without being taken for its holder."""
        if not self.path.exists() and not self.soft.exists():
            return True
        try:
            self._acquired().release(force=True)
        except Timeout:
            return False
        except FileNotFoundError:
            return True
        return True

    def holder(self) -> str:
        """The process and the host that hold the lock, as far as they are known."""
        try:
            raw = json.loads(self.note.read_text())
            return f"process {raw['pid']} on {raw['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def remove_files(self) -> None:
        """Remove the files of a lock that this claim holds, so that their folder can be removed; it stays locked."""
        for file in (self.note, self.path, self.soft):
            file.unlink(missing_ok=True)

    def give_back(self) -> None:
        """Remove the lock's files, then release it: in the other order those of the next holder would be removed."""
        if self._is_current():
            with suppress(OSError):
                self.remove_files()
        self._release()

    def _is_current(self) -> bool:
        """Whether the lock file is still the one that this claim holds."""
        try:
            if self._lock is None or self._file is None:
                return False
            return os.path.samestat(self._file, os.stat(self._lock.lock_file))
        except OSError:
            return False

    def _release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                self._lock.release(force=True)
            self._lock = None
