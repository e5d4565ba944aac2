"""Runs by their settings: skip what is recorded, go on where one was stopped, record what is found."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import contnorm
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.multilabel import MultiLabelSource
from contnorm.bench.data.multilabel_store import find_stored, read_manifest
from contnorm.bench.data.registry import Source, load_source
from contnorm.bench.engine.job import Job, Workplace
from contnorm.bench.engine.loop import Failed, Finished, Progress, Stopped, can_resume, run_lanes
from contnorm.bench.engine.plan_cache import Plans
from contnorm.bench.engine.precision import cpu_instructions, device_name, numerics
from contnorm.bench.engine.process_pool import side_by_side
from contnorm.bench.engine.provenance import package_commit
from contnorm.bench.engine.run_dir import Unfinished, edited, unfinished
from contnorm.bench.engine.trainer import Lane
from contnorm.bench.engine.weights import keep_weights
from contnorm.bench.fingerprint import Match, compare_fingerprints, not_comparable
from contnorm.bench.local_imports import search_path, use_search_path
from contnorm.bench.records import Store
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.bench.streams.image_store import Pictures
from contnorm.bench.trust import only_trusted, trusted_files
from contnorm.bench.user_code import breaks_in, own_error
from contnorm.errors import RunBrokeError, UserError, usable

__all__ = ["Event", "Job", "Waiting", "Workplace", "execute", "resolve", "unfinished"]


POLL = 0.25  # seconds between two looks at runs that other processes hold


@dataclass(frozen=True)
class Waiting:
    """The run is held by another process, which is waited for."""

    holder: str


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    job: Job
    what: Progress | Finished | Stopped | Failed | Waiting | str  # a word: "recorded" where there was nothing to do
    path: Path


def execute(
    jobs: Sequence[Job],
    place: Workplace,
    stop: Callable[[], bool] = lambda: False,
    prepare: Callable[[str], object] = lambda name: None,
) -> Iterator[Event]:
    """Run the jobs that have no record yet, from their checkpoints where they have any, side by side.

    Several processes may do so in one folder: each run is made by one of them. A run that another process holds is left
    for last. Then it is waited for until it is recorded, or until it is free because its process ended, and made here.

    Args:
        jobs: What to run.
        place: Where.
        stop: Asked often; runs stop at the next step once it returns True.
        prepare: Called with the name of a data set before it is loaded, such as to decode it with a progress bar.
    """
    store = Store(place.runs)
    missing = []
    data = _DataCheck(place, prepare)
    try:
        for job in dict.fromkeys(jobs):
            with usable(place.runs, "it can't be looked into", "Say with --runs where else."):
                recorded = store.has(job.config, job.seed)
            if recorded:
                data.check(job, store)
                yield Event(job, "recorded", store.path(job.config, job.seed))
            else:
                missing.append(job)
        yield from _execute_all(missing, place, store, stop, prepare)
    except StopRequested:  # while data was read, and nothing of a run was done yet
        return
    except Exception as error:
        if isinstance(error, RunBrokeError) or not isinstance(error, UserError):
            for job in missing:  # it would break again: no note stays of runs that have nothing to go on from
                Unfinished.of(job, store).clear_if_untouched()
        raise


def _execute_all(
    jobs: Sequence[Job],
    place: Workplace,
    store: Store,
    stop: Callable[[], bool],
    prepare: Callable[[str], object],
) -> Iterator[Event]:
    """Run jobs; then wait for those that other processes hold, and run what these leave."""
    held: dict[Job, str] = {}  # with the holder that was announced
    while jobs or held:
        stopped = False
        for event in _execute(jobs, place, stop, prepare):
            if isinstance(event.what, Waiting):
                held[event.job] = ""
            else:
                stopped = stopped or isinstance(event.what, Stopped)
                yield event
        if stopped or (held and stop()):
            return
        events, jobs = _look_at(held, store)
        yield from events
        if held and not jobs:
            time.sleep(POLL)


def _look_at(held: dict[Job, str], store: Store) -> tuple[list[Event], list[Job]]:
    """What is new of runs that other processes hold, and which of them can be run here; both leave ``held``."""
    events, free = [], []
    for job in list(held):
        left = Unfinished.of(job, store)
        if left.record.is_file():
            left.clear_if_free()
            events.append(Event(job, "recorded", left.record))
            del held[job]
        elif left.claim.is_free():
            free.append(job)
            del held[job]
        elif held[job] != (holder := left.claim.holder()):
            held[job] = holder
            events.append(Event(job, Waiting(holder), left.record))
    return events, free


class _DataCheck:
    """Warns of records that were made with other data than is on disk now: they are not run again.

    Args:
        place: Where runs are made.
        prepare: Called with the name of a data set before it is loaded.
    """

    def __init__(self, place: Workplace, prepare: Callable[[str], object]) -> None:
        self.place, self.prepare = place, prepare
        self._fingerprints: dict[str, str | None] = {}

    def check(self, job: Job, store: Store) -> None:
        name, path = _source(job.config), store.path(job.config, job.seed)
        now = self._fingerprint(name)
        if now is None:
            return
        try:
            record = store.load(path)
        except UserError as error:  # one broken record must not stop the other runs
            logging.getLogger("contnorm").warning(str(error))
            return
        was, data = record.raw.get("source", {}).get("fingerprint"), f"{name} in {self.place.data_root}"
        if compare_fingerprints(was, now) is Match.DIFFERENT:
            logging.getLogger("contnorm").warning(
                f"{path}: is of other data than {data} (fingerprint {was}, now {now}), and is not run again. "
                f"Move it away, or use another --runs folder, to run it on these."
            )
        elif find_stored(name, self.place.data_root) and (why := not_comparable(was, now)):
            logging.getLogger("contnorm").warning(f"{path}: may be of other data than {data}: {why}.")

    def _fingerprint(self, name: str) -> str | None:
        """Fingerprint of a data set as it is on disk; None if it is not there, or cannot be used."""
        if name not in self._fingerprints:
            try:
                self._fingerprints[name] = self._load(name)
            except UserError:  # what is recorded can be shown without its data
                self._fingerprints[name] = None
        return self._fingerprints[name]

    def _load(self, name: str) -> str:
        folder = find_stored(name, self.place.data_root)
        if folder is not None:
            return str(read_manifest(folder)["fingerprint"])
        with raise_on_stop():
            self.prepare(name)
            return load_source(name, self.place.data_root, allow_missing=self.place.allow_missing).fingerprint


def _execute(
    jobs: Sequence[Job], place: Workplace, stop: Callable[[], bool], prepare: Callable[[str], object]
) -> Iterator[Event]:
    processes = min(place.lanes, len(jobs)) if place.device.type == "cpu" else 1
    if processes < 2:
        yield from _execute_here(jobs, place, stop, prepare)
        return
    plans: dict[str, Plans] = {}
    for config in {job.config: None for job in jobs}:  # what can't be run is told before a process is started
        name = _source(config)
        with raise_on_stop():
            if name not in plans:
                prepare(name)
                plans[name] = Plans(load_source(name, place.data_root, allow_missing=place.allow_missing))
            Lane(config, 0, plans[name].source, place.device, plans=plans[name])
    _note_begun(jobs, place, {name: held.source for name, held in plans.items()})
    code = _CodeAccess(trusted_files(), search_path())
    yield from side_by_side(_one_job, [(job, place, code) for job in jobs], processes, stop)


@dataclass(frozen=True)
class _CodeAccess:
    """What another process has to know to load user code as this one does."""

    trusted: frozenset[Path] | None
    search_path: tuple[str, ...]


def _one_job(job: tuple[Job, Workplace, _CodeAccess], stop: Callable[[], bool]) -> Iterator[Event]:
    this, place, code = job
    use_search_path(code.search_path)
    with only_trusted(code.trusted):
        yield from _execute_here([this], place, stop)


def _execute_here(
    jobs: Sequence[Job],
    place: Workplace,
    stop: Callable[[], bool],
    prepare: Callable[[str], object] = lambda name: None,
) -> Iterator[Event]:
    """Run jobs in this process, those together that can move together."""
    store = Store(place.runs)
    loaded: dict[str, _Shared] = {}
    noted: set[RunConfig] = set()
    for group in _groups(jobs, place, store):
        name = _source(group.jobs[0].config)
        if name not in loaded:
            with raise_on_stop():
                prepare(name)
            source = _loaded(name, place)
            loaded[name] = _Shared(source, Pictures.of(source, place.device, place.whole), Plans(source))
        new = {job.config for job in group.jobs} - noted
        noted |= new  # once, or a run that failed would be noted again
        stopped = False
        for event in _run(group, [job for job in jobs if job.config in new], loaded[name], place, store, stop):
            yield event
            stopped = stopped or isinstance(event.what, Stopped)
        if stopped:
            return


def _loaded(name: str, place: Workplace) -> Source:
    """A data set; a GPU, which takes its time to start, starts meanwhile."""
    with ThreadPoolExecutor(max_workers=1) as worker, raise_on_stop():  # only the main thread can be interrupted
        starting = worker.submit(lambda: torch.zeros(1, device=place.device))
        source = load_source(name, place.data_root, allow_missing=place.allow_missing)
        starting.result()
    return source


def _source(config: RunConfig) -> str:
    assert config.stream.source is not None  # filled in by `resolve`
    return config.stream.source


@dataclass(frozen=True)
class _Shared:
    """What the runs on one data set have in common."""

    source: Source
    pictures: Pictures
    plans: Plans


@dataclass(frozen=True)
class _Group:
    """Jobs that move together, and the steps that each of them has done."""

    jobs: list[Job]
    done: int


def _groups(jobs: Sequence[Job], place: Workplace, store: Store) -> Iterator[_Group]:
    """Jobs that can move together: of one stream and one batch size, at the same step, no more than there are lanes."""
    alike: dict[tuple[object, ...], list[Job]] = {}
    steps: dict[Job, int] = {}
    for job in jobs:
        steps[job] = Unfinished.of(job, store).checkpoints.latest_step()
        key = (job.config.stream, replace(job.config.train, lr=0.0), steps[job])
        alike.setdefault(key, []).append(job)
    together = place.lanes if place.device.type == "cuda" else 1
    for group in alike.values():
        for i in range(0, len(group), together):
            yield _Group(group[i : i + together], steps[group[0]])


def _run(
    group: _Group,
    to_note: Sequence[Job],
    shared: _Shared,
    place: Workplace,
    store: Store,
    stop: Callable[[], bool],
) -> Iterator[Event]:
    started = time.perf_counter()
    with ExitStack() as held, numerics(group.jobs[0].config.train, place.threads):
        lanes: dict[Lane, Job] = {}
        for job in group.jobs:
            why = edited(job.config)  # also while earlier ones were run
            if why:
                yield Event(job, Failed(why), store.path(job.config, job.seed))
                continue
            # Settings that can't be run fail here, before anything is written.
            with raise_on_stop():
                lane = Lane(job.config, job.seed, shared.source, place.device, shared.pictures, shared.plans)
            held.callback(lane.feed.close)
            lanes[lane] = job
        sources = {_source(job.config): shared.source for job in group.jobs}
        _note_begun([job for job in to_note if not edited(job.config)], place, sources)
        for lane, job in list(lanes.items()):
            refused = _claimed(job, group, place, store, held, shared.source)
            if refused is not None:
                del lanes[lane]
                yield Event(job, refused, store.path(job.config, job.seed))
        anew = {lane: job for lane, job in lanes.items() if _must_start_anew(lane, Unfinished.of(job, store))}
        for some in ({lane: job for lane, job in lanes.items() if lane not in anew}, anew):
            if some:  # lanes that move together are at the same step
                with _told(some, store):
                    yield from _learn(some, shared.source, place, store, stop, started)


def _note_begun(jobs: Sequence[Job], place: Workplace, sources: Mapping[str, Source]) -> None:
    """Leave a note of runs to come, so that `resume` knows of those too that did not come to their turn."""
    store = Store(place.runs)
    for job in jobs:
        left = Unfinished.of(job, store)
        if not left.note.is_file() and not left.record.is_file():
            left.write_note(job, place, sources[_source(job.config)].fingerprint)


def _claimed(
    job: Job, group: _Group, place: Workplace, store: Store, held: ExitStack, source: Source
) -> Failed | Waiting | str | None:
    """Take a run for this process; gives what to say of it where it is not to be run here, or not now."""
    left = Unfinished.of(job, store)
    if not left.take():
        return Waiting(left.claim.holder())
    held.callback(left.claim.give_back)
    if left.record.is_file():
        left.clear()
        return "recorded"
    if left.checkpoints.latest_step() != group.done:  # by a process that has ended: it has to be grouped anew
        left.claim.give_back()
        return Waiting("")
    otherwise = left.begun_otherwise(place, source.fingerprint)
    if otherwise:
        return Failed(otherwise)
    left.write_note(job, place, source.fingerprint)
    return None


def _must_start_anew(lane: Lane, left: Unfinished) -> bool:
    """Whether a run has a checkpoint that can't be used, since its code has other state now; it is then removed."""
    checkpoint = left.checkpoints.latest() if lane.fresh_code_state else None
    if checkpoint is None or can_resume(lane, checkpoint):
        return False
    logging.getLogger("contnorm").warning(
        f"{left.folder}: its checkpoint after {checkpoint.progress['done']} steps does not hold the state that its "
        f"strategy or network keeps in Python. The run starts again from step 0."
    )
    left.checkpoints.clear()
    return True


