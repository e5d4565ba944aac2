"""Signals while processes are started: who is not ready to hear one yet is not ended by it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["signals_held", "signals_let_go"]


@contextmanager
def signals_held(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Let signals wait, here and in every process that is started meanwhile, which takes over what waits.

    Such a process says itself what it does with a signal, and then lets it come with `signals_let_go`.

    Example:
        >>> with signals_held([signal.SIGINT]):
        ...     signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        True
    """
    if not hasattr(signal, "pthread_sigmask"):  # as on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_let_go(signals: Sequence[signal.Signals]) -> None:
    """Let signals come that were made to wait when this process was started."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
