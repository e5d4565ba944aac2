"""The launcher of a Ray cluster: a task for each group of runs, with Ray's own retries.

All nodes see the folder of runs, where workers save checkpoints and records, and the data, under the same paths. A task
that Ray retries on another node resumes its runs from there.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from contnorm.bench.components import user_code_is_loading
from contnorm.bench.engine.launch import LAST_WORDS, PATIENCE, Launcher, pickle_all
from contnorm.bench.engine.run import Event, Run
from contnorm.bench.optional_libraries import import_library
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench.engine.execute import Work

__all__ = ["RayLauncher"]

POLL = 0.5  # seconds between two questions of a worker whether to stop
REPORT = 0.25  # least seconds between two messages of a worker with progress alone


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
                ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=PATIENCE)
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
                    ray.wait(list(pending), num_returns=len(pending), timeout=LAST_WORDS)
            raise
        finally:
            with suppress(Exception):  # of tasks that have ended, or a cluster that is gone
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
        if not stopped and time.monotonic() > asked + POLL:
            send()
        return stopped

    try:
        if Path(folder).is_dir():  # which relative paths start at
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
    except UserError as error:
        return error
    except (Exception, SystemExit):
        return RuntimeError(f"in a worker:\n{traceback.format_exc()}")


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
