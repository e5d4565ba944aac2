"""The scheduler of runs: it skips recorded runs, resumes stopped ones and records the results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from contnorm.bench.components import Component, components_of, share_components
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.multilabel_store import find_stored, read_manifest
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.checkpoint import pack_weights, save_weights
from contnorm.bench.engine.events import Diverged, Failed, Finished, Started, Steps, Stopped, TaskDone
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.precision import numerics
from contnorm.bench.engine.process_pool import can_start_workers, pickle_objects, run_in_processes
from contnorm.bench.engine.provenance import provenance
from contnorm.bench.engine.resume import can_resume
from contnorm.bench.engine.run_dir import RunDir, edited, stopped_runs
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.local_imports import search_path, use_search_path
from contnorm.bench.plan import PlanCache
from contnorm.bench.records import Store
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.bench.streams.image_store import DeviceImages
from contnorm.bench.user_code import breaks_in, code_hash, only_trusted, python_objects, trusted_files, user_code_error
from contnorm.errors import UserCodeError, UserError, usable

__all__ = ["Event", "Job", "RunEnvironment", "Waiting", "execute", "resolve", "stopped_runs"]


POLL = 0.25  # seconds between two checks of runs that other processes hold


@dataclass(frozen=True)
class Waiting:
    """Another process holds the run; this one waits for it."""

    holder: str


@dataclass(frozen=True)
class Event:
    """An event of a run.

    Attributes:
        job: The run.
        what: The event; the string ``"recorded"`` if the run has a record already.
        path: The path of its record; None without a folder of records.
    """

    job: Job
    what: Started | Steps | TaskDone | Finished | Stopped | Failed | Waiting | str
    path: Path | None


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
    data = _DataCheck(environment, prepare)
    try:
        for job in dict.fromkeys(jobs):
            with usable(store.root, "it can't be read", "Use another folder for runs (--runs)."):
                recorded = store.has(job.config, job.seed)
            if recorded:
                data.check(job, store)
                yield Event(job, "recorded", store.path(job.config, job.seed))
            elif divergence := _known_divergence(job, store):
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


def _known_divergence(job: Job, store: Store) -> Diverged | None:
    """The divergence of a run that is recorded as diverged; None if it is not."""
    run = store.divergence(job.config, job.seed)
    if run is None:
        return None
    reason = run.reason or f"seed {job.seed}: the run diverged."
    return Diverged(f"{reason} It is recorded in {run.path}; delete that to run it again.")


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
            events.append(Event(job, _known_divergence(job, store) or "recorded", run_dir.record))
            del held[job]
        elif run_dir.lock.is_free():
            free.append(job)
            del held[job]
        elif held[job] != (holder := run_dir.lock.holder()):
            held[job] = holder
            events.append(Event(job, Waiting(holder), run_dir.record))
    return events, free


class _DataCheck:
    """Warns about records of other data than is on disk now. Such runs are not repeated.

    Args:
        environment: The environment of the runs.
        prepare: Called with the name of a data set before it is loaded.
    """

    def __init__(self, environment: RunEnvironment, prepare: Callable[[str], object] | None) -> None:
        self.environment, self.prepare = environment, prepare
        self._fingerprints: dict[str, str | None] = {}

    def check(self, job: Job, store: Store) -> None:
        name, path = _source(job.config), store.path(job.config, job.seed)
        now = self._fingerprint(name)
        if now is None:
            return
        try:
            record = store.load_run(job.config, job.seed)
        except UserError as error:  # one broken record must not stop the other runs
            logging.getLogger("contnorm").warning(str(error))
            return
        was, data = record.raw.get("source", {}).get("fingerprint"), f"{name} in {self.environment.data_root}"
        if compare_fingerprints(was, now) is Match.DIFFERENT:
            logging.getLogger("contnorm").warning(
                f"{path}: is of other data (fingerprint {was}) than {data} ({now}), and is not run again. Move it "
                f"away, or use another folder for runs (--runs), to run it on this data."
            )
        elif find_stored(name, self.environment.data_root) and (why := not_comparable(was, now)):
            logging.getLogger("contnorm").warning(f"{path}: may be of other data than {data}: {why}.")

    def _fingerprint(self, name: str) -> str | None:
        """Return the fingerprint of a data set on disk; None if it is missing or can't be used."""
        if name not in self._fingerprints:
            try:
                self._fingerprints[name] = self._load(name)
            except UserError:  # a record can be shown without its data
                self._fingerprints[name] = None
        return self._fingerprints[name]

    def _load(self, name: str) -> str:
        folder = find_stored(name, self.environment.data_root)
        if folder is not None:
            return str(read_manifest(folder)["fingerprint"])
        with raise_on_stop():
            if self.prepare is not None:
                self.prepare(name)
            return self.environment.load(name).fingerprint


