"""The scheduler of runs: it skips recorded runs, resumes stopped ones and records the results."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import contnorm
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import MultiLabelSource
from contnorm.bench.data.multilabel_store import find_stored, read_manifest
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.loop import Diverged, Failed, Finished, Steps, Stopped, can_resume, train_together
from contnorm.bench.engine.plan_cache import PlanCache
from contnorm.bench.engine.precision import cpu_instructions, device_name, numerics
from contnorm.bench.engine.process_pool import can_start_workers, pickle_objects, run_in_processes
from contnorm.bench.engine.provenance import package_commit
from contnorm.bench.engine.run_dir import RunDir, edited, stopped_runs
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.engine.weights import save_weights
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.local_imports import search_path, use_search_path
from contnorm.bench.records import Store
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.bench.streams.image_store import DeviceImages
from contnorm.bench.trust import only_trusted, trusted_files
from contnorm.bench.user_code import breaks_in, python_objects, user_code_error
from contnorm.errors import RunBrokeError, UserError, usable

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
        path: The path of its record.
    """

    job: Job
    what: Steps | Finished | Stopped | Failed | Waiting | str
    path: Path


def execute(
    jobs: Sequence[Job],
    environment: RunEnvironment,
    stop: Callable[[], bool] = lambda: False,
    prepare: Callable[[str], object] = lambda name: None,
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
    store = Store(environment.runs)
    missing = []
    data = _DataCheck(environment, prepare)
    try:
        for job in dict.fromkeys(jobs):
            with usable(environment.runs, "it can't be looked into", "Say with --runs where else."):
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
    except StopRequested:  # raised while data is read, before any run has started
        return
    except Exception as error:
        if isinstance(error, RunBrokeError) or not isinstance(error, UserError):
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
    prepare: Callable[[str], object],
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

    def __init__(self, environment: RunEnvironment, prepare: Callable[[str], object]) -> None:
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
                f"{path}: is of other data than {data} (fingerprint {was}, now {now}), and is not run again. "
                f"Move it away, or use another --runs folder, to run it on these."
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
            self.prepare(name)
            return self.environment.load(name).fingerprint


def _execute(
    jobs: Sequence[Job], environment: RunEnvironment, stop: Callable[[], bool], prepare: Callable[[str], object]
) -> Iterator[Event]:
    processes = min(environment.lanes, len(jobs)) if environment.device.type == "cpu" else 1
    if processes > 1 and not _can_use_processes(environment):
        processes = 1
    if processes < 2:
        yield from _execute_here(jobs, environment, stop, prepare)
        return
    plans: dict[str, PlanCache] = {}
    for config in {job.config: None for job in jobs}:  # invalid settings fail before a process starts
        name = _source(config)
        with raise_on_stop():
            if name not in plans:
                prepare(name)
                plans[name] = PlanCache(environment.load(name))
            Trainer(config, 0, plans[name].source, environment.device, plans=plans[name])
    _note_begun(jobs, environment, {name: cached.source for name, cached in plans.items()})
    work = partial(_run_in_worker, environment=environment, trusted=trusted_files(), path=search_path())
    yield from run_in_processes(work, jobs, processes, stop)


def _can_use_processes(environment: RunEnvironment) -> bool:
    """Whether runs can be executed in worker processes; warns if they can't."""
    reason = "" if can_start_workers() else "this system does not support it"
    try:
        pickle_objects(environment.objects)
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
) -> Iterator[Event]:
    """Run one job in a worker process, which may execute the same user code as its parent."""
    use_search_path(path)
    with only_trusted(trusted), python_objects(environment.objects):
        yield from _execute_here([job], environment, stop)


