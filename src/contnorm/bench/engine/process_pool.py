"""A pool of worker processes for runs on a CPU, or on several GPUs.

Workers are started from a module of this package (`contnorm.bench.engine.worker`), not from the caller's main module,
and get their jobs through cloudpickle. A notebook, and a script without a ``__main__`` guard, can therefore use them.

Only the parent handles SIGINT and SIGTERM; it asks the workers to stop. A worker whose parent has ended saves its run
and ends as well.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Protocol

import cloudpickle

from contnorm.bench.components import is_installed
from contnorm.bench.signals import child_processes
from contnorm.errors import UserError

__all__ = ["can_start_workers", "pickle_objects", "run_in_processes"]

PATIENCE = 0.1  # seconds to wait for a message before ``stop`` is called
LAST_WORDS = 60.0  # seconds for the other workers to save when one has failed
WORKER = "contnorm.bench.engine.worker"


class Work(Protocol):
    """The function that executes one job in a worker process."""

    def __call__(self, job: Any, stop: Callable[[], bool], /) -> Iterator[Any]: ...


def can_start_workers() -> bool:
    """Whether worker processes can be started: on POSIX systems, with a Python executable."""
    return os.name == "posix" and bool(sys.executable)


def run_in_processes(
    work: Work,
    jobs: Sequence[Any],
    processes: int,
    stop: Callable[[], bool],
    variables: Sequence[Mapping[str, str]] = (),
) -> Iterator[Any]:
    """Execute jobs in worker processes; yields the messages of all jobs as they arrive.

    Args:
        work: ``work(job, stop)`` yields messages. It is sent to each worker once, with all objects it refers to.
        jobs: The jobs, executed in this order.
        processes: Number of worker processes.
        stop: Called often; once it returns True, no job is started and the running ones are asked to stop.
        variables: Environment variables of each worker process, in addition to those of this process.
    """
    payload, todo = pickle_objects(work), deque(jobs)
    workers: list[_Worker] = []
    limit = LAST_WORDS
    try:
        for i in range(min(processes, len(jobs))):
            workers.append(_Worker(payload, variables[i] if variables else {}))
        yield from _receive(workers, todo, stop)
    except KeyboardInterrupt:  # the second signal: end without further saving
        limit = 0.0
        raise
    finally:
        _end_all(workers, limit)


def pickle_objects(value: object) -> bytes:
    """Pickle an object, with the functions and classes of the user's modules by value.

    A worker then has the code and the variables of this process. If it imported the modules, it would execute them
    again: they may have been edited or changed since, or may start runs when they are imported. Modules that can't be
    pickled are imported.
    """
    modules = [module for name, module in list(sys.modules.items()) if _is_user_module(name, module)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        content = bytes(cloudpickle.dumps(value))
    except Exception:  # user objects raise errors of any type
        content = b""
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    return content or bytes(cloudpickle.dumps(value))


def _is_user_module(name: str, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name == "__main__" or getattr(module, "__name__", None) != name:
        return False
    return not is_installed(file)


class _Worker:
    """A worker process and the connection to it."""

    def __init__(self, payload: bytes, variables: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
            # In a session of its own: Ctrl-C in a terminal goes to the parent alone, which asks the workers to stop.
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        child_processes.add(self.process)
        self.connection = Connection(ours.detach())
        with suppress(OSError):  # a worker that has ended already is reported when its messages are read
            self.connection.send(sys.path)
            self.connection.send_bytes(payload)

    def send(self, job: Any) -> None:
        """Send a job; None asks the worker to stop and end."""
        with suppress(OSError):
            self.connection.send_bytes(cloudpickle.dumps(job))

    def error_of_end(self) -> UserError:
        """Return the error for a worker that has ended without its final message."""
        code = self.process.wait()
        cause = f"by itself (exit code {code})" if code >= 0 else f"by a signal (exit code {code}), most likely for"
        cause += "" if code >= 0 else " lack of memory"
        return UserError(
            f"A worker process ended {cause}. Run it again with fewer lanes (--lanes) to resume from the checkpoints."
        )

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.connection.close()
        child_processes.discard(self.process)


def _receive(workers: Sequence[_Worker], todo: deque[Any], stop: Callable[[], bool]) -> Iterator[Any]:
    by_connection = {worker.connection: worker for worker in workers}
    stopping = False
    while by_connection:
        if not stopping and stop():
            stopping = True
            todo.clear()
            for worker in by_connection.values():
                worker.send(None)
        for connection in wait(list(by_connection), timeout=PATIENCE):
            assert isinstance(connection, Connection)
            worker = by_connection[connection]
            try:
                kind, content = cloudpickle.loads(connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise worker.error_of_end() from error
            if kind == "message":
                yield content
            elif kind == "error":
                raise content
            elif kind == "ready":
                worker.send(todo.popleft() if todo else None)
            else:
                del by_connection[connection]


def _end_all(workers: Sequence[_Worker], limit: float) -> None:
    """Ask all workers to stop and wait for them, then kill those that remain; messages are read and dropped."""
    for worker in workers:
        worker.send(None)
    alive = {worker.connection: worker for worker in workers if worker.process.poll() is None}
    deadline = time.monotonic() + limit
    while alive and time.monotonic() < deadline:
        for connection in wait(list(alive), timeout=PATIENCE):
            assert isinstance(connection, Connection)
            try:
                connection.recv_bytes()
            except (EOFError, OSError):
                del alive[connection]
    for worker in workers:
        worker.kill()