def _execute(
    jobs: Sequence[Job], environment: RunEnvironment, stop: Callable[[], bool], prepare: Callable[[str], object] | None
) -> Iterator[Event]:
    processes = min(environment.lanes, len(jobs)) if environment.device.type == "cpu" else 1
    if processes > 1 and not _can_use_processes(environment, _components([job.config for job in jobs])):
        processes = 1
    if processes < 2:
        yield from _execute_here(jobs, environment, stop, prepare)
        return
    plans: dict[str, PlanCache] = {}
    for config in {job.config: None for job in jobs}:  # invalid settings fail before a process starts
        name = _source(config)
        with raise_on_stop():
            if name not in plans:
                if prepare is not None:
                    prepare(name)
                plans[name] = PlanCache(environment.load(name))
            Trainer(config, 0, plans[name].source, environment.device, plans=plans[name])
    if environment.runs is not None:
        sources = {name: cached.source for name, cached in plans.items()}
        _write_notes([(job, RunDir.of(job, environment.store)) for job in jobs], environment, sources)
    components = _components([job.config for job in jobs])
    work = partial(
        _run_in_worker, environment=environment, trusted=trusted_files(), path=search_path(), components=components
    )
    yield from run_in_processes(work, jobs, processes, stop)


def _components(configs: Sequence[RunConfig]) -> list[Component]:
    """Return the components that a program or a plugin registered in this process, and that these settings name."""
    named = dict.fromkeys(component for config in set(configs) for component in components_of(config.as_dict()))
    used = [component for component in named if component.kind != "dataset"]  # data is sent, or loaded by the worker
    return [replace(component, code=code_hash(component.name, component.kind)) for component in used]


def _can_use_processes(environment: RunEnvironment, components: Sequence[Component]) -> bool:
    """Whether runs can be executed in worker processes; warns if they can't."""
    reason = "" if can_start_workers() else "this system does not support it"
    try:
        pickle_objects((environment.objects, components))
    except Exception as error:  # user objects raise errors of any type
        reason = f"an object can't be sent to another process ({type(error).__name__}: {error})"
    if reason:
        logging.getLogger("contnorm").warning(f"runs are executed one after the other in this process: {reason}.")
    return not reason


def _run_in_worker(
    job: Job,
    stop: Callable[[], bool],
    *,
    environment: RunEnvironment,
    trusted: frozenset[Path] | None,
    path: tuple[str, ...],
    components: Sequence[Component],
) -> Iterator[Event]:
    """Run one job in a worker process, which may execute the same user code as its parent."""
    use_search_path(path)
    share_components(components)
    with only_trusted(trusted), python_objects(environment.objects):
        yield from _execute_here([job], environment, stop)


def _execute_here(
    jobs: Sequence[Job],
    environment: RunEnvironment,
    stop: Callable[[], bool],
    prepare: Callable[[str], object] | None = None,
) -> Iterator[Event]:
    """Run jobs in this process; jobs that can share a CUDA graph run together."""
    store = None if environment.runs is None else environment.store
    loaded: dict[str, _Shared] = {}
    noted: set[RunConfig] = set()
    for group in _groups(jobs, environment, store):
        name = _source(group.jobs[0].config)
        if name not in loaded:
            source = _load_data(name, environment, prepare)
            pictures = DeviceImages.of(source, environment.device, environment.whole)
            loaded[name] = _Shared(source, pictures, PlanCache(source))
        if store is not None:
            new = {job.config for job in group.jobs} - noted
            noted |= new  # once only, or a failed run would get a note again
            events = _run_recorded(
                group, [job for job in jobs if job.config in new], loaded[name], environment, store, stop
            )
        else:
            events = _run_in_memory(group, loaded[name], environment, stop)
        stopped = False
        for event in events:
            yield event
            stopped = stopped or isinstance(event.what, Stopped)
        if stopped:
            return


def _load_data(name: str, environment: RunEnvironment, prepare: Callable[[str], object] | None) -> Source:
    """Load a data set. The GPU, which takes seconds to initialize, starts at the same time."""
    with raise_on_stop():
        if prepare is not None:
            prepare(name)
        if environment.device.type == "cpu":
            return environment.load(name)
    with ThreadPoolExecutor(max_workers=1) as worker, raise_on_stop():  # only the main thread can be interrupted
        starting = worker.submit(lambda: torch.zeros(1, device=environment.device))
        source = environment.load(name)
        starting.result()
    return source


def _source(config: RunConfig) -> str:
    assert config.stream.source is not None  # filled in by `resolve`
    return config.stream.source


@dataclass(frozen=True)
class _Shared:
    """What the runs on one data set share."""

    source: Source
    pictures: DeviceImages
    plans: PlanCache


@dataclass(frozen=True)
class _Group:
    """Jobs that run together, and the number of steps that each of them has done."""

    jobs: list[Job]
    done: int


def _groups(jobs: Sequence[Job], environment: RunEnvironment, store: Store | None) -> Iterator[_Group]:
    """Group jobs that can run together: same stream, training settings (except lr) and step; at most ``lanes``."""
    by_key: dict[tuple[object, ...], list[Job]] = {}
    steps: dict[Job, int] = {}
    for job in jobs:
        steps[job] = 0 if store is None else RunDir.of(job, store).checkpoints.latest_step()
        key = (job.config.stream, replace(job.config.train, lr=1.0), steps[job])
        by_key.setdefault(key, []).append(job)
    size = environment.lanes if environment.device.type == "cuda" else 1
    for group in by_key.values():
        for i in range(0, len(group), size):
            yield _Group(group[i : i + size], steps[group[0]])


