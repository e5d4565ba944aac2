"""The Ray launcher: units of work on the nodes of a Ray cluster.

Each worker is an actor with one GPU, or with the CPU cores of one run. It executes one unit after the other and streams
its events to this process, the driver. The driver starts as many workers as the cluster has room for, also while it
grows. A worker that is lost, with its process or its node, is replaced, and its runs are retried by another worker.

If workers see the folder of runs (a shared file system, detected by a token file), they lock, save and record their
runs there. Otherwise the driver holds the locks, and writes the checkpoints and records that workers send (see
`run_files`). Ray ends the workers when the driver ends for any reason, so a driver that starts again finds its runs
free.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.process_pool import LAST_WORDS
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.base import Launcher
from contnorm.bench.launchers.ray_driver import RayDriver, RayOptions, describe_cause
from contnorm.bench.launchers.run_files import CheckpointUrl
from contnorm.bench.optional_libraries import import_library
from contnorm.errors import UserError

__all__ = ["RayLauncher"]


class RayLauncher(Launcher):
    """Executes units of work on the nodes of a Ray cluster.

    Args:
        address: Address of the cluster: ``"auto"`` for the one of this machine or of ``RAY_ADDRESS``, or ``host:port``.
            None for the same, or a Ray of this machine alone if there is no cluster. Without effect if the program has
            called ``ray.init``.
        num_cpus: CPU cores of a worker; None for the threads of a run.
        num_gpus: GPUs of a worker; None for 1 on ``device="cuda"``, otherwise 0.
        num_workers: Largest number of workers; None for as many as the cluster has room for. Set it on a cluster that
            grows on demand.
        retries: How often a run is retried after its worker was lost.
        checkpoints: URL of fsspec, such as ``"s3://bucket/checkpoints"``, where workers that do not see the folder of
            runs store checkpoints. None to send them to the driver.
        upload_every: Seconds between two checkpoints of a run that such a worker stores or sends.

    Raises:
        UserError: If Ray is not installed, or an argument is invalid.

    Example:
        >>> RayLauncher(retries=-1)
        Traceback (most recent call last):
        contnorm.errors.UserError: ...
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        num_workers: int | None = None,
        retries: int = 3,
        checkpoints: str | None = None,
        upload_every: float = 60.0,
    ) -> None:
        self._ray = import_library("ray", "ray")
        if address is not None and (not isinstance(address, str) or address.startswith("ray://")):
            raise UserError(
                f"address={address!r}: use auto or host:port. Start the command on a node of the cluster, or as a Ray "
                f"job, instead of through a Ray client."
            )
        _check_number("num_cpus", num_cpus, 0)
        _check_number("num_gpus", num_gpus, 0)
        _check_number("num_workers", num_workers, 1)
        _check_number("retries", retries, 0)
        _check_number("upload_every", upload_every, 0)
        if checkpoints is not None:
            CheckpointUrl(checkpoints)
        self.address, self.num_cpus, self.num_gpus, self.num_workers = address, num_cpus, num_gpus, num_workers
        self.retries, self.checkpoints, self.upload_every = retries, checkpoints, upload_every
        self._started_ray = False  # on this machine, which no node can join

    def launch(self, work: UnitWork, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute units on the cluster; yields the events of all jobs as they arrive."""
        self._connect()
        driver = RayDriver(self._ray, self._worker_options(work), work, units)
        limit = LAST_WORDS
        try:
            yield from driver.run(stop)
        except KeyboardInterrupt:  # the second signal: end without further saving
            limit = 0.0
            raise
        finally:
            driver.end(limit)

    def _connect(self) -> None:
        """Connect to the cluster, or start Ray on this machine; Ray disconnects when the process ends."""
        ray = self._ray
        if ray.is_initialized():
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        with _same_signal_handlers():
            try:
                ray.init(address=self.address or "auto", **quiet)
            except (ConnectionError, ValueError, RuntimeError) as error:
                if self.address is not None:
                    reason = describe_cause(error)
                    raise UserError(
                        f"address={self.address!r}: can't connect to a Ray cluster ({reason}). Start one with "
                        f"`ray start --head`; if it has a token, set RAY_AUTH_MODE=token here too."
                    ) from error
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                ray.init(address="local", include_dashboard=False, **quiet)
                self._started_ray = True

    def workers(self) -> int | None:
        """Return the number of GPUs that workers can have; None without GPUs, where a unit is one run."""
        if self.num_workers is not None:
            return self.num_workers
        self._connect()
        return int(self._ray.cluster_resources().get("GPU", 0) // (self.num_gpus or 1)) or None

    def _worker_options(self, work: UnitWork) -> RayOptions:
        on_gpu, threads = work.environment.device.type == "cuda", work.environment.threads
        return RayOptions(
            float(threads) if self.num_cpus is None else self.num_cpus,
            float(on_gpu) if self.num_gpus is None else self.num_gpus,
            self.num_workers,
            self.retries,
            self.checkpoints,
            self.upload_every,
            can_grow=not self._started_ray,
        )


def _check_number(name: str, value: object, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < float("inf"):
        raise UserError(f"{name}={value!r}: use a number, {least} or more.")


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
