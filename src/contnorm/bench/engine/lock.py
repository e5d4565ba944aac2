"""The lock of a run. The operating system releases it when its process ends for any reason."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from filelock import (
    BaseFileLock,
    FileLock,
    LeaseSettingsMismatch,
    SoftFileLease,
    SoftFileLockProtocolError,
    Timeout,
)

from contnorm.atomic_files import write_atomically

__all__ = ["RunLock"]

_awaited_leases: dict[str, SoftFileLease] = {}  # leases that other processes hold, by path
_awaited_leases_lock = threading.Lock()

TRIES = 100  # another process may remove the folder meanwhile, since it has recorded the run
# Errors of file systems without flock:
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
LEASE = 300.0  # seconds after which a lock without flock is free unless it was refreshed


class RunLock:
    """A lock on a run, with a note that names its host and process.

    The lock uses flock, so it ends with its process, also after ``kill -9``. On file systems without flock it uses a
    `filelock.SoftFileLease`: its process refreshes a lock file, and another process, on any host, takes the lock once
    it has seen no refresh for five minutes; on the same host at once if the process has ended. That lock file is
    named ``<path>.soft``: the attempt to use flock leaves an empty file at ``path``.

    Args:
        path: The lock file. It is created, with its folder, and removed when the lock is released.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "lock"
        >>> first, second = RunLock(path), RunLock(path)
        >>> first.acquire(), second.acquire(), second.holder() == f"process {os.getpid()} on {socket.gethostname()}"
        (True, False, True)
        >>> first.release()
        >>> second.acquire(), second.release()
        (True, None)
    """

    def __init__(self, path: Path) -> None:
        self.path, self.note = path, path.with_name(f"{path.name}.json")
        self.soft = path.with_name(f"{path.name}.soft")
        self._lock: BaseFileLock | None = None
        self._file: os.stat_result | None = None  # the lock file as it was when it was locked

    def acquire(self) -> bool:
        """Acquire the lock without waiting; False if another process, or another lock in this one, holds it."""
        for _ in range(TRIES):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = self._acquire()
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

    def _acquire(self) -> BaseFileLock:
        # Not thread-local: a run may be released from another thread.
        lock = FileLock(self.path, timeout=0, thread_local=False, fallback_to_soft=False)
        try:
            lock.acquire()
        except OSError as error:
            if isinstance(error, Timeout) or error.errno not in WITHOUT_LOCKS:
                raise
            return self._acquire_lease()
        return lock

    def _acquire_lease(self) -> BaseFileLock:
        """Acquire the lock on a file system without flock.

        A lease counts the seconds without a refresh from the first attempt on, so all attempts of this process on a
        lock that another holds use the same object.
        """
        path = str(self.soft)
        with _awaited_leases_lock:
            lease = _awaited_leases.get(path)
            if lease is None:
                lease = SoftFileLease(path, lease_duration=LEASE, timeout=0, thread_local=False)
                _awaited_leases[path] = lease
            try:
                lease.acquire()
            except Timeout:
                raise
            except (LeaseSettingsMismatch, SoftFileLockProtocolError) as error:  # of another version
                raise Timeout(path) from error
            except BaseException:
                del _awaited_leases[path]
                raise
            del _awaited_leases[path]
        return lease

    def is_free(self) -> bool:
        """Whether no process holds the lock. A waiting process can call this without becoming the holder."""
        if not self.path.exists() and not self.soft.exists():
            return True
        try:
            self._acquire().release(force=True)
        except Timeout:
            return False
        except FileNotFoundError:
            return True
        return True

    def holder(self) -> str:
        """Return the process and the host that hold the lock, as far as known."""
        try:
            raw = json.loads(self.note.read_text())
            return f"process {raw['pid']} on {raw['host']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def remove_files(self) -> None:
        """Remove the files of a held lock, so that their folder can be removed; the lock stays acquired."""
        for file in (self.note, self.path, self.soft):
            file.unlink(missing_ok=True)

    def release(self) -> None:
        """Remove the files of the lock, then release it; the other order could remove files of the next holder."""
        if self._is_current():
            with suppress(OSError):
                self.remove_files()
        self._release()

    def _is_current(self) -> bool:
        """Whether the lock file is still the one that this lock holds."""
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
