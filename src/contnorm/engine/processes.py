"""Runs side by side on a CPU: one process each, fed with jobs until there are none left.

The parent alone listens to Ctrl-C and to kind kills, and passes the word on; a process that finds its parent gone saves
and ends as well.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event as Flag
from typing import Any, Protocol

from contnorm.errors import UserError

__all__ = ["side_by_side"]

PATIENCE = 0.1  # seconds to wait for news before asking whether to stop


class Work(Protocol):
    """What is done with one job; a function at the top of a module, so that a new process finds it."""

    def __call__(self, job: Any, stop: Callable[[], bool]) -> Iterator[Any]: ...


def side_by_side(work: Work, jobs: Sequence[Any], processes: int, stop: Callable[[], bool]) -> Iterator[Any]:
    """Do jobs in so many processes; gives what each of them gives, as it comes.

    Args:
        work: ``work(job, stop)`` gives news; it must be found by name in its module.
        jobs: What to do, in this order.
        processes: How many at a time.
        stop: Asked often; once it says so, no job is begun and those under way are asked to stop.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    todo, news, halt = context.Queue(), context.Queue(), context.Event()
    for job in [*jobs, *[None] * processes]:
        todo.put(job)
    workers = [context.Process(target=_work, args=(work, todo, news, halt, os.getpid())) for _ in range(processes)]
    try:
        for worker in workers:
            worker.start()
        yield from _news(workers, news, halt, stop)
    finally:
        halt.set()
        todo.cancel_join_thread()  # jobs not begun need not be taken
        _wait_for_all(workers, news)


def _news(workers: Sequence[BaseProcess], news: Any, halt: Flag, stop: Callable[[], bool]) -> Iterator[Any]:
    working = len(workers)
    while working:
        if stop():
            halt.set()
        try:
            what = news.get(timeout=PATIENCE)
        except queue.Empty:
            _check_alive(workers)
            continue
        if what is None:
            working -= 1
        elif isinstance(what, BaseException):
            raise what
        else:
            yield what


def _wait_for_all(workers: Sequence[BaseProcess], news: Any) -> None:
    """A process ends only when what it has to say has been taken."""
    while any(worker.is_alive() for worker in workers):
        with suppress(queue.Empty):
            news.get(timeout=PATIENCE)


def _check_alive(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        if worker.exitcode not in (None, 0):
            raise UserError(
                f"a process that was running was ended from outside (exit code {worker.exitcode}), most likely for "
                f"want of memory. What was saved stays: use fewer --lanes, and go on with `contnorm resume`."
            )


def _work(work: Work, todo: Any, news: Any, halt: Flag, parent: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def stop() -> bool:
        return halt.is_set() or os.getppid() != parent

    try:
        for job in iter(todo.get, None):
            if stop():
                break
            for what in work(job, stop):
                news.put(what)
    except UserError as error:
        news.put(error)
    except Exception:
        news.put(RuntimeError(f"in a process of its own:\n{traceback.format_exc()}"))
    news.put(None)
    if os.getppid() != parent:
        news.cancel_join_thread()  # nobody reads it any more
