"""SIGINT and SIGTERM: they request a stop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 1.0  # seconds for an orderly end after the second signal
ACKNOWLEDGED = "contnorm: stopping after the current batch and saving. Interrupt again to end at once.\n"
ENDED = "contnorm: ended at once; the last checkpoints are intact.\n"


class StopRequested(BaseException):
    """Interrupts work that can be repeated, such as an evaluation.

    It is a `BaseException`, so that an ``except Exception`` in a model does not catch it.
    """


class StopSignals:
    """Context manager that turns SIGINT and SIGTERM into a request to stop.

    After the first signal, ``bool()`` of this object is True. The signal is acknowledged on stderr immediately, even if
    the main thread is in a long native call. The second signal, of either kind, raises KeyboardInterrupt in the main
    thread. If the process has not left the context a second later, it is killed with its children.

    `bench.run` and its siblings open one. Python allows signal handlers in the main thread only, so in another thread
    the context follows the one that the main thread has open, if there is one. A program that calls `bench.run` in
    other threads opens it in its main thread, around their work.

    Args:
        announce: Whether to acknowledge signals on stderr; not in worker processes, whose parent does.

    Attributes:
        received: The numbers of the signals received so far.
        immediate: The number of open `raise_on_stop` contexts.

    Example:
        >>> with StopSignals() as signals:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     bool(signals), signals.received == [signal.SIGTERM]
        (True, True)
    """

    def __init__(self, announce: bool = True) -> None:
        self.announce = announce
        self.received: list[int] = []
        self.immediate = 0
        self._handlers: dict[signal.Signals, Any] = {}
        self._closed = threading.Event()

    def __bool__(self) -> bool:
        return bool(self.received)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            if _open_contexts:
                self.received = _open_contexts[-1].received  # the same list
            return self
        # Python calls a handler only after the main thread has returned from native code. Its C handler writes to the
        # wakeup descriptor immediately, and another thread can read that.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="contnorm-signals", daemon=True)
        self._thread.start()
        self._previous_descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, self._handle)
        _open_contexts.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._handlers:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_descriptor)
        _open_contexts.remove(self)
        self._closed.set()
        self._writer.close()
        self._thread.join(GRACE)
        self._reader.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) > 1:
            raise KeyboardInterrupt
        if self.immediate:
            raise StopRequested

    def _watch(self) -> None:
        count = 0
        with suppress(OSError):  # closed
            while content := self._reader.recv(64):
                if self._previous_descriptor != -1:
                    with suppress(OSError):
                        os.write(self._previous_descriptor, content)
                for number in content:
                    count += number in SIGNALS
                    if number in SIGNALS and count == 1:
                        _write_to_stderr(ACKNOWLEDGED if self.announce else "")
                    elif number in SIGNALS and not self._closed.wait(GRACE):
                        _end_at_once(number)


_open_contexts: list[StopSignals] = []
child_processes: set[subprocess.Popen[bytes]] = set()  # worker processes, killed if this process has to end at once


@contextmanager
def raise_on_stop() -> Iterator[None]:
    """Raise `StopRequested` in the main thread as soon as a signal arrives, or if one has already arrived.

    For work without state to save, such as reading data. Without an open `StopSignals` it does nothing.
    """
    context = _open_contexts[-1] if _open_contexts else None
    if context is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    context.immediate += 1
    try:
        if context:
            raise StopRequested
        yield
    finally:
        context.immediate -= 1


def _write_to_stderr(text: str) -> None:
    """Write without Python's buffers, whose lock another thread may hold."""
    with suppress(OSError):
        os.write(2, text.encode())


def _end_at_once(number: int) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    for worker in child_processes:
        worker.kill()
    _write_to_stderr(ENDED)
    os._exit(128 + number)
