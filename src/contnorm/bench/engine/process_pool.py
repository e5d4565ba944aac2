"""Runs side by side on a CPU: one process each, fed with jobs until there are none left.

The parent alone listens to Ctrl-C and to kind kills, and passes the word on; a process that finds its parent gone saves
and ends as well.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event as Flag
from typing import Any, Protocol

from contnorm.bench.signals import signals_held, signals_let_go
from contnorm.errors import UserError

__all__ = ["side_by_side"]

PATIENCE = 0.1  # seconds to wait for news before asking whether to stop
GRACE = 2.0  # seconds for the last news of a process that has ended to arrive
LAST_WORDS = 60.0  # seconds for the others to save when one has failed
SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    workers: list[BaseProcess] = [
        context.Process(target=_work, args=(number, work, todo, news, halt, os.getpid())) for number in range(processes)
    ]
    limit = LAST_WORDS
    try:
        with signals_held(SIGNALS):  # one that has not come to `_work` yet is not ended by a Ctrl-C
            for worker in workers:
                worker.start()
        yield from _news(workers, news, halt, stop)
    except KeyboardInterrupt:  # the second time: what is saved is saved
        limit = 0.0
        raise
    finally:
        halt.set()
        todo.cancel_join_thread()  # jobs not begun need not be taken
        _wait_for_all(workers, news, limit)


def _news(workers: Sequence[BaseProcess], news: Any, halt: Flag, stop: Callable[[], bool]) -> Iterator[Any]:
    working = set(range(len(workers)))
    ended: dict[int, float] = {}
    while working:
        if stop():
            halt.set()
        _check_alive({number: workers[number] for number in working}, ended)
        try:
            number, what = news.get(timeout=PATIENCE)
        except queue.Empty:
            continue
        if what is None:
            working.discard(number)
        elif isinstance(what, BaseException):
            raise what
        else:
            yield what


def _check_alive(working: dict[int, BaseProcess], ended: dict[int, float]) -> None:
    """A process says when it is through; one that ends without a word is missed."""
    for number, worker in working.items():
        if worker.exitcode is None:
            continue
        since = ended.setdefault(number, time.monotonic())
        if worker.exitcode == 0 and time.monotonic() - since < GRACE:
            continue  # its last words may be on their way
        code = f"(exit code {worker.exitcode})"
        how = f"by itself {code}" if worker.exitcode >= 0 else f"from outside {code}, most likely for want of memory"
        raise UserError(
            f"a process that was running was ended {how}. What was saved stays: use fewer --lanes, and go on with "
            f"`contnorm resume`."
        )


def _wait_for_all(workers: Sequence[BaseProcess], news: Any, limit: float) -> None:
    """A process ends only when what it has to say has been taken; one that can't say it is ended."""
    started = [worker for worker in workers if worker.pid is not None]
    deadline = time.monotonic() + limit
    while any(worker.is_alive() for worker in started) and time.monotonic() < deadline:
        with suppress(queue.Empty):
            news.get(timeout=PATIENCE)
    for worker in started:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _work(number: int, work: Work, todo: Any, news: Any, halt: Flag, parent: int) -> None:
    for kind in SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    signals_let_go(SIGNALS)

    def stop() -> bool:
        return halt.is_set() or os.getppid() != parent

    try:
        for job in iter(todo.get, None):
            if stop():
                break
            for what in work(job, stop):
                news.put((number, what))
    except UserError as error:
        news.put((number, error))
    except (Exception, SystemExit):
        news.put((number, RuntimeError(f"in a process of its own:\n{traceback.format_exc()}")))
    news.put((number, None))
    if os.getppid() != parent:
        news.cancel_join_thread()  # nobody reads it any more
