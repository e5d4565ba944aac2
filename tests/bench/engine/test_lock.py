"""The lock of a run, also on file systems without flock, which shared folders of clusters may be."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from contnorm.bench.engine.lock import RunLock

from contnorm.bench.engine import lock as lock_module

HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
from contnorm.bench.engine import lock as lock_module

def refuse(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

fcntl.flock = refuse
lock_module.LEASE = float(sys.argv[2])
lock = lock_module.RunLock(Path(sys.argv[1]))
assert lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK], ids=["ENOSYS", "ENOLCK"])
def without_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


def hold_in_another_process(path: Path, lease: float) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), str(lease)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def attempts_until(lock: Path, seconds: float) -> bool:
    """Whether a lock becomes free within some seconds; each attempt is a new object, as in a process that waits."""
    for _ in range(int(seconds / 0.05)):
        if RunLock(lock).is_free():
            return True
        lock_module.threading.Event().wait(0.05)
    return False


@pytest.mark.usefixtures("without_flock")
def test_lock_without_flock_excludes_others_and_names_its_host(tmp_path: Path) -> None:
    first, second = (RunLock(tmp_path / "run" / "lock") for _ in range(2))
    assert first.is_free() and first.acquire()
    assert not second.acquire() and not second.is_free()
    assert second.holder() == f"process {os.getpid()} on {socket.gethostname()}"
    first.release()
    assert second.acquire()
    second.remove_files()  # as when its run is recorded
    assert not list((tmp_path / "run").iterdir())
    second.release()
    assert RunLock(tmp_path / "run" / "lock").is_free()


@pytest.mark.slow
@pytest.mark.usefixtures("without_flock")
def test_lock_without_flock_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with hold_in_another_process(path, lock_module.LEASE) as process:
        assert not RunLock(path).acquire()
        assert RunLock(path).holder() == f"process {process.pid} on {socket.gethostname()}"
        process.kill()
    assert RunLock(path).acquire()


@pytest.mark.slow
@pytest.mark.usefixtures("without_flock")
def test_lock_of_a_dead_host_is_free_after_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The marker names another host, so that nothing but the missing refresh shows that its process has ended."""
    monkeypatch.setattr(lock_module, "LEASE", 1.5)
    path = tmp_path / "lock"
    with hold_in_another_process(path, 1.5) as process:
        assert not attempts_until(path, 3.0), "its process refreshes it"
        process.kill()
    marker = path.with_name("lock.soft")
    marker.write_text(marker.read_text().replace(socket.gethostname(), "elsewhere"))
    assert not RunLock(path).acquire()
    assert attempts_until(path, 10.0)
    assert RunLock(path).acquire()


def test_holder_of_a_damaged_note_is_unknown(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock")
    assert lock.acquire()
    lock.note.write_text(json.dumps({"pid": 1}))
    assert lock.holder() == "another process"
    lock.release()
