"""Execution of runs: from a list of them to records. Several processes may work on one folder of runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from contnorm.atomic_files import write_atomically
from contnorm.bench.components import Component, components_of, has_user_frame, share_components, user_code_error
from contnorm.bench.cost import CostModel
from contnorm.bench.engine.checkpoint import RunFolder, pack_weights, weights_path
from contnorm.bench.engine.launch import Processes
from contnorm.bench.engine.loop import Lane, train_lanes
from contnorm.bench.engine.provenance import numerics, provenance
from contnorm.bench.engine.run import Event, Launcher, Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import PlanCache
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.bench.streams.device import DeviceImages
from contnorm.bench.unfinished import UNFINISHED_SUFFIX, is_locked, read_progress
from contnorm.errors import UserCodeError, UserError, usable

HELD_INTERVAL = 0.25  # seconds between two checks of runs that other processes execute
START_SECONDS = 10.0  # start of two worker processes; shorter runs are executed in this process


def execute(
    runs: Sequence[Run],
    options: RunOptions,
    stop: Callable[[], bool] = lambda: False,
    prepare: Callable[[str], object] | None = None,
) -> Iterator[Event]:
    """Train every run that has no record, several at a time, and resume those that have checkpoints.

    Several processes may call this on the same folder; each run is executed by one of them. This function waits until
    runs that another process executes are recorded, or executes them if their process has ended.

    Args:
        runs: The runs.
        options: How they are executed.
        stop: Called often; once it returns True, runs stop at the next step and are saved.
        prepare: Called with the name of a data set before it is loaded, such as to decode it with a progress bar.
    """
    todo, held = [], list[Run]()
    for run in dict.fromkeys(runs):
        event = None if options.runs is None else _recorded(run, options)
        if event is None:
            todo.append(run)
        else:
            yield event
    components = [part for config in dict.fromkeys(run.config for run in todo) for part in components_of(config)]
    work = Work(options, prepare, list(dict.fromkeys(components)))
    while todo or held:
        launcher, ended = options.launcher, set[Run]()
        assert launcher is None or isinstance(launcher, Launcher)
        groups: Sequence[Sequence[Run]] = [[run] for run in todo]
        try:
            if len(todo) > 1 or launcher is not None:
                seconds = estimate_seconds(work, todo)
                launcher = launcher or processes_that_pay(options, seconds)
                check_settings(work, todo, launcher)
                groups = plan_groups(seconds, options, None if launcher is None else launcher.workers())
            here = (work(group, stop) for group in groups if not stop())
            for event in chain.from_iterable(here) if launcher is None else launcher.launch(work, groups, stop):
                if event.kind == "waiting":
                    held.append(event.run)
                elif event.is_end:
                    ended.add(event.run)
                yield event
        except StopRequested:  # while data was loaded, before any run has started
            return
        if stop():
            return
        if lost := set(todo) - ended - set(held):
            raise UserError(f"the launcher returned without the end of {len(lost)} of {len(todo)} runs.")
        locks = {run: options.store.path(run.config, run.seed).with_suffix(UNFINISHED_SUFFIX) for run in held}
        todo = [run for run in held if not is_locked(locks[run])]
        held = [run for run in held if run not in todo]
        if held and not todo:
            time.sleep(HELD_INTERVAL)


def _recorded(run: Run, options: RunOptions) -> Event | None:
    """Return the event of a run that has a record; None if it has none."""
    store = options.store
    path = store.path(run.config, run.seed)
    with usable(store.root, "it can't be read", "Use another folder for runs (--runs)."):
        if store.has(run.config, run.seed):
            return Event("recorded", run, path=path)
        divergence = store.divergence(run.config, run.seed)
    if divergence is None:
        store.check_writable()
        return None
    reason = divergence.reason or f"seed {run.seed}: the run diverged."
    why = f"{reason} It is recorded in {divergence.path}; delete that to run it again."
    return Event("diverged", run, why=why, path=path)


def estimate_seconds(work: Work, runs: Iterable[Run]) -> dict[Run, float]:
    """Return the estimated seconds of runs."""
    costs = CostModel(work.options.runs, work.options.torch_device.type)
    return {run: costs.seconds(run.config, len(work.load(run.source).source.train_images)) for run in runs}


def processes_that_pay(options: RunOptions, seconds: Mapping[Run, float]) -> Launcher | None:
    """Return the launcher of several GPUs, or of processes on the cores where they save time; None for this process."""
    processes = min(options.lane_count, len(seconds))
    if isinstance(options.devices, tuple) and len(options.devices) > 1:
        return Processes(len(options.devices), options.devices)
    if options.on_gpu or processes < 2:
        return None
    saved = sum(seconds.values()) * (1 - 1 / processes)
    return Processes(processes) if saved > START_SECONDS and os.name == "posix" else None


def check_settings(work: Work, runs: Sequence[Run], launcher: Launcher | None) -> None:
    """Build the trainer of one run of each experiment, so that invalid settings fail before the first run starts.

    It is built on the CPU, since the GPUs may be those of workers. The learning rate changes nothing that is checked.
    """
    distinct = {replace(run.config, train=replace(run.config.train, lr=1.0)): run for run in runs}
    if len(distinct) == 1 and launcher is None:  # checked by its own trainer
        return
    for run in distinct.values():
        plans = work.load(run.source)
        Trainer(run.config, 0, plans.source, torch.device("cpu"), plans=plans)


def group_runs(runs: Iterable[Run], size: int) -> list[tuple[Run, ...]]:
    """Group runs that can share a CUDA graph: of the same stream and training settings, except for the learning rate.

    Args:
        runs: The runs.
        size: Largest number of runs of a group.
    """
    by_key: dict[object, list[Run]] = {}
    for run in runs:
        by_key.setdefault((run.config.stream, replace(run.config.train, lr=1.0)), []).append(run)
    return [tuple(group[i : i + size]) for group in by_key.values() for i in range(0, len(group), size)]


def plan_groups(seconds: Mapping[Run, float], options: RunOptions, workers: int | None = None) -> list[tuple[Run, ...]]:
    """Return the groups of runs that one worker executes together, longest first: the lanes of a GPU, or one run.

    Args:
        seconds: The runs with their estimated seconds.
        options: How they are executed.
        workers: Number of groups that are executed at a time, each of which gets some; None if it is unknown.
    """
    size = options.lane_count if options.on_gpu else 1
    groups = group_runs(seconds, min(size, -(-len(seconds) // workers)) if workers else size)
    return sorted(groups, key=lambda group: -sum(seconds[run] for run in group))


@dataclass
class Work:
    """Executes groups of runs in this process, or in another one to which it is sent. Data is loaded once per process.

    Attributes:
        options: How runs are executed.
        prepare: Called with the name of a data set before it is loaded in this process.
        components: Components of the runs that are registered or passed in this process.
    """

    options: RunOptions
    prepare: Callable[[str], object] | None = None
    components: Sequence[Component] = ()
    _plans: dict[str, PlanCache] = field(default_factory=dict, init=False)
    _images: dict[str, DeviceImages] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        options = replace(self.options, launcher=None)
        return {**vars(self), "options": options, "prepare": None, "_plans": {}, "_images": {}}

    def load(self, name: str) -> PlanCache:
        """Load a data set, with the plans of its runs. A signal interrupts it with `StopRequested`."""
        with raise_on_stop():
            if name not in self._plans:
                if self.prepare is not None:
                    self.prepare(name)
                self._plans[name] = PlanCache(self.options.load(name))
            return self._plans[name]

    def __call__(self, group: Sequence[Run], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute the runs of a group together; yields their events.

        Args:
            group: The runs.
            stop: Called often; once it returns True, the runs stop at the next step and are saved.
        """
        if self.components:
            share_components(self.components)
        options, device, started = self.options, self.options.torch_device, time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(nullcontext() if device.index is None else torch.cuda.device(device))
            stack.enter_context(numerics(group[0].config.train, options.threads))
            plans = self.load(group[0].source)
            opened = [self._open(run, plans, stack) for run in group]
            yield from (event for event in opened if isinstance(event, Event))
            lanes = [lane for lane in opened if isinstance(lane, Lane)]
            # Runs that stopped at the same step, and have been evaluated on the same tasks, continue together.
            for progress in sorted({lane.progress for lane in lanes}):
                together = [lane for lane in lanes if lane.progress == progress]
                try:
                    for event in train_lanes(together, stop, options.checkpoint_every, options.log_every):
                        yield self._record(event, together, started)
                except (Exception, SystemExit) as error:
                    _add_progress(error, together[0])
                    raise

    def _open(self, run: Run, plans: PlanCache, stack: ExitStack) -> Lane | Event:
        """Lock a run and build its trainer, which continues from the checkpoint; both are closed with the stack.

        Returns:
            The run in progress; or its event, if it is not executed here.
        """
        options, device, checkpoint = self.options, self.options.torch_device, None
        if options.runs is not None:
            folder = RunFolder(options.store.path(run.config, run.seed))
            if not folder.acquire():
                return Event("waiting", run, why=folder.holder(), path=folder.record)
            stack.callback(folder.release)
            if (event := _recorded(run, options)) is not None:  # another process has recorded it since the call began
                return event
            if why := folder.start(run, options, plans.source):
                return Event("failed", run, why=why, path=folder.record)
            checkpoint = folder.checkpoint
        if run.source not in self._images:
            self._images[run.source] = DeviceImages.of(plans.source, device, options.whole)
        images = self._images[run.source]
        trainer = Trainer(
            run.config, run.seed, plans.source, device, images, plans, memory_moments=options.memory_moments
        )
        stack.callback(trainer.feed.close)
        lane = Lane(run, trainer, checkpoint)
        if checkpoint is not None:
            lane.resume()
        lane.provenance = provenance(run, plans.source, device, trainer.convolutions)
        return lane

    def _record(self, event: Event, lanes: Sequence[Lane], started: float) -> Event:
        """Record the end of a run; returns its event with the path of the record and what is in it."""
        options, run = self.options, event.run
        if options.runs is not None:
            event = replace(event, path=options.store.path(run.config, run.seed))
        if event.kind not in ("diverged", "finished"):
            return event
        lane = next(lane for lane in lanes if lane.run is run)
        if event.kind == "diverged":
            if event.path is not None:
                options.store.save_diverged(run.config, run.seed, event.why, lane.provenance)
            return event
        seconds = {**event.results["seconds"], "together": time.perf_counter() - started, "lanes": len(lanes)}
        results = {**event.results, "seconds": seconds, **lane.provenance}
        weights = pack_weights(lane.trainer.model) if options.keep_weights else None
        if event.path is None:
            return replace(event, results=results, weights=weights)
        if weights is not None:  # before the record: every record then has its weights
            write_atomically(weights_path(event.path), weights)
        options.store.save(run.config, run.seed, results)
        return replace(event, results=results)


def _add_progress(error: BaseException, lane: Lane) -> None:
    """Add the seed and the step to an error of training; one of user code becomes a `UserCodeError` of one line."""
    if isinstance(error, UserError):
        return
    trainer, path = lane.trainer, lane.checkpoint  # the last write of the checkpoint may have failed
    saved = f"{read_progress(path)['done'] if path is not None and path.is_file() else 0} steps are saved"
    when = f"after {trainer.done} of {len(trainer.plan.steps)} steps"
    if isinstance(error.__cause__, StopIteration):  # Python replaces it where it leaves the loop
        error = error.__cause__
    if trainer.user_code is not None and has_user_frame(error):
        raise UserCodeError(f"{user_code_error(error, str(trainer.user_code), when)} ({saved})") from error
    error.add_note(f"seed {lane.run.seed}, {when}; {saved}.")
