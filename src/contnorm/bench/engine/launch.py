"""Launchers: where groups of runs are executed. Here: in processes of this machine.

Worker processes are started from this module, not from the caller's main module, and get what they need through
cloudpickle. A notebook, and a script without a ``__main__`` guard, can therefore use them. Only the parent handles
Ctrl-C; it asks the workers to stop. A worker whose parent has ended saves its runs and ends as well.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from contnorm.bench.components import is_installed, user_code_is_loading
from contnorm.bench.signals import StopSignals, child_processes
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench.engine.execute import Work
    from contnorm.bench.engine.run import Event, Run

PATIENCE = 0.1  # seconds to wait for a message before ``stop`` is called
LAST_WORDS = 60.0  # seconds for the other workers to save when one has failed
WORKER = f"from {__name__} import work_for_parent; work_for_parent"


class Launcher(ABC):
    """Executes groups of runs on workers: in this process, in others, or on other machines.

    Attributes:
        remote: Whether workers may be on other machines, which have devices that this one may not have.

    Example:
        >>> from contnorm import bench
        >>> class OneAfterTheOther(bench.Launcher):
        ...     "Executes all groups in this process."
        ...     remote = False
        ...     def launch(self, work, groups, stop):
        ...         for group in groups:
        ...             yield from work(group, stop)
        >>> stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> bench.run(stream, norm="bn", seeds=2, launcher=OneAfterTheOther()).accuracy.shape
        (2, 2, 2)
    """

    remote: ClassVar[bool] = True

    def workers(self) -> int | None:
        """Return the number of groups that are executed at a time, of which there are then enough; None if unknown."""
        return None

    @abstractmethod
    def launch(self, work: Work, groups: Sequence[Sequence[Run]], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute groups of runs; yields their events as they arrive.

        Args:
            work: ``work(group, stop)`` executes one group and yields its events. Send it to another process with
                `pickle_all`; ``work.options`` has the device, the CPU threads per run and the folder of runs.
            groups: The groups, longest first.
            stop: Called often; once it returns True, no group is started, and the running ones are asked to stop: the
                ``stop`` that their ``work`` was called with returns True.
        """


class Processes(Launcher):
    """Executes groups in worker processes of this machine.

    Args:
        number: Number of processes.
        devices: Indices of GPUs; each has a process, which sees no other one. Empty for a CPU.
    """

    remote: ClassVar[bool] = False

    def __init__(self, number: int, devices: Sequence[int] = ()) -> None:
        self.number, self.devices = number, tuple(devices)

    def workers(self) -> int | None:
        """Return the number of GPUs; None on a CPU, where a group is one run."""
        return len(self.devices) or None

    def launch(self, work: Work, groups: Sequence[Sequence[Run]], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute groups in the order in which workers become free."""
        try:
            payload, *contents = pickle_all([work, *groups])
        except Exception as error:  # objects of the user raise errors of any type
            reason = f"an object can't be sent to another process ({type(error).__name__}: {error})"
            logging.getLogger("contnorm").warning(f"runs are executed one after the other in this process: {reason}.")
            for group in groups:
                if not stop():
                    yield from work(group, stop)
            return
        todo, workers, limit = deque(contents), list[_Worker](), LAST_WORDS
        try:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # this process may itself see some of the GPUs only
            for number in range(min(self.number, len(todo))):
                variables = {}
                if self.devices:
                    index = self.devices[number]
                    variables["CUDA_VISIBLE_DEVICES"] = (
                        str(index) if visible is None else visible.split(",")[index].strip()
                    )
                workers.append(_Worker(payload, variables))
            yield from _receive(workers, todo, stop)
        except KeyboardInterrupt:  # the second signal: end without further saving
            limit = 0.0
            raise
        finally:
            _end_all(workers, limit)


class _Worker:
    """A worker process and the connection to it."""

    def __init__(self, payload: bytes, variables: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
            # In a session of its own: Ctrl-C in a terminal goes to the parent alone, which asks the workers to stop.
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{WORKER}({theirs.fileno()})"],
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

    def send(self, content: bytes) -> None:
        """Send a pickled group; without content, the worker ends."""
        with suppress(OSError):
            self.connection.send_bytes(content)

    def stop(self) -> None:
        """Ask the worker to stop its runs at the next step, and to save them."""
        self.process.send_signal(signal.SIGTERM)

    def receive(self) -> Any:
        """Return the next message; None if the worker has ended."""
        try:
            return cloudpickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None


def _receive(workers: Iterable[_Worker], todo: deque[bytes], stop: Callable[[], bool]) -> Iterator[Event]:
    working = {worker.connection: worker for worker in workers}
    stopping = False
    while working:
        if not stopping and stop():
            stopping = True
            todo.clear()
            for worker in working.values():
                worker.stop()
        for connection in wait(list(working), timeout=PATIENCE):
            assert isinstance(connection, Connection)
            worker = working[connection]
            message = worker.receive()
            if message is None:
                del working[connection]
                if not stopping and worker.process.wait() != 0:
                    raise UserError(
                        f"a worker process ended (exit code {worker.process.returncode}), most likely for lack of "
                        f"memory. Run it again with fewer lanes (--lanes) to resume from the checkpoints."
                    )
            elif message == "ready":
                worker.send(todo.popleft() if todo else b"")
            elif isinstance(message, BaseException):
                raise message
            else:
                yield message


def _end_all(workers: Sequence[_Worker], limit: float) -> None:
    """Ask all workers to stop and wait for them, then kill those that remain; messages are read and dropped."""
    alive = {worker.connection: worker for worker in workers if worker.process.poll() is None}
    for worker in alive.values():
        worker.stop()
        worker.send(b"")
    deadline = time.monotonic() + limit
    while alive and time.monotonic() < deadline:
        for connection in wait(list(alive), timeout=PATIENCE):
            assert isinstance(connection, Connection)
            if alive[connection].receive() is None:
                del alive[connection]
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        worker.connection.close()
        child_processes.discard(worker.process)


def pickle_all(values: Sequence[object]) -> list[bytes]:
    """Pickle objects, with the functions and classes of the user's modules by value.

    A worker then has the code and the variables of this process. If it imported the modules, it would execute them
    again: they may have been edited or changed since, or may start runs when they are imported.
    """
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name != "__main__"
        and isinstance(file := getattr(module, "__file__", None), str)
        and getattr(module, "__name__", None) == name
        and not is_installed(file)
    ]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        return [bytes(cloudpickle.dumps(value)) for value in values]
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def work_for_parent(descriptor: int) -> None:
    """Execute groups of runs in a worker, until there are none, until SIGTERM, or until the parent process has ended.

    Args:
        descriptor: File descriptor of the connection. It is sent the search path and the pickled work, then a pickled
            group after each message ``"ready"``.
    """
    connection = Connection(descriptor)

    def send(message: object) -> None:
        connection.send_bytes(cloudpickle.dumps(message))

    with StopSignals(announce=False) as signals, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            sys.path[:] = connection.recv()
            with user_code_is_loading():
                work = cloudpickle.loads(connection.recv_bytes())
            while not signals:
                send("ready")
                if not (content := connection.recv_bytes()):
                    return
                with user_code_is_loading():
                    group = cloudpickle.loads(content)
                # While a group is executed, the parent sends nothing unless it wants this process to end, or has ended.
                for event in work(group, lambda: bool(signals) or connection.poll(0)):
                    send(event)
        except (UserError, EOFError, BrokenPipeError, ConnectionResetError) as error:  # or the parent has ended
            send(error)
        except (Exception, SystemExit):
            send(RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))