def _execute_here(
    jobs: Sequence[Job],
    environment: RunEnvironment,
    stop: Callable[[], bool],
    prepare: Callable[[str], object] = lambda name: None,
) -> Iterator[Event]:
    """Run jobs in this process; jobs that can share a CUDA graph run together."""
    store = Store(environment.runs)
    loaded: dict[str, _Shared] = {}
    noted: set[RunConfig] = set()
    for group in _groups(jobs, environment, store):
        name = _source(group.jobs[0].config)
        if name not in loaded:
            with raise_on_stop():
                prepare(name)
            source = _load_data(name, environment)
            loaded[name] = _Shared(
                source, DeviceImages.of(source, environment.device, environment.whole), PlanCache(source)
            )
        new = {job.config for job in group.jobs} - noted
        noted |= new  # once only, or a failed run would get a note again
        stopped = False
        for event in _run(group, [job for job in jobs if job.config in new], loaded[name], environment, store, stop):
            yield event
            stopped = stopped or isinstance(event.what, Stopped)
        if stopped:
            return


def _load_data(name: str, environment: RunEnvironment) -> Source:
    """Load a data set. The GPU, which takes seconds to initialize, starts at the same time."""
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


def _groups(jobs: Sequence[Job], environment: RunEnvironment, store: Store) -> Iterator[_Group]:
    """Group jobs that can run together: same stream, training settings (except lr) and step; at most ``lanes``."""
    by_key: dict[tuple[object, ...], list[Job]] = {}
    steps: dict[Job, int] = {}
    for job in jobs:
        steps[job] = RunDir.of(job, store).checkpoints.latest_step()
        key = (job.config.stream, replace(job.config.train, lr=1.0), steps[job])
        by_key.setdefault(key, []).append(job)
    size = environment.lanes if environment.device.type == "cuda" else 1
    for group in by_key.values():
        for i in range(0, len(group), size):
            yield _Group(group[i : i + size], steps[group[0]])


def _run(
    group: _Group,
    to_note: Sequence[Job],
    shared: _Shared,
    environment: RunEnvironment,
    store: Store,
    stop: Callable[[], bool],
) -> Iterator[Event]:
    started = time.perf_counter()
    with ExitStack() as cleanup, numerics(group.jobs[0].config.train, environment.threads):
        trainers: dict[Trainer, Job] = {}
        for job in group.jobs:
            reason = edited(job.config)  # a file may have changed while earlier groups ran
            if reason:
                yield Event(job, Failed(reason), store.path(job.config, job.seed))
                continue
            # Invalid settings fail here, before anything is written.
            with raise_on_stop():
                trainer = Trainer(
                    job.config, job.seed, shared.source, environment.device, shared.pictures, shared.plans
                )
            cleanup.callback(trainer.feed.close)
            trainers[trainer] = job
        sources = {_source(job.config): shared.source for job in group.jobs}
        _note_begun([job for job in to_note if not edited(job.config)], environment, sources)
        for trainer, job in list(trainers.items()):
            refused = _acquire(job, group, environment, store, cleanup, shared.source)
            if refused is not None:
                del trainers[trainer]
                yield Event(job, refused, store.path(job.config, job.seed))
        restarted = {trainer: job for trainer, job in trainers.items() if _must_restart(trainer, RunDir.of(job, store))}
        for same_step in ({trainer: job for trainer, job in trainers.items() if trainer not in restarted}, restarted):
            if same_step:  # trainers that run together must be at the same step
                with _error_context(same_step, store):
                    yield from _learn(same_step, shared.source, environment, store, stop, started)


def _note_begun(jobs: Sequence[Job], environment: RunEnvironment, sources: Mapping[str, Source]) -> None:
    """Write the notes of runs, so that `resume` also knows those that have not started yet."""
    store = Store(environment.runs)
    for job in jobs:
        run_dir = RunDir.of(job, store)
        if not run_dir.note.is_file() and not run_dir.record.is_file():
            run_dir.write_note(job, environment, sources[_source(job.config)].fingerprint)