def _run_in_memory(
    group: _Group, shared: _Shared, environment: RunEnvironment, stop: Callable[[], bool]
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
                    what = replace(what, provenance=provenance(trainer.config, shared.source, environment))
                if isinstance(what, Finished):
                    results = _complete(what.results, trainers[trainer], shared.source, environment, started, trainers)
                    weights = pack_weights(trainer.model) if environment.keep_weights else None
                    what = Finished(results, weights)
                yield Event(trainers[trainer], what, None)


def _run_recorded(
    group: _Group,
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
        sources = {_source(job.config): shared.source for job in group.jobs}
        _write_notes([(job, run_dirs[job]) for job in to_note if not edited(job.config)], environment, sources)
        for trainer, job in list(trainers.items()):
            refused = _acquire(job, run_dirs[job], group, environment, store, cleanup, shared.source)
            if refused is not None:
                del trainers[trainer]
                yield Event(job, refused, run_dirs[job].record)
        restarted = {trainer: job for trainer, job in trainers.items() if _must_restart(trainer, run_dirs[job])}
        for same_step in ({trainer: job for trainer, job in trainers.items() if trainer not in restarted}, restarted):
            if same_step:  # trainers that run together must be at the same step
                with _error_context(same_step, run_dirs):
                    yield from _train_recorded(same_step, run_dirs, shared.source, environment, store, stop, started)


def _build_trainers(
    jobs: Sequence[Job], shared: _Shared, environment: RunEnvironment, cleanup: ExitStack
) -> tuple[dict[Trainer, Job], dict[Job, Failed]]:
    """Build a trainer for each job, before anything is written: invalid settings fail here.

    Also returns the jobs whose files have changed while earlier groups ran.
    """
    trainers: dict[Trainer, Job] = {}
    failures: dict[Job, Failed] = {}
    for job in jobs:
        if reason := edited(job.config):
            failures[job] = Failed(reason)
            continue
        with raise_on_stop():
            trainer = Trainer(job.config, job.seed, shared.source, environment.device, shared.pictures, shared.plans)
        cleanup.callback(trainer.feed.close)
        trainers[trainer] = job
    return trainers, failures


def _write_notes(
    run_dirs: Sequence[tuple[Job, RunDir]], environment: RunEnvironment, sources: Mapping[str, Source]
) -> None:
    """Write the notes of runs, so that `resume` also knows those that have not started yet."""
    for job, run_dir in run_dirs:
        if not run_dir.note.is_file() and not run_dir.record.is_file():
            run_dir.write_note(job, environment, sources[_source(job.config)].fingerprint)


def _acquire(
    job: Job,
    run_dir: RunDir,
    group: _Group,
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
        return _known_divergence(job, store) or "recorded"
    if run_dir.checkpoints.latest_step() != group.done:  # another process has advanced it: group it again
        run_dir.lock.release()
        return Waiting("")
    mismatch = run_dir.resume_mismatch(environment, source.fingerprint)
    if mismatch:
        return Failed(mismatch)
    run_dir.write_note(job, environment, source.fingerprint)
    return None


def _must_restart(trainer: Trainer, run_dir: RunDir) -> bool:
    """Whether the state of user code differs from the checkpoint's; unusable checkpoints are removed."""
    checkpoint = run_dir.checkpoints.latest() if trainer.fresh_code_state else None
    if checkpoint is None or can_resume(trainer, checkpoint):
        return False
    logging.getLogger("contnorm").warning(
        f"{run_dir.folder}: its checkpoint after {checkpoint.progress['done']} steps does not contain the Python "
        f"state of its strategy or network. The run starts again from step 0."
    )
    run_dir.checkpoints.clear()
    return True


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
            what = replace(what, provenance=provenance(job.config, source, environment))
        if isinstance(what, Diverged):
            with usable(run_dir.record, "the record can't be written", "Free disk space, and run it again."):
                store.save_diverged(job.config, job.seed, what.why, provenance(job.config, source, environment))
        if isinstance(what, Finished):
            results = _complete(what.results, job, source, environment, started, trainers)
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
    job: Job,
    source: Source,
    environment: RunEnvironment,
    started: float,
    together: Mapping[Trainer, Job],
) -> dict[str, Any]:
    """Add the time of the whole group and the provenance to the results of a run."""
    seconds = {**results["seconds"], "together": time.perf_counter() - started, "lanes": len(together)}
    return {**results, "seconds": seconds, **provenance(job.config, source, environment)}


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
        config = job.config
        for what, name in (
            ("strategy", config.strategy.name),
            ("norm", config.norm.name),
            ("model", config.model.name),
        ):
            if breaks_in(error, name):
                when = f"after {trainer.done} of {len(trainer.plan.steps)} steps"
                raise UserCodeError(f"{user_code_error(error, what, name, when)} ({saved_note})") from error
        error.add_note(f"seed {job.seed}, after {trainer.done} of {len(trainer.plan.steps)} steps; {saved_note}.")
        raise
