"""The driver of the Ray launcher: it starts workers, gives them units, and replaces those that are lost."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

import contnorm
from contnorm.bench.components import Component, is_file_code, load_component, user_parts
from contnorm.bench.engine.events import Failed
from contnorm.bench.engine.job import Job
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.process_pool import PATIENCE, pickle_objects
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.remote_worker import (
    Checkpoint,
    Ended,
    Events,
    Log,
    MissingData,
    RemoteWorker,
    WorkerError,
    WorkerInfo,
    WorkerSetup,
    is_end,
)
from contnorm.bench.launchers.run_files import HeldRuns, RunFiles
from contnorm.errors import UserError, usable

__all__ = ["FolderToken", "RayDriver", "RayOptions", "describe_cause"]

log = logging.getLogger("contnorm")

SURVEY = 2.0  # seconds between two looks at the size of the cluster
LONGEST_CAUSE = 300  # characters
MESSAGES = 256.0  # with progress, per second, of all workers together: the driver has to read them
FIRST_REPORT = 0.25  # least seconds between two messages of a worker


@dataclass(frozen=True)
class RayOptions:
    """Options of the workers; see `RayLauncher`.

    Attributes:
        cpus, gpus: Resources of a worker.
        num_workers: Largest number of workers; None for as many as the cluster has room for.
        retries: How often a run is retried after its worker was lost.
        checkpoints: URL of checkpoints.
        upload_every: Seconds between two checkpoints of a run.
        can_grow: Whether nodes can join the cluster.
    """

    cpus: float
    gpus: float
    num_workers: int | None = None
    retries: int = 3
    checkpoints: str | None = None
    upload_every: float = 60.0
    can_grow: bool = True

    @property
    def resources(self) -> dict[str, float]:
        """Resources of a worker that are not 0, by the name that Ray has for them."""
        return {name: amount for name, amount in (("CPU", self.cpus), ("GPU", self.gpus)) if amount}


@dataclass
class _Worker:
    """An actor, and what it does.

    Attributes:
        actor: Handle of the actor.
        pending: What is waited for: the result of `setup`, or the messages of a unit; None if it is idle.
        info: What it says about itself; None before its setup has ended.
        jobs: Jobs of its unit that have not ended.
        data: References to data sets that it gets with its next unit.
    """

    actor: Any
    pending: Any
    info: WorkerInfo | None = None
    jobs: list[Job] = field(default_factory=list)
    data: list[Any] = field(default_factory=list)

    @property
    def shared(self) -> bool:
        """Whether it sees the folder of runs."""
        return self.info is not None and self.info.shared


class RayDriver:
    """Executes units on a Ray cluster.

    Args:
        ray: The module ``ray``, which is connected to the cluster.
        options: Options of the workers.
        work: The work function.
        units: The units, longest first.
    """

    def __init__(self, ray: Any, options: RayOptions, work: UnitWork, units: Sequence[Unit]) -> None:
        self._ray, self._options, self._work = ray, options, work
        self._todo = deque(units)
        self._workers: list[_Worker] = []
        self._lost: dict[Job, int] = {}  # how often the worker of a job was lost
        self._failed_starts, self._stopping = 0, False
        self._room, self._surveyed = 1, float("-inf")
        self._data: dict[str, Any] = {}  # references to data sets in Ray's object store
        self._seen_logs: set[str] = set()
        runs = work.environment.runs
        self._held = None if runs is None else HeldRuns(work.environment.store)
        self._token = None if runs is None else FolderToken(runs)
        self._setup: Any = None
        self._actor_class = ray.remote(RemoteWorker)

    def run(self, stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute all units; yields the events of their jobs as they arrive."""
        self._check_feasible()
        while self._todo or any(worker.jobs for worker in self._workers):
            if not self._stopping and stop():
                self._stop()
            if not self._stopping:
                self._start_workers()
                yield from self._assign()
            yield from self._receive(PATIENCE)

    def _stop(self) -> None:
        """Ask the workers to stop; the runs of a worker that is lost from now on are not retried."""
        self._stopping = True
        self._todo.clear()
        for worker in list(self._workers):
            if worker.jobs:
                worker.actor.stop.remote()
            else:
                self._remove(worker)

    def _start_workers(self) -> None:
        """Start workers while there are more units than workers, and room in the cluster."""
        busy = sum(bool(worker.jobs) for worker in self._workers)
        wanted = min(len(self._todo) + busy, self._options.num_workers or self._survey())
        while len(self._workers) < wanted:
            self._start_worker()
        if not self._todo:
            for worker in [worker for worker in self._workers if not worker.jobs]:
                self._remove(worker)

    def _start_worker(self) -> None:
        if self._setup is None:
            self._setup = self._ray.put(cloudpickle.dumps(self._worker_setup()))
        if self._token is not None:
            self._token.write()
        actor = self._actor_class.options(
            num_cpus=self._options.cpus,
            num_gpus=self._options.gpus,
            max_concurrency=2,  # `stop` is called while `run` executes
            max_restarts=0,
            scheduling_strategy="SPREAD",
        ).remote()
        self._workers.append(_Worker(actor, actor.setup.remote(self._setup)))

    def _worker_setup(self) -> WorkerSetup:
        jobs = [job for unit in self._todo for job in unit.jobs]
        return WorkerSetup(
            pickle_objects(self._work),
            os.getcwd(),
            None if self._token is None else (self._token.path.name, self._token.content),
            _pickled_code(jobs),
            self._options.checkpoints,
            self._options.upload_every,
            max(FIRST_REPORT, min(len(self._todo), self._options.num_workers or self._survey()) / MESSAGES),
        )

    def _survey(self) -> int:
        """Return the number of workers that the cluster has room for, at least 1."""
        if time.monotonic() > self._surveyed + SURVEY:
            self._room = max(1, sum(self._room_on(node) for node in self._ray.nodes() if node["Alive"]))
            self._surveyed = time.monotonic()
        return self._room

    def _room_on(self, node: Mapping[str, Any]) -> int:
        needed = self._options.resources
        return min((int(node["Resources"].get(name, 0) // amount) for name, amount in needed.items()), default=1)

    def _check_feasible(self) -> None:
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        if any(self._room_on(node) for node in nodes):
            return
        needed = ", ".join(f"{a:g} {n}" for n, a in self._options.resources.items())
        if not self._options.can_grow:
            raise UserError(f"launcher ray: a worker needs {needed}, which this machine does not have. Use a cluster.")
        log.warning(f"no node of the Ray cluster has {needed}; the runs wait until one joins.")

    def _assign(self) -> Iterator[Event]:
        """Give units to idle workers."""
        for worker in self._workers:
            if not self._todo:
                return
            if worker.pending is None and worker.info is not None and not worker.jobs:
                jobs = list(self._todo.popleft().jobs)
                files: dict[Job, RunFiles] = {}
                if self._held is not None and not worker.shared:
                    jobs, events = self._held.acquire(jobs)
                    yield from events
                    files = {job: self._held.read(job) for job in jobs}
                if jobs:
                    worker.jobs = jobs
                    content = cloudpickle.dumps((Unit(tuple(jobs)), files))
                    worker.pending = worker.actor.run.options(num_returns="streaming").remote(content, *worker.data)
                    worker.data = []

    def _receive(self, timeout: float) -> Iterator[Event]:
        """Wait for messages of workers, and handle them."""
        pending = [worker.pending for worker in self._workers if worker.pending is not None]
        if not pending:
            time.sleep(timeout)
            return
        ready, _ = self._ray.wait(pending, num_returns=len(pending), timeout=timeout, fetch_local=False)
        for worker in list(self._workers):
            if any(worker.pending is one for one in ready):
                yield from self._handle(worker)

    def _handle(self, worker: _Worker) -> Iterator[Event]:
        """Handle the next message of a worker, its end, or its loss."""
        try:
            if worker.info is None:
                worker.info, worker.pending = self._ray.get(worker.pending), None
            else:
                content = self._ray.get(next(worker.pending))
        except StopIteration:
            worker.pending = None
            if worker.jobs:  # it has ended without their last events
                yield from self._lose(worker, "its unit ended early")
            return
        except self._ray.exceptions.RayError as error:
            yield from self._lose(worker, describe_cause(error))
            return
        if worker.pending is None:
            self._check_started(worker)
        else:
            yield from self._read(worker, cloudpickle.loads(content))

    def _check_started(self, worker: _Worker) -> None:
        assert worker.info is not None
        self._failed_starts = 0
        if self._token is not None and all(other.info is not None for other in self._workers):
            self._token.remove()
        if worker.info.version != contnorm.__version__:
            raise UserError(
                f"launcher ray: {worker.info.host} has contnorm {worker.info.version}, and this machine "
                f"{contnorm.__version__}. Install the same version on every node."
            )

    def _read(self, worker: _Worker, message: object) -> Iterator[Event]:
        if isinstance(message, Events):
            for event in message.events:
                self._note_end(worker, event)
                yield event if self._held is None or worker.shared else self._held.located(event)
        elif isinstance(message, Ended):
            assert self._held is not None
            self._note_end(worker, message.event)
            yield self._held.end(message.event, message.files)
        elif isinstance(message, Checkpoint):
            assert self._held is not None
            self._held.save_checkpoint(message.job, message.files)
        elif isinstance(message, Log):
            if message.text not in self._seen_logs:  # many workers have the same warnings
                self._seen_logs.add(message.text)
                log.log(message.level, message.text)
        elif isinstance(message, MissingData):
            self._send_data(worker, message.name)
        elif isinstance(message, WorkerError):
            raise message.error

    def _note_end(self, worker: _Worker, event: Event) -> None:
        if is_end(event) and event.job in worker.jobs:
            worker.jobs.remove(event.job)

    def _send_data(self, worker: _Worker, name: str) -> None:
        """Send a data set through Ray's object store, which holds it once, then the unit again."""
        if name not in self._data:
            self._data[name] = self._ray.put(cloudpickle.dumps(self._work.environment.load(name)))
        worker.data.append(self._data[name])
        self._todo.appendleft(Unit(tuple(worker.jobs)))
        worker.jobs = []

    def _lose(self, worker: _Worker, cause: str) -> Iterator[Event]:
        """Retry the jobs of a lost worker, or report them as failed if that happened too often."""
        host = "" if worker.info is None else f" on {worker.info.host}"
        jobs = worker.jobs
        self._remove(worker)
        if self._stopping:
            return
        if worker.info is None:
            self._failed_starts += 1
            if self._failed_starts > self._options.retries:
                raise UserError(f"launcher ray: workers can't be started ({cause}). Install contnorm on every node.")
            return
        for job in jobs:
            self._lost[job] = self._lost.get(job, 0) + 1
        failed = [job for job in jobs if self._lost[job] > self._options.retries]
        again = [job for job in jobs if job not in failed]
        if again:
            log.warning(f"a worker{host} was lost ({cause}). Its {len(again)} runs are retried by another one.")
            self._todo.appendleft(Unit(tuple(again)))
        for job in failed:
            path = None if self._held is None else self._work.environment.store.path(job.config, job.seed)
            why = f"seed {job.seed}: its worker was lost {self._lost[job]} times, the last time{host} ({cause})."
            yield Event(job, Failed(f"{why} Run it again to continue."), path)

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        with suppress(Exception):  # of an actor that has ended, or a cluster that is gone
            self._ray.kill(worker.actor)

    def end(self, limit: float) -> None:
        """Ask all workers to stop, wait until they have saved, and end them; events are dropped."""
        deadline = time.monotonic() + limit
        try:
            if limit:
                self._stop()
            while any(worker.jobs for worker in self._workers) and time.monotonic() < deadline:
                with suppress(UserError, RuntimeError):  # the first error is being raised
                    for _ in self._receive(PATIENCE):
                        pass
        finally:
            for worker in list(self._workers):
                self._remove(worker)
            if self._held is not None:
                self._held.close()
            if self._token is not None:
                self._token.remove()


class FolderToken:
    """A file in the folder of runs that shows workers whether they see that folder."""

    def __init__(self, runs: Path) -> None:
        self.path, self.content = runs / f".launcher-{secrets.token_hex(8)}", secrets.token_hex(16)

    def write(self) -> None:
        with usable(self.path.parent, "no run can be saved there", "Use another folder for runs (--runs)."):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(self.content)

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def _pickled_code(jobs: Sequence[Job]) -> bytes | None:
    """Return the objects of user code in files, pickled by value, for machines without these files."""
    parts = {(kind, *part) for job in jobs for kind, part in user_parts(job.config).items() if is_file_code(part[0])}
    try:
        found = [Component(kind, name, load_component(kind, name, code), code=code) for kind, name, code in parts]
        return pickle_objects(found) if found else None
    except Exception:  # then machines without the files say so
        return None


def describe_cause(error: BaseException) -> str:
    """Return an error of Ray as one line: the last one of its message, which names the cause.

    Example:
        >>> describe_cause(RuntimeError("The actor died.\\nIts node was lost."))
        'RuntimeError: Its node was lost'
    """
    error = getattr(error, "cause", None) or error
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return text.rstrip(".") if len(text) <= LONGEST_CAUSE else f"{text[:LONGEST_CAUSE]}..."