def _acquire(
    job: Job, group: _Group, environment: RunEnvironment, store: Store, cleanup: ExitStack, source: Source
) -> Failed | Waiting | str | None:
    """Lock a run for this process; if it is not to be run here and now, return the event that says why."""
    run_dir = RunDir.of(job, store)
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
        f"{run_dir.folder}: its checkpoint after {checkpoint.progress['done']} steps does not hold the state that its "
        f"strategy or network keeps in Python. The run starts again from step 0."
    )
    run_dir.checkpoints.clear()
    return True


def _learn(
    trainers: dict[Trainer, Job],
    source: Source,
    environment: RunEnvironment,
    store: Store,
    stop: Callable[[], bool],
    started: float,
) -> Iterator[Event]:
    run_dirs = {trainer: RunDir.of(job, store) for trainer, job in trainers.items()}
    checkpoints = [run_dir.checkpoints if environment.resumable else None for run_dir in run_dirs.values()]
    for trainer, what in train_together(list(trainers), checkpoints, environment.checkpoint_every, stop=stop):
        job, run_dir = trainers[trainer], run_dirs[trainer]
        if isinstance(what, Diverged):
            with usable(run_dir.record, "the record can't be written", "Make room, and run it again."):
                store.save_diverged(job.config, job.seed, what.why, _provenance(job.config, source, environment))
        if isinstance(what, Finished):
            what.found["seconds"] |= {"together": time.perf_counter() - started, "lanes": len(trainers)}
            results = {**what.found, **_provenance(job.config, source, environment)}
            with usable(run_dir.record, "the record can't be written", f"{GO_ON} then go on with `contnorm resume`."):
                if environment.keep_weights:  # before the record: every record then has its weights
                    save_weights(trainer, run_dir.record)
                store.save(job.config, job.seed, results)
        if isinstance(what, Finished | Failed):
            run_dir.clear()
        yield Event(job, what, run_dir.record)


GO_ON = "The last checkpoint stays: make room,"


@contextmanager
def _error_context(trainers: dict[Trainer, Job], store: Store) -> Iterator[None]:
    """Add to an error which run failed and how many of its steps are saved; errors of user code become one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        trainer, job = next(iter(trainers.items()))
        run_dir = RunDir.of(job, store)
        saved = run_dir.checkpoints.latest_step()
        saved_note = f"{saved} steps of it are saved in {run_dir.folder}" if saved else "nothing of it is kept"
        for what, name in (("strategy", job.config.strategy.name), ("model", job.config.model.name)):
            if breaks_in(error, name):
                when = f"after {trainer.done} of {len(trainer.plan.steps)} steps"
                raise RunBrokeError(f"{user_code_error(error, what, name, when)} ({saved_note})") from error
        error.add_note(f"seed {job.seed}, after {trainer.done} of {len(trainer.plan.steps)} steps; {saved_note}.")
        raise


def _provenance(config: RunConfig, source: Source, environment: RunEnvironment) -> dict[str, Any]:
    """Return what the results depend on besides the settings: versions, device, precision, data and commit."""
    device, model = environment.device, environment.objects.get(config.model.name)
    shared_weights = model is not None and isinstance(model.value, torch.nn.Module)
    return {
        **({"initial_weights": "those of the given module, for all seeds"} if shared_weights else {}),
        "versions": {
            "contnorm": contnorm.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda": torch.version.cuda,
        },
        "device": {
            "kind": device.type,
            "name": device_name(device),
            "threads": torch.get_num_threads(),
            **({"instructions": cpu_instructions()} if device.type == "cpu" else {}),
        },
        "precision": config.train.precision,
        "deterministic": config.train.deterministic,
        "source": {"name": source.name, "fingerprint": source.fingerprint, **_source_details(source)},
        "commit": package_commit(),
    }


def _source_details(source: Source) -> dict[str, Any]:
    """Return how much of a published data set was present, and how it was split and decoded."""
    if not isinstance(source, MultiLabelSource):
        return dict(source.details)
    images = len(source.train_images) + len(source.test_images)
    return {"images": images, "published_images": source.published_images, "missing_images": source.missing_images}
