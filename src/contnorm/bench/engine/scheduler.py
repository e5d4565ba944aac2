"""The scheduler of runs: it skips recorded runs, waits for those of other processes, and launches the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.data_check import DataCheck
from contnorm.bench.engine.events import Failed, Finished, Stopped
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.job_events import Event, Waiting
from contnorm.bench.engine.process_pool import can_start_workers, pickle_objects
from contnorm.bench.engine.run_dir import RunDir, stopped_runs
from contnorm.bench.engine.runner import JobRunner, known_divergence, write_notes
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.engine.units import plan_units
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.local import LocalLauncher
from contnorm.bench.plan import PlanCache
from contnorm.bench.records import Store
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.errors import UserCodeError, UserError, usable

__all__ = ["Event", "Job", "RunEnvironment", "Waiting", "execute", "resolve", "stopped_runs"]


POLL = 0.25  # seconds between two checks of runs that other processes hold


def execute(
    jobs: Sequence[Job],
    environment: RunEnvironment,
    stop: Callable[[], bool] = lambda: False,
    prepare: Callable[[str], object] | None = None,
) -> Iterator[Event]:
    """Run the jobs that have no record yet, several at a time, and resume those that have checkpoints.

    Several processes may call this on the same folder; each run is executed by one of them. Runs that another process
    holds come last: this function waits until they are recorded, or executes them if their process has ended.

    Args:
        jobs: The runs.
        environment: The folders, the device and the options of execution.
        stop: Called often; once it returns True, runs stop at the next step.
        prepare: Called with the name of a data set before it is loaded, such as to decode it with a progress bar.
    """
    try:
        if environment.runs is None:
            yield from _execute(list(dict.fromkeys(jobs)), environment, stop, prepare)
        else:
            yield from _execute_recorded(jobs, environment, environment.store, stop, prepare)
    except StopRequested:  # raised while data is read, before any run has started
        return


def _execute_recorded(
    jobs: Sequence[Job],
    environment: RunEnvironment,
    store: Store,
    stop: Callable[[], bool],
    prepare: Callable[[str], object] | None,
) -> Iterator[Event]:
    """Run the jobs that have no record in the store."""
    missing = []
    data = DataCheck(environment, prepare)
    try:
        for job in dict.fromkeys(jobs):
            with usable(store.root, "it can't be read", "Use another folder for runs (--runs)."):
                recorded = store.has(job.config, job.seed)
            if recorded:
                data.check(job, store)
                yield Event(job, "recorded", store.path(job.config, job.seed))
            elif divergence := known_divergence(job, store):
                yield Event(job, divergence, store.path(job.config, job.seed))
            else:
                store.check_writable()
                missing.append(job)
        yield from _execute_all(missing, environment, store, stop, prepare)
    except Exception as error:
        if isinstance(error, UserCodeError) or not isinstance(error, UserError):
            for job in missing:  # they would fail again: remove the notes of runs without a checkpoint
                RunDir.of(job, store).clear_if_untouched()
        raise


def _execute_all(
    jobs: Sequence[Job],
    environment: RunEnvironment,
    store: Store,
    stop: Callable[[], bool],
    prepare: Callable[[str], object] | None,
) -> Iterator[Event]:
    """Run jobs. Then wait for jobs that other processes hold, and run those that become free."""
    held: dict[Job, str] = {}  # the holder that was last reported for each job
    while jobs or held:
        stopped = False
        for event in _execute(jobs, environment, stop, prepare):
            if isinstance(event.what, Waiting):
                held[event.job] = ""
            else:
                stopped = stopped or isinstance(event.what, Stopped)
                yield event
        if stopped or (held and stop()):
            return
        events, jobs = _check_held(held, store)
        yield from events
        if held and not jobs:
            time.sleep(POLL)


def _check_held(held: dict[Job, str], store: Store) -> tuple[list[Event], list[Job]]:
    """Check the runs that other processes hold. Returns events, and the jobs that can be run here.

    Runs that are recorded or free are removed from ``held``.
    """
    events, free = [], []
    for job in list(held):
        run_dir = RunDir.of(job, store)
        if run_dir.record.is_file():
            run_dir.clear_if_free()
            events.append(Event(job, known_divergence(job, store) or "recorded", run_dir.record))
            del held[job]
        elif run_dir.lock.is_free():
            free.append(job)
            del held[job]
        elif held[job] != (holder := run_dir.lock.holder()):
            held[job] = holder
            events.append(Event(job, Waiting(holder), run_dir.record))
    return events, free


def _execute(
    jobs: Sequence[Job], environment: RunEnvironment, stop: Callable[[], bool], prepare: Callable[[str], object] | None
) -> Iterator[Event]:
    """Run jobs in this process, or as units of work of a launcher."""
    if not jobs:
        return
    launcher, work = environment.launcher or LocalLauncher(), UnitWork.of(jobs, environment)
    if isinstance(launcher, LocalLauncher) and (
        launcher.processes(len(jobs), environment) < 2 or _warn_if_unsendable(work)
    ):
        yield from JobRunner(environment, prepare).run(jobs, stop)
        return
    if reason := _unsendable(work):
        raise UserError(f"launcher: {reason}. Run it without one, or define the object in a file.")
    sources = _check_settings(jobs, environment, prepare)
    workers = launcher.workers()  # before anything is written: it may fail to connect
    if environment.runs is not None:
        write_notes([(job, RunDir.of(job, environment.store)) for job in jobs], environment, sources)
    work.fingerprints = {name: source.fingerprint for name, source in sources.items()}
    ended = set()
    for event in launcher.launch(work, plan_units(jobs, environment, workers), stop):
        if isinstance(event.what, Finished | Stopped | Failed | Waiting | str):
            ended.add(event.job)
        yield event
    if len(ended) < len(jobs) and not stop():
        name = type(launcher).__name__
        raise UserError(f"launcher {name}: returned without the end of {len(jobs) - len(ended)} of {len(jobs)} runs.")


def _check_settings(
    jobs: Sequence[Job], environment: RunEnvironment, prepare: Callable[[str], object] | None
) -> Mapping[str, Source]:
    """Build the trainer of every experiment, so that invalid settings fail before a worker starts; returns the data.

    They are built on the CPU, since the GPUs are those of the workers.
    """
    plans: dict[str, PlanCache] = {}
    for job in {job.config: job for job in jobs}.values():
        with raise_on_stop():
            if job.source not in plans:
                if prepare is not None:
                    prepare(job.source)
                plans[job.source] = PlanCache(environment.load(job.source))
            Trainer(job.config, 0, plans[job.source].source, torch.device("cpu"), plans=plans[job.source])
    return {name: cached.source for name, cached in plans.items()}


def _warn_if_unsendable(work: UnitWork) -> bool:
    """Whether runs can't be executed in worker processes; warns if so."""
    reason = _unsendable(work) if can_start_workers() else "this system does not support it"
    if reason:
        logging.getLogger("contnorm").warning(f"runs are executed one after the other in this process: {reason}.")
    return bool(reason)


def _unsendable(work: UnitWork) -> str:
    """Return why the objects of the user can't be sent to another process; empty if they can."""
    try:
        pickle_objects(work.components)
    except Exception as error:  # user objects raise errors of any type
        return f"an object can't be sent to another process ({type(error).__name__}: {error})"
    return ""
