"""Launchers: where groups of runs are executed. Here: in processes of this machine, and on a Ray cluster.

Worker processes are started from this module, not from the caller's main module, and get what they need through
cloudpickle. A notebook, and a script without a ``__main__`` guard, can therefore use them. Only the parent handles
Ctrl-C; it asks the workers to stop. A worker whose parent has ended saves its runs and ends as well.

On Ray, each group is a task, with Ray's own retries. All nodes see the folder of runs, where workers save checkpoints
and records, and the data, under the same paths. A task that Ray retries on another node resumes its runs from there.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import cloudpickle

from contnorm.bench.components import user_code_is_loading
from contnorm.bench.engine.run import Event, Launcher, Run
from contnorm.bench.signals import StopRequested, StopSignals
from contnorm.errors import UserError, import_library, is_installed

if TYPE_CHECKING:
    from contnorm.bench.engine.execute import Work

STOP_INTERVAL = 0.5  # seconds between two questions of a worker of Ray whether to stop
REPORT = 0.25  # least seconds between two messages of a worker of Ray with progress alone
MESSAGE_TIMEOUT = 0.1  # seconds to wait for a message before ``stop`` is called
SAVE_TIMEOUT = 60.0  # seconds for the other workers to save when one has failed
WORKER = f"from {__name__} import work_for_parent; work_for_parent"


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
        todo, workers, limit = deque(contents), list[_Worker](), SAVE_TIMEOUT
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
        for connection in wait(list(working), timeout=MESSAGE_TIMEOUT):
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
        for connection in wait(list(alive), timeout=MESSAGE_TIMEOUT):
            assert isinstance(connection, Connection)
            if alive[connection].receive() is None:
                del alive[connection]
    for worker in workers:
        worker.process.kill()
        worker.process.wait()
        worker.connection.close()


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


def _as_message(error: BaseException) -> Exception:
    """Return an error as it is raised in the process that started a worker, where it has no traceback."""
    return error if isinstance(error, UserError) else RuntimeError(f"in a worker process:\n{traceback.format_exc()}")


def work_for_parent(descriptor: int) -> None:
    """Execute groups of runs in a worker, until there are none, until SIGTERM, or until the parent process has ended.

    Args:
        descriptor: File descriptor of the connection. It is sent the search path and the pickled work, then a pickled
            group after each message ``"ready"``.
    """
    connection = Connection(descriptor)

    def send(message: object) -> None:
        connection.send_bytes(cloudpickle.dumps(message))

    ended = EOFError, BrokenPipeError, ConnectionResetError  # the parent has ended
    with StopSignals(announce=False) as signals, suppress(*ended, StopRequested):  # before any run has started
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
        except (Exception, SystemExit) as error:
            send(_as_message(error))


class RayLauncher(Launcher):
    """Executes groups of runs on the nodes of a Ray cluster.

    Without an address, it uses the cluster that the program is connected to, that of this machine or of
    ``$RAY_ADDRESS``, or starts Ray on this machine.

    Args:
        address: Address of the cluster, such as ``"auto"`` or ``"ray-head:6379"``.
        num_cpus: CPU cores of a task; None for the threads of a run.
        num_gpus: GPUs of a task; None for 1 on ``device="cuda"``, otherwise 0.
        retries: How often a task is retried after its worker was lost.

    Raises:
        UserError: If Ray is not installed.

    Example:
        >>> RayLauncher(retries=5).remote
        True
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        retries: int = 3,
    ) -> None:
        self._ray = import_library("ray", "ray")
        self.address, self.num_cpus, self.num_gpus, self.retries = address, num_cpus, num_gpus, retries

    def workers(self) -> int | None:
        """Return the number of tasks that the GPUs of the cluster have room for; None without GPUs."""
        self._connect()
        return int(self._ray.cluster_resources().get("GPU", 0) // (self.num_gpus or 1)) or None

    def _connect(self) -> None:
        """Connect to the cluster, or start Ray on this machine; Ray disconnects when the process ends."""
        if self._ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        with _same_signal_handlers():
            try:
                self._ray.init(address=self.address or "auto", **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                if self.address is not None:
                    raise UserError(
                        f"address={self.address!r}: can't connect to a Ray cluster ({error}). Start one with `ray "
                        f"start --head`; if it has a token, set RAY_AUTH_MODE=token here too."
                    ) from error
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                self._ray.init(address="local", include_dashboard=False, **quiet)

    def launch(self, work: Work, groups: Sequence[Sequence[Run]], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute groups on the cluster; yields the events of all runs as they arrive."""
        self._connect()
        ray, options = self._ray, work.options
        task = ray.remote(_execute).options(
            num_cpus=options.threads if self.num_cpus is None else self.num_cpus,
            num_gpus=float(options.on_gpu) if self.num_gpus is None else self.num_gpus,
            max_retries=self.retries,
            scheduling_strategy="SPREAD",
        )
        mailbox = ray.remote(_Mailbox).options(num_cpus=0).remote()
        ray.get(mailbox.take.remote())  # it runs before tasks hold it: Ray may drop an actor that has not started
        payload, *contents = pickle_all([work, *groups])
        shared, folder = ray.put(payload), os.getcwd()
        pending = {
            task.remote(shared, content, mailbox, folder): group
            for content, group in zip(contents, groups, strict=True)
        }
        ended, stopping = set[Run](), False
        try:
            while pending:
                if not stopping and stop():
                    stopping = True
                    mailbox.stop.remote()
                ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=MESSAGE_TIMEOUT)
                for event in self._events(mailbox):
                    ended |= {event.run} if event.is_end or event.kind == "waiting" else set()
                    yield event
                for reference in ready:
                    group = pending.pop(reference)
                    try:
                        error = ray.get(reference)
                    except ray.exceptions.RayError as lost:  # more often than it is retried
                        for run in group:
                            if run not in ended:
                                ended.add(run)
                                why = f"seed {run.seed}: its worker was lost ({_line(lost)}). Run it again to continue."
                                yield Event("failed", run, why=why)
                    else:
                        if error is not None:
                            raise error
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # after the second signal, end without further saving
                mailbox.stop.remote()
                with suppress(Exception):  # the first error is being raised
                    ray.wait(list(pending), num_returns=len(pending), timeout=SAVE_TIMEOUT)
            raise
        finally:
            with suppress(Exception):  # the task has ended, or the cluster is gone
                for reference in pending:
                    ray.cancel(reference, force=True)
                ray.kill(mailbox)

    def _events(self, mailbox: Any) -> Iterator[Event]:
        for content in self._ray.get(mailbox.take.remote()):
            yield from cloudpickle.loads(content)


class _Mailbox:
    """The actor that passes events from workers to the driver, and its request to stop to the workers."""

    def __init__(self) -> None:
        self._contents: list[bytes] = []
        self._stopped = False

    def put(self, content: bytes | None) -> bool:
        """Store pickled events, if there are any; returns whether a stop was requested."""
        if content is not None:
            self._contents.append(content)
        return self._stopped

    def take(self) -> list[bytes]:
        """Return the events since the last call."""
        contents, self._contents = self._contents, []
        return contents

    def stop(self) -> None:
        """Request a stop."""
        self._stopped = True


def _execute(payload: bytes, content: bytes, mailbox: Any, folder: str) -> Exception | None:
    """Execute a group of runs in a worker of Ray; returns the error that ended it."""
    ray = import_library("ray", "ray")
    stopped, asked = False, time.monotonic()

    def send(events: Sequence[Event] = ()) -> None:
        nonlocal stopped, asked
        stopped = bool(ray.get(mailbox.put.remote(cloudpickle.dumps(list(events)) if events else None))) or stopped
        asked = time.monotonic()

    def stop() -> bool:
        if not stopped and time.monotonic() > asked + STOP_INTERVAL:
            send()
        return stopped

    try:
        if Path(folder).is_dir():  # relative paths start there
            os.chdir(folder)
        send()
        if stopped:
            return None
        with user_code_is_loading():
            work, group = cloudpickle.loads(payload), cloudpickle.loads(content)
        events: list[Event] = []
        for event in work(group, stop):
            events.append(event)
            if event.kind != "steps" or time.monotonic() > asked + REPORT:
                send(events)
                events = []
        return None
    except (Exception, SystemExit) as error:
        return _as_message(error)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


@contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Keep the handlers of SIGINT and SIGTERM, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
