"""Execution of jobs in this process: trainers, locks, checkpoints and records."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from contnorm.bench.components import has_user_frame, user_code_error, user_parts
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.checkpoint import pack_weights, save_weights
from contnorm.bench.engine.events import Diverged, Failed, Finished, Started, Stopped
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.job_events import Event, Waiting
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.precision import numerics
from contnorm.bench.engine.provenance import provenance
from contnorm.bench.engine.run_dir import RunDir, edited
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.engine.units import JobGroup, group_jobs
from contnorm.bench.hardware_queues import request_hardware_queues
from contnorm.bench.plan import PlanCache
from contnorm.bench.records import Store
from contnorm.bench.signals import raise_on_stop
from contnorm.bench.strategies.build import build_strategy
from contnorm.bench.strategies.registry import STRATEGIES
from contnorm.bench.streams.image_store import DeviceImages
from contnorm.errors import UserCodeError, UserError, usable
from contnorm.kernels.triton.launcher import prepare_triton

__all__ = ["JobRunner", "current_device", "known_divergence", "write_notes"]

TURN = 0.0002  # seconds


class JobRunner:
    """Executes jobs in this process. Each data set is loaded once, with the plans of its runs.

    Args:
        environment: The folders, the device and the options of execution.
        prepare: Called with the name of a data set before it is loaded.
    """

    def __init__(self, environment: RunEnvironment, prepare: Callable[[str], object] | None = None) -> None:
        self.environment, self.prepare = environment, prepare
        self._shared: dict[str, _Shared] = {}

    def run(self, jobs: Sequence[Job], stop: Callable[[], bool]) -> Iterator[Event]:
        """Run jobs; those that can share a CUDA graph run together."""
        if self.environment.device.type != "cpu":
            request_hardware_queues()  # here for worker processes: in this one, `find_device` did
        with current_device(self.environment.device), _short_turns(self.environment.device):
            yield from self._run(jobs, stop)

    def _run(self, jobs: Sequence[Job], stop: Callable[[], bool]) -> Iterator[Event]:
        environment = self.environment
        noted: set[RunConfig] = set()
        for group in group_jobs(jobs, environment):
            shared = self._load(group.jobs[0].source, group.jobs)
            if environment.runs is not None:
                new = {job.config for job in group.jobs} - noted
                noted |= new  # once only, or a failed run would get a note again
                to_note = [job for job in jobs if job.config in new]
                events = _run_recorded(group, to_note, shared, environment, environment.store, stop)
            else:
                events = _run_in_memory(group, shared, environment, stop)
            stopped = False
            for event in events:
                yield event
                stopped = stopped or isinstance(event.what, Stopped)
            if stopped:
                return

    def _load(self, name: str, jobs: Sequence[Job]) -> _Shared:
        """Return what runs on a data set share. On a GPU, the plans of the jobs are made in the background."""
        environment = self.environment
        if name in self._shared:
            return self._shared[name]
        with raise_on_stop():
            started = _start_gpu(environment.device)  # meanwhile data is checked and loaded
            if self.prepare is not None:
                self.prepare(name)
            source = environment.load(name)
            plans = PlanCache(source)
            if environment.device.type != "cpu":
                plans.prepare([(job.config, job.seed, draws) for job in jobs if (draws := _replay_draws(job.config))])
            started()
        pictures = DeviceImages.of(source, environment.device, environment.whole)
        self._shared[name] = _Shared(source, pictures, plans)
        return self._shared[name]


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one, on which streams, graphs and kernels are created; nothing to do for a CPU."""
    if device.type == "cpu" or device.index is None:
        yield
        return
    with torch.cuda.device(device):
        yield