def _learn(
    lanes: dict[Lane, Job],
    source: Source,
    place: Workplace,
    store: Store,
    stop: Callable[[], bool],
    started: float,
) -> Iterator[Event]:
    lefts = {lane: Unfinished.of(job, store) for lane, job in lanes.items()}
    places = [left.checkpoints for left in lefts.values()]
    for lane, what in run_lanes(list(lanes), places, place.checkpoint_every, stop=stop):
        job, left = lanes[lane], lefts[lane]
        if isinstance(what, Finished):
            what.found["seconds"] |= {"together": time.perf_counter() - started, "lanes": len(lanes)}
            found = {**what.found, **_circumstances(job.config, source, place.device)}
            with usable(left.record, "the record can't be written", f"{GO_ON} then go on with `contnorm resume`."):
                if place.keep_weights:  # first: where the record is, the weights are
                    keep_weights(lane, left.record)
                store.save(job.config, job.seed, found)
        if isinstance(what, Finished | Failed):
            left.clear()
        yield Event(job, what, left.record)


GO_ON = "The last checkpoint stays: make room,"


@contextmanager
def _told(lanes: dict[Lane, Job], store: Store) -> Iterator[None]:
    """What breaks a run is told with what is left of it; where a file of a user's own broke it, in one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        lane, job = next(iter(lanes.items()))
        left = Unfinished.of(job, store)
        saved = left.checkpoints.latest_step()
        rest = f"{saved} steps of it are saved in {left.folder}" if saved else "nothing of it is kept"
        for what, name in (("strategy", job.config.strategy.name), ("model", job.config.model.name)):
            if breaks_in(error, name):
                when = f"after {lane.done} of {len(lane.plan.steps)} steps"
                raise RunBrokeError(f"{own_error(error, what, name, when)} ({rest})") from error
        error.add_note(f"seed {job.seed}, after {lane.done} of {len(lane.plan.steps)} steps; {rest}.")
        raise


def _circumstances(config: RunConfig, source: Source, device: torch.device) -> dict[str, Any]:
    """What a number depends on besides its settings."""
    return {
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
        "source": {"name": source.name, "fingerprint": source.fingerprint, **_part_of(source)},
        "commit": package_commit(),
    }


def _part_of(source: Source) -> dict[str, Any]:
    """How much of a published data set there was, and how it was split and decoded."""
    if not isinstance(source, MultiLabelSource):
        return dict(source.details)
    images = len(source.train_images) + len(source.test_images)
    return {"images": images, "published_images": source.published_images, "missing_images": source.missing_images}
