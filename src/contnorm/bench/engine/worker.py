"""The worker process of `contnorm.bench.engine.launch`: ``python -m contnorm.bench.engine.worker DESCRIPTOR``."""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection

import cloudpickle

from contnorm.bench.components import user_code_is_loading
from contnorm.bench.signals import StopSignals
from contnorm.errors import UserError

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Execute groups of runs until there are none, until SIGTERM, or until the parent process has ended.

    Args:
        descriptor: File descriptor of the connection. It is sent the search path and the pickled work, then a pickled
            group after each message ``"ready"``.
    """
    connection = Connection(descriptor)

    def send(message: object) -> None:
        connection.send_bytes(cloudpickle.dumps(message))

    with StopSignals(announce=False) as signals:
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
        except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended, and its runs are saved
            pass
        except UserError as error:
            send(error)
        except (Exception, SystemExit):
            send(RuntimeError(f"in a worker process:\n{traceback.format_exc()}"))


if __name__ == "__main__":
    main(int(sys.argv[1]))
