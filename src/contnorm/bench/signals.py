"""SIGINT and SIGTERM: they request a stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ACKNOWLEDGED = "contnorm: stopping after the current batch and saving. Interrupt again to end at once.\n"


class StopRequested(BaseException):
    """Interrupts work that can be repeated, such as an evaluation.

    It is a `BaseException`, so that an ``except Exception`` in a model does not catch it.
    """


class StopSignals:
    """Context manager that turns SIGINT and SIGTERM into a request to stop.

    After the first signal, which is acknowledged on stderr, ``bool()`` of this object is True. The second signal, of
    either kind, raises KeyboardInterrupt in the main thread. As always in Python, native code is not interrupted.

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

    def __bool__(self) -> bool:
        return bool(self.received)

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            if _open_contexts:
                self.received = _open_contexts[-1].received  # the same list
            return self
        self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        _open_contexts.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._handlers:
            _open_contexts.remove(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) > 1:
            raise KeyboardInterrupt
        if self.announce:
            with suppress(OSError):  # without Python's buffers, which the interrupted code may be writing to
                os.write(2, ACKNOWLEDGED.encode())
        if self.immediate:
            raise StopRequested


_open_contexts: list[StopSignals] = []


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
