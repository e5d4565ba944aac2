"""The worker process of `process_pool`: ``python -m contnorm.bench.engine.worker DESCRIPTOR``.

It reads jobs from the connection with that file descriptor and writes their messages to it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from contnorm.bench.components import user_code_is_loading
from contnorm.errors import UserError

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Execute jobs until there are none, until a stop is requested, or until the parent process has ended."""
    connection = Connection(descriptor)
    try:
        sys.path[:] = connection.recv()
        work = _load(connection)
        if work is not None:
            _work(work, connection)
        connection.send_bytes(cloudpickle.dumps(("end", None)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended, and its runs are saved
        pass


def _load(connection: Connection) -> Callable[..., Any] | None:
    """Return the function that executes jobs; None if its objects can't be loaded here, which the parent is told."""
    content = connection.recv_bytes()
    try:
        with user_code_is_loading():
            work: Callable[..., Any] = cloudpickle.loads(content)
    except Exception as error:  # user code may be imported here
        message = f"a network, strategy or memory can't be loaded in another process ({type(error).__name__}: {error})."
        connection.send_bytes(cloudpickle.dumps(("error", UserError(f"{message} Use lanes=1."))))
        return None
    return work


def _work(work: Callable[..., Any], connection: Connection) -> None:
    halted = False

    def stop() -> bool:
        # The parent sends the next job only on request, so anything that arrives during a job is a request to stop.
        nonlocal halted
        halted = halted or connection.poll(0)
        return halted

    def send(kind: str, content: object) -> None:
        connection.send_bytes(cloudpickle.dumps((kind, content)))

    while not halted:
        send("ready", None)
        job = cloudpickle.loads(connection.recv_bytes())
        if job is None:
            return
        try:
            for message in work(job, stop):
                send("message", message)
        except UserError as error:
            send("error", error)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except (Exception, SystemExit):
            send("error", RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