@contextmanager
def _short_turns(device: torch.device) -> Iterator[None]:
    """Let Python's threads take short turns on a GPU.

    The main thread gives its turn away at every call of torch, and would wait 5 ms for the next one while a background
    thread makes plans, loads kernels or draws the progress bars.
    """
    usual = sys.getswitchinterval()
    if device.type != "cpu":
        sys.setswitchinterval(min(usual, TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _start_gpu(device: torch.device) -> Callable[[], object]:
    """Initialize a GPU, its libraries and Triton in the background, which takes a second.

    Returns:
        A function that waits until the device can be used. Libraries may still be loaded then.
    """
    if device.type == "cpu":
        return lambda: None
    prepare_triton()
    worker = ThreadPoolExecutor(max_workers=1)  # only the main thread can be interrupted
    starting = worker.submit(lambda: torch.zeros(1, device=device))
    worker.submit(_load_libraries, device)
    worker.shutdown(wait=False)
    return starting.result


def _replay_draws(config: RunConfig) -> int:
    """Return the replay draws per step of a strategy of the package; 0 for other ones."""
    return build_strategy(config.strategy).draws if config.strategy.name in STRATEGIES else 0


def _load_libraries(device: torch.device) -> None:
    """Load the libraries of convolutions and of matrix products, which the first step would wait for."""
    with torch.no_grad(), torch.cuda.device(device):
        images, weights = torch.zeros(2, 8, 8, 8, device=device), torch.zeros(8, 8, 3, 3, device=device)
        torch.nn.functional.conv2d(images, weights).flatten(1) @ torch.zeros(288, 8, device=device)


@dataclass(frozen=True)
class _Shared:
    """What the runs on one data set share."""

    source: Source
    pictures: DeviceImages
    plans: PlanCache


def _run_in_memory(
    group: JobGroup, shared: _Shared, environment: RunEnvironment, stop: Callable[[], bool]
) -> Iterator[Event]:
    """Run a group of jobs without records, checkpoints and locks."""
    with ExitStack() as cleanup, numerics(group.jobs[0].config.train, environment.threads):
        started = time.perf_counter()
        trainers, failures = _build_trainers(group.jobs, shared, environment, cleanup)
        yield from (Event(job, failure, None) for job, failure in failures.items())
        if not trainers:
            return
        with _error_context(trainers, {}):
            for trainer, what in train_together(list(trainers), stop=stop, log_every=environment.log_every):
                if isinstance(what, Started):
                    used = trainer.convolutions
                    what = replace(what, provenance=provenance(trainer.config, shared.source, environment, used))
                if isinstance(what, Finished):
                    results = _complete(what.results, trainer, shared.source, environment, started, trainers)
                    weights = pack_weights(trainer.model) if environment.keep_weights else None
                    what = Finished(results, weights)
                yield Event(trainers[trainer], what, None)


def _run_recorded(
    group: JobGroup,
    to_note: Sequence[Job],
    shared: _Shared,
    environment: RunEnvironment,
    store: Store,
    stop: Callable[[], bool],
) -> Iterator[Event]:
    """Run a group of jobs, each with a lock, checkpoints and a record."""
    run_dirs = {job: RunDir.of(job, store) for job in (*group.jobs, *to_note)}
    with ExitStack() as cleanup, numerics(group.jobs[0].config.train, environment.threads):
        started = time.perf_counter()
        trainers, failures = _build_trainers(group.jobs, shared, environment, cleanup)
        yield from (Event(job, failure, run_dirs[job].record) for job, failure in failures.items())
        sources = {job.source: shared.source for job in group.jobs}
        write_notes([(job, run_dirs[job]) for job in to_note if not edited(job.config)], environment, sources)
        for trainer, job in list(trainers.items()):
            refused = _acquire(job, run_dirs[job], group, environment, store, cleanup, shared.source)
            if refused is not None:
                del trainers[trainer]
                yield Event(job, refused, run_dirs[job].record)
        if trainers:
            with _error_context(trainers, run_dirs):
                yield from _train_recorded(trainers, run_dirs, shared.source, environment, store, stop, started)


def known_divergence(job: Job, store: Store) -> Diverged | None:
    """Return the divergence of a run that is recorded as diverged; None if it is not."""
    run = store.divergence(job.config, job.seed)
    if run is None:
        return None
    reason = run.reason or f"seed {job.seed}: the run diverged."
    return Diverged(f"{reason} It is recorded in {run.path}; delete that to run it again.")


def _build_trainers(
    jobs: Sequence[Job], shared: _Shared, environment: RunEnvironment, cleanup: ExitStack
) -> tuple[dict[Trainer, Job], dict[Job, Failed]]:
    """Build a trainer for each job, before anything is written: invalid settings fail here.

    Also returns the jobs whose files have changed while earlier groups ran.
    """
    trainers: dict[Trainer, Job] = {}
    failures: dict[Job, Failed] = {}
    source, device, pictures, plans = shared.source, environment.device, shared.pictures, shared.plans
    for job in jobs:
        if reason := edited(job.config):
            failures[job] = Failed(reason)
            continue
        with raise_on_stop():
            trainer = Trainer(
                job.config, job.seed, source, device, pictures, plans,
                memory_moments=environment.memory_moments,
            )  # fmt: skip
        cleanup.callback(trainer.feed.close)
        trainers[trainer] = job
    return trainers, failures


def write_notes(
    run_dirs: Sequence[tuple[Job, RunDir]], environment: RunEnvironment, sources: Mapping[str, Source]
) -> None:
    """Write the notes of runs, so that `resume` also knows those that have not started yet."""
    for job, run_dir in run_dirs:
        if not run_dir.note.is_file() and not run_dir.record.is_file():
            run_dir.write_note(job, environment, sources[job.source].fingerprint)


def _acquire(
    job: Job,
    run_dir: RunDir,
    group: JobGroup,
    environment: RunEnvironment,
    store: Store,
    cleanup: ExitStack,
    source: Source,
) -> Failed | Waiting | str | None:
    """Lock a run for this process; if it is not to be run here and now, return the event that says why."""
    if not run_dir.acquire():
        return Waiting(run_dir.lock.holder())
    cleanup.callback(run_dir.lock.release)
    if run_dir.record.is_file():
        run_dir.clear()
        return known_divergence(job, store) or "recorded"
    if run_dir.checkpoints.latest_step() != group.done:  # another process has advanced it: group it again
        run_dir.lock.release()
        return Waiting("")
    mismatch = run_dir.resume_mismatch(job, environment, source.fingerprint)
    if mismatch:
        return Failed(mismatch)
    run_dir.write_note(job, environment, source.fingerprint)
    return None


def _train_recorded(
    trainers: dict[Trainer, Job],
    run_dirs: Mapping[Job, RunDir],
    source: Source,
    environment: RunEnvironment,
    store: Store,
    stop: Callable[[], bool],
    started: float,
) -> Iterator[Event]:
    """Train runs from their checkpoints and record the results."""
    checkpoints = [run_dirs[job].checkpoints for job in trainers.values()]
    every, log_every = environment.checkpoint_every, environment.log_every
    for trainer, what in train_together(list(trainers), checkpoints, every, stop=stop, log_every=log_every):
        job = trainers[trainer]
        run_dir = run_dirs[job]
        if isinstance(what, Started):
            what = replace(what, provenance=provenance(job.config, source, environment, trainer.convolutions))
        if isinstance(what, Diverged):
            with usable(run_dir.record, "the record can't be written", "Free disk space, and run it again."):
                origin = provenance(job.config, source, environment, trainer.convolutions)
                store.save_diverged(job.config, job.seed, what.why, origin)
        if isinstance(what, Finished):
            results = _complete(what.results, trainer, source, environment, started, trainers)
            with usable(run_dir.record, "the record can't be written", RESUME_HINT):
                if environment.keep_weights:  # before the record: every record then has its weights
                    save_weights(trainer.model, run_dir.record)
                store.save(job.config, job.seed, results)
            what = Finished(results)
        if isinstance(what, Finished | Failed):
            run_dir.clear()
        yield Event(job, what, run_dir.record)


def _complete(
    results: dict[str, Any],
    trainer: Trainer,
    source: Source,
    environment: RunEnvironment,
    started: float,
    together: Mapping[Trainer, Job],
) -> dict[str, Any]:
    """Add the time of the whole group and the provenance to the results of a run."""
    seconds = {**results["seconds"], "together": time.perf_counter() - started, "lanes": len(together)}
    return {**results, "seconds": seconds, **provenance(trainer.config, source, environment, trainer.convolutions)}


RESUME_HINT = "Free disk space, then resume with `contnorm resume`: the last checkpoint is intact."


@contextmanager
def _error_context(trainers: dict[Trainer, Job], run_dirs: Mapping[Job, RunDir]) -> Iterator[None]:
    """Add to an error which run failed and how many of its steps are saved; errors of user code become one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error.__cause__, StopIteration):  # Python replaces it where it leaves the training loop
            error = error.__cause__
        trainer, job = next(iter(trainers.items()))
        saved = run_dirs[job].checkpoints.latest_step() if job in run_dirs else 0
        saved_note = f"{saved} steps are saved in {run_dirs[job].folder}" if saved else "none are saved"
        parts = {kind: part for kind, part in user_parts(job.config).items() if kind != "memory"}
        if parts and has_user_frame(error):
            kind, (name, _) = next(iter(parts.items()))
            when = f"after {trainer.done} of {len(trainer.plan.steps)} steps"
            raise UserCodeError(f"{user_code_error(error, kind, name, when, parts)} ({saved_note})") from error
        error.add_note(f"seed {job.seed}, after {trainer.done} of {len(trainer.plan.steps)} steps; {saved_note}.")
        raise
