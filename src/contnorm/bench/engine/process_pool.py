"""A pool of worker processes for runs on a CPU.

Only the parent handles SIGINT and SIGTERM; it asks the workers to stop. A worker whose parent has ended saves its run
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

PATIENCE = 0.1  # seconds to wait for a message before ``stop`` is called
GRACE = 2.0  # seconds to wait for the last messages of a worker that has ended
LAST_WORDS = 60.0  # seconds for the other workers to save when one has failed
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Work(Protocol):
    """The function that executes one job; it must be defined at module level, so that a new process can import it."""

    def __call__(self, job: Any, stop: Callable[[], bool]) -> Iterator[Any]: ...


def side_by_side(work: Work, jobs: Sequence[Any], processes: int, stop: Callable[[], bool]) -> Iterator[Any]:
    """Execute jobs in worker processes; yields the messages of all jobs as they arrive.

    Args:
        work: ``work(job, stop)`` yields messages. It must be importable by name from its module.
        jobs: The jobs, executed in this order.
        processes: Number of worker processes.
        stop: Called often; once it returns True, no job is started and the running ones are asked to stop.
    """
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    todo, messages, halt = context.Queue(), context.Queue(), context.Event()
    for job in [*jobs, *[None] * processes]:
        todo.put(job)
    workers: list[BaseProcess] = [
        context.Process(target=_work, args=(number, work, todo, messages, halt, os.getpid()))
        for number in range(processes)
    ]
    limit = LAST_WORDS
    try:
        with signals_held(SIGNALS):  # or Ctrl-C would end a worker that has not reached `_work` yet
            for worker in workers:
                worker.start()
        yield from _receive(workers, messages, halt, stop)
    except KeyboardInterrupt:  # the second signal: end without further saving
        limit = 0.0
        raise
    finally:
        halt.set()
        todo.cancel_join_thread()  # jobs that have not started are dropped
        _wait_for_all(workers, messages, limit)


def _receive(workers: Sequence[BaseProcess], messages: Any, halt: Flag, stop: Callable[[], bool]) -> Iterator[Any]:
    working = set(range(len(workers)))
    ended: dict[int, float] = {}
    while working:
        if stop():
            halt.set()
        _check_alive({number: workers[number] for number in working}, ended)
        try:
            number, message = messages.get(timeout=PATIENCE)
        except queue.Empty:
            continue
        if message is None:
            working.discard(number)
        elif isinstance(message, BaseException):
            raise message
        else:
            yield message


def _check_alive(working: dict[int, BaseProcess], ended: dict[int, float]) -> None:
    """Raise an error if a worker has ended without its final message."""
    for number, worker in working.items():
        if worker.exitcode is None:
            continue
        ended_at = ended.setdefault(number, time.monotonic())
        if worker.exitcode == 0 and time.monotonic() - ended_at < GRACE:
            continue  # its final message may not have arrived yet
        code = f"(exit code {worker.exitcode})"
        cause = f"by itself {code}" if worker.exitcode >= 0 else f"from outside {code}, most likely for want of memory"
        raise UserError(
            f"a process that was running was ended {cause}. What was saved stays: use fewer --lanes, and go on with "
            f"`contnorm resume`."
        )


def _wait_for_all(workers: Sequence[BaseProcess], messages: Any, limit: float) -> None:
    """Wait for all workers, then kill those that remain. A worker can end only after its messages are received."""
    started = [worker for worker in workers if worker.pid is not None]
    deadline = time.monotonic() + limit
    while any(worker.is_alive() for worker in started) and time.monotonic() < deadline:
        with suppress(queue.Empty):
            messages.get(timeout=PATIENCE)
    for worker in started:
        if worker.is_alive():
            worker.kill()
            worker.join()


def _work(number: int, work: Work, todo: Any, messages: Any, halt: Flag, parent: int) -> None:
    """Execute jobs in a worker process until there are none, or until a stop is requested."""
    for kind in SIGNALS:
        signal.signal(kind, signal.SIG_IGN)
    signals_let_go(SIGNALS)

    def stop() -> bool:
        return halt.is_set() or os.getppid() != parent

    try:
        for job in iter(todo.get, None):
            if stop():
                break
            for message in work(job, stop):
                messages.put((number, message))
    except UserError as error:
        messages.put((number, error))
    except (Exception, SystemExit):
        messages.put((number, RuntimeError(f"in a process of its own:\n{traceback.format_exc()}")))
    messages.put((number, None))
    if os.getppid() != parent:
        messages.cancel_join_thread()  # no process reads the queue any more
