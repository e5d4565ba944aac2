"""Execution of runs: from a list of them to records. Several processes may work on one folder of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from contnorm.atomic_files import write_atomically
from contnorm.bench.components import Component, components_of, has_user_frame, share_components, user_code_error
from contnorm.bench.cost import CostModel, recorded_timings
from contnorm.bench.data.dataset import Source
from contnorm.bench.engine.checkpoint import RunFolder, pack_weights, weights_path
from contnorm.bench.engine.launch import Launcher, Processes, ThisProcess
from contnorm.bench.engine.loop import Lane, train_lanes
from contnorm.bench.engine.provenance import current_device, numerics, provenance
from contnorm.bench.engine.run import Event, Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import PlanCache
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.bench.streams.device import DeviceImages
from contnorm.bench.unfinished import ENDING, is_locked
from contnorm.errors import UserCodeError, UserError, usable

__all__ = ["Work", "execute", "group_runs", "plan_groups"]

POLL = 0.25  # seconds between two checks of runs that other processes execute
START_SECONDS = 10.0  # of two worker processes: shorter runs are executed in this one


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
    work = Work.of(todo, options, prepare)
    while todo or held:
        ended = set()
        try:
            for event in _launch(work, todo, stop) if todo else ():
                ended |= {event.run} if event.is_end or event.kind == "waiting" else set()
                held += [event.run] if event.kind == "waiting" else []
                yield event
        except StopRequested:  # while data was loaded, before any run has started
            return
        if stop():
            return
        if len(ended) < len(todo):
            raise UserError(f"the launcher returned without the end of {len(todo) - len(ended)} of {len(todo)} runs.")
        locks = {run: options.store.path(run.config, run.seed).with_suffix(ENDING) for run in held}
        todo = [run for run in held if not is_locked(locks[run])]
        held = [run for run in held if run not in todo]
        if held and not todo:
            time.sleep(POLL)


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


def _launch(work: Work, runs: Sequence[Run], stop: Callable[[], bool]) -> Iterator[Event]:
    """Execute runs with the launcher of the options; by default in processes of this machine where they pay."""
    options = work.options
    launcher, devices = options.launcher, options.devices if isinstance(options.devices, tuple) else ()
    if launcher is None and len(runs) == 1:
        yield from work(runs, stop)
        return
    costs = CostModel(recorded_timings(options.runs), options.torch_device.type)
    if launcher is None:
        launcher, processes = ThisProcess(), min(options.lane_count, len(runs))
        if len(devices) > 1:
            launcher = Processes(len(devices), devices)
        elif not options.on_gpu and processes > 1:
            with raise_on_stop():
                samples = {name: len(work.load(name).source.train_images) for name in {run.source for run in runs}}
            seconds = sum(costs.seconds(run.config, samples=samples[run.source]) for run in runs)
            if seconds * (1 - 1 / processes) > START_SECONDS:
                launcher = Processes(processes)
    assert isinstance(launcher, Launcher)
    groups = plan_groups(runs, options, launcher.workers(), costs)
    # One run for each experiment; the learning rate changes nothing that is checked.
    distinct = {replace(run.config, train=replace(run.config.train, lr=1.0)): run for run in runs}
    if len(distinct) > 1 or not isinstance(launcher, ThisProcess):
        work.check(distinct.values())
    yield from launcher.launch(work, groups, stop)


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


def plan_groups(
    runs: Sequence[Run], options: RunOptions, workers: int | None = None, costs: CostModel | None = None
) -> list[tuple[Run, ...]]:
    """Return the groups of runs that one worker executes together, longest first: the lanes of a GPU, or one run.

    Args:
        runs: The runs.
        options: How they are executed.
        workers: Number of groups that are executed at a time, each of which gets some; None if it is unknown.
        costs: Estimates of the seconds of runs; by default those of the records in the folder of runs.
    """
    costs = costs or CostModel(recorded_timings(options.runs), options.torch_device.type)
    size = options.lane_count if options.on_gpu else 1
    groups = group_runs(runs, min(size, -(-len(runs) // workers)) if workers else size)
    return sorted(groups, key=lambda group: -costs.group_seconds([run.config for run in group]))


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

    def __post_init__(self) -> None:
        self._plans: dict[str, PlanCache] = {}
        self._images: dict[str, DeviceImages] = {}

    @classmethod
    def of(cls, runs: Sequence[Run], options: RunOptions, prepare: Callable[[str], object] | None = None) -> Work:
        """Return the work of some runs, with the components of this process that their settings name."""
        configs = dict.fromkeys(run.config for run in runs)
        return cls(options, prepare, list(dict.fromkeys(part for config in configs for part in components_of(config))))

    def __getstate__(self) -> dict[str, Any]:
        options = replace(self.options, launcher=None)
        return {**vars(self), "options": options, "prepare": None, "_plans": {}, "_images": {}}

    def __call__(self, group: Sequence[Run], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute the runs of a group together; yields their events.

        Args:
            group: The runs.
            stop: Called often; once it returns True, the runs stop at the next step and are saved.
        """
        share_components(self.components)
        options, device = self.options, self.options.torch_device
        with ExitStack() as stack:
            stack.enter_context(current_device(device))
            stack.enter_context(numerics(group[0].config.train, options.threads))
            started, lanes = time.perf_counter(), list[Lane]()
            try:
                with raise_on_stop():
                    plans = self.load(group[0].source)
                    if group[0].source not in self._images:
                        self._images[group[0].source] = DeviceImages.of(plans.source, device, options.whole)
            except StopRequested:  # before any run has started
                return
            for run in group:
                folder = None if options.runs is None else RunFolder(options.store.path(run.config, run.seed))
                if folder is not None:
                    if not folder.acquire():
                        yield Event("waiting", run, why=folder.holder(), path=folder.record)
                        continue
                    stack.callback(folder.release)
                    event = _recorded(run, options)
                    if event is None and (why := folder.start(run, options, plans.source)):
                        event = Event("failed", run, why=why, path=folder.record)
                    if event is not None:
                        yield event
                        continue
                pictures, beside = self._images[run.source], options.memory_moments
                trainer = Trainer(run.config, run.seed, plans.source, device, pictures, plans, memory_moments=beside)
                stack.callback(trainer.feed.close)
                lanes.append(Lane(run, trainer, None if folder is None else folder.checkpoint))
                lanes[-1].resume()
            for done in sorted({lane.trainer.done for lane in lanes}):
                together = [lane for lane in lanes if lane.trainer.done == done]
                yield from self._train(together, plans.source, started, stop)

    def _train(
        self, lanes: Sequence[Lane], source: Source, started: float, stop: Callable[[], bool]
    ) -> Iterator[Event]:
        """Train runs that are at the same step, and record the results."""
        options, of_run = self.options, {id(lane.run): lane for lane in lanes}
        with _error_context(lanes):
            for event in train_lanes(lanes, stop, options.checkpoint_every, options.log_every):
                run, trainer = event.run, of_run[id(event.run)].trainer
                if options.runs is not None:
                    event = replace(event, path=options.store.path(run.config, run.seed))
                if event.kind in ("started", "diverged", "finished"):
                    origin = provenance(run, source, trainer.device, trainer.convolutions)
                if event.kind == "started":
                    event = replace(event, provenance=origin)
                elif event.kind == "diverged" and event.path is not None:
                    options.store.save_diverged(run.config, run.seed, event.why, origin)
                elif event.kind == "finished":
                    seconds = {"together": time.perf_counter() - started, "lanes": len(lanes)}
                    results = {**event.results, "seconds": {**event.results["seconds"], **seconds}, **origin}
                    weights = pack_weights(trainer.model) if options.keep_weights else None
                    if event.path is None:
                        event = replace(event, results=results, weights=weights)
                    else:
                        if weights is not None:  # before the record: every record then has its weights
                            write_atomically(weights_path(event.path), weights)
                        options.store.save(run.config, run.seed, results)
                        event = replace(event, results=results)
                yield event

    def load(self, name: str) -> PlanCache:
        """Load a data set, with the plans of its runs."""
        if name not in self._plans:
            if self.prepare is not None:
                self.prepare(name)
            self._plans[name] = PlanCache(self.options.load(name))
        return self._plans[name]

    def check(self, runs: Iterable[Run]) -> None:
        """Build the trainer of every experiment, so that invalid settings fail before the first run starts.

        They are built on the CPU, since the GPUs may be those of workers.
        """
        for run in runs:
            with raise_on_stop():
                plans = self.load(run.source)
            Trainer(run.config, 0, plans.source, torch.device("cpu"), plans=plans)


@contextmanager
def _error_context(lanes: Sequence[Lane]) -> Iterator[None]:
    """Say in an error which run failed and how many of its steps are saved; errors of user code become one line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error.__cause__, StopIteration):  # Python replaces it where it leaves the training loop
            error = error.__cause__
        run, trainer = lanes[0].run, lanes[0].trainer
        when = f"after {trainer.done} of {len(trainer.plan.steps)} steps"
        saved = f"{lanes[0].saved} steps are saved"
        if trainer.has_user_code and has_user_frame(error):
            raise UserCodeError(f"{user_code_error(error, str(trainer.user_code), when)} ({saved})") from error
        error.add_note(f"seed {run.seed}, {when}; {saved}.")
        raise
