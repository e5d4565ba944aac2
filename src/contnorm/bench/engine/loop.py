"""The online training loop: one pass over the stream, with an evaluation after each task.

The loop trains several runs (lanes) together and yields their events. It has no callbacks.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from contnorm.bench.components import is_user_code
from contnorm.bench.engine.checkpoint import CheckpointWriter, load_checkpoint
from contnorm.bench.engine.cuda_graph import GraphStepper
from contnorm.bench.engine.evaluate import Measurements, count_predictions, evaluate_task, run_results, task_scores
from contnorm.bench.engine.run import Event, EventKind, Run
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.moments.pooling import NonFiniteMomentsError

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

REPORT_EVERY = 20  # steps between progress reports; each copies the losses to the host and checks them
STOP_INTERVAL = 0.5  # seconds between two calls of ``stop``
GPU_SAVE_SECONDS = 10.0  # least time between checkpoints on a GPU, where short tasks take less than writing one


@dataclass(eq=False)
class Lane:
    """A run in progress.

    Attributes:
        run: The run.
        trainer: Its trainer.
        checkpoint: File of its checkpoint; None to save nothing.
        measured: What was measured so far.
        saved: Steps in its checkpoint.
        provenance: What its results depend on besides the settings.
    """

    run: Run
    trainer: Trainer
    checkpoint: Path | None = None
    measured: Measurements = field(default_factory=Measurements)
    saved: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int]:
        """Steps that are done, and tasks that are evaluated: a checkpoint may lie between the two of a task."""
        return self.trainer.done, self.measured.tasks

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        found = None if self.checkpoint is None else load_checkpoint(self.checkpoint)
        if found is not None:
            tensors, progress = found
            self.trainer.load(tensors, progress)
            self.measured, self.saved = Measurements(**progress["measured"]), self.trainer.done

    def event(self, kind: EventKind, **content: Any) -> Event:
        """Return an event of the run."""
        return Event(kind, self.run, self.trainer.done, len(self.trainer.plan.steps), **content)

    def diverged(self, what: str, task: int) -> Event:
        """Return the event of a divergence, with its most likely cause."""
        trainer, config = self.trainer, self.run.config
        why = f"seed {self.run.seed}: {what} at step {trainer.done} of {len(trainer.plan.steps)} (task {task})."
        why += f" Most likely the learning rate of {config.train.lr} is too high for norm {config.norm.name!r}"
        why += f", or the loss of strategy {config.strategy.name!r} is wrong" if trainer.has_user_strategy else ""
        if trainer.norm_hooks.losses:
            why += ", or an auxiliary_loss() of its layers is not finite"
        elif is_user_code(config.norm.name):
            why += ", or its layers return values that are not finite"
        return self.event("diverged", why=f"{why}.")


def train_lanes(
    lanes: Sequence[Lane], stop: Callable[[], bool] = lambda: False, every: int = 500, log_every: int | None = None
) -> Iterator[Event]:
    """Train runs with batches of the same shape, all at the same step, to the end of the stream.

    Args:
        lanes: The runs.
        stop: Returns True to request a stop. The runs are then saved and end. On a CPU, a signal interrupts an
            evaluation, which is repeated on resume.
        every: Steps between checkpoints. One is also written at the end of each task. On a GPU they are written if the
            last one is 10 seconds old, and none after the last task: repeating steps is faster than more writes.
        log_every: Steps after which a report is made as well, for loggers.
    """
    group, tasks = _Group(lanes), len(lanes[0].trainer.plan.ends)
    intervals = every, REPORT_EVERY, log_every or every
    yield from [lane.event("started", provenance=lane.provenance) for lane in lanes]
    with group.writer or nullcontext():
        try:
            for task in range(lanes[0].measured.tasks, tasks):
                group.start(task)
                end = lanes[0].trainer.plan.ends[task]
                while group.lanes and (done := group.lanes[0].trainer.done) < end:
                    until = min(end, *((done // interval + 1) * interval for interval in intervals))
                    yield from group.steps(task, until - done, stop)
                    if stop():
                        raise StopRequested
                    if until % every == 0 and until < end and group.is_save_due:
                        group.save()
                yield from group.end(task)
                if group.writer is not None and (group.on_cpu or (task + 1 < tasks and group.is_save_due)):
                    group.save()
                yield from group.evaluate(task)
                if stop() and task + 1 < tasks:
                    raise StopRequested
        except StopRequested:
            group.save()
            yield from [lane.event("stopped", saved=lane.saved) for lane in group.lanes]
            return
    yield from [lane.event("finished", results=run_results(lane.trainer, lane.measured)) for lane in group.lanes]


class _Group:
    """The lanes that are still trained, on a GPU in a CUDA graph. A lane is dropped by its last event."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes, self.on_cpu = list(lanes), lanes[0].trainer.device.type == "cpu"
        self.uses_graph = not self.on_cpu and lanes[0].run.config.train.graph == "on"
        self.graph = GraphStepper([lane.trainer for lane in lanes]) if self.uses_graph else None
        self.last_save = time.monotonic()
        self.writer = CheckpointWriter() if lanes[0].checkpoint is not None else None

    def start(self, task: int) -> None:
        """Evaluate before the first task if the settings say so, and call the hooks before a task."""
        for lane in self.lanes:
            trainer, measured = lane.trainer, lane.measured
            if trainer.config.evaluate.ahead and not measured.before and not trainer.data.sequence.multi_label:
                with raise_on_stop() if self.on_cpu else nullcontext():
                    measured.before = count_predictions(trainer, len(trainer.plan.ends))
        called = [lane.trainer.start_task(task) for lane in self.lanes if lane.trainer.has_task_hooks]
        if self.graph is not None and any(called):
            self.graph.reset()

    def steps(self, task: int, steps: int, stop: Callable[[], bool]) -> list[Event]:
        """Do some steps of a task."""
        started = last_check = time.perf_counter()
        losses: list[float | torch.Tensor] = [math.nan] * len(self.lanes)
        if self.graph is not None:  # steps are queued long before the device executes them: ``stop`` is called later
            losses = [*self.graph.advance(steps)]
        for _ in range(steps if self.graph is None else 0):
            for number, lane in enumerate(self.lanes):
                losses[number] = lane.trainer.step()
            if time.perf_counter() - last_check > STOP_INTERVAL:  # for slow steps only: the caller asks after fast ones
                last_check = time.perf_counter()
                if stop():
                    break
        losses = [float(loss) for loss in losses]
        share = (time.perf_counter() - started) / len(self.lanes)
        events = []
        for lane, loss in zip(self.lanes, losses, strict=True):
            lane.measured.seconds["train"] += share
            by_task = lane.measured.train_by_task
            by_task.extend([0.0] * (task + 1 - len(by_task)))
            by_task[task] += share
            if math.isfinite(loss):
                events.append(lane.event("steps", task=task, loss=loss))
            else:
                last = lane.trainer.plan.steps[lane.trainer.done - 1]
                events.append(lane.diverged(f"the loss is {loss}", last.task))
        return self._keep(events)

    def end(self, task: int) -> list[Event]:
        """Call the hooks after a task. Drops lanes with weights that are not finite, which the last loss can't show."""
        events = self._keep(self._nonfinite(task))
        called = [lane.trainer.end_task(task) for lane in self.lanes if lane.trainer.has_task_hooks]
        if any(called):
            if self.graph is not None:
                self.graph.reset()
            events += self._keep(self._nonfinite(task))
        return events

    def evaluate(self, task: int) -> list[Event]:
        """Evaluate the lanes after a task. On a CPU, a signal interrupts it; on a GPU it takes too little time.

        The last update before an evaluation can make weights very large without a loss that shows it, but the moments
        of the data show it.
        """
        events = []
        for lane in self.lanes:
            trainer, measured, started = lane.trainer, lane.measured, time.perf_counter()
            try:
                with raise_on_stop() if self.on_cpu else nullcontext():
                    evaluate_task(trainer, measured, task)
            except NonFiniteMomentsError as error:
                events.append(
                    lane.diverged(f"the moments of the training data at layer {error.layer!r} are not finite", task)
                )
                continue
            measured.seconds["evaluate"] += time.perf_counter() - started
            events.append(
                lane.event(
                    "task",
                    task=task,
                    scores=task_scores(trainer, measured, task),
                    last=task + 1 == len(trainer.plan.ends),
                    seconds=dict(measured.seconds),
                    peak_memory=peak_memory(trainer.device),
                )
            )
        return self._keep(events)

    @property
    def is_save_due(self) -> bool:
        """Whether the last checkpoints are old enough for new ones."""
        return self.on_cpu or time.monotonic() > self.last_save + GPU_SAVE_SECONDS

    def save(self) -> None:
        """Write checkpoints in the background, of the lanes that have steps which are not saved."""
        self.last_save = time.monotonic()
        for lane in self.lanes:
            trainer = lane.trainer
            if self.writer is not None and lane.checkpoint is not None and lane.saved < trainer.done:
                progress = {**trainer.progress(), "measured": vars(lane.measured)}
                self.writer.save(lane.checkpoint, trainer.state(), progress)
                lane.saved = trainer.done

    def _nonfinite(self, task: int) -> list[Event]:
        names = [(lane, lane.trainer.nonfinite_tensor()) for lane in self.lanes]
        return [lane.diverged(f"{name!r} is not finite", task) for lane, name in names if name is not None]

    def _keep(self, events: list[Event]) -> list[Event]:
        """Drop the lanes that have ended by some events, which are returned."""
        ended = [event.run for event in events if event.is_end]
        if ended:
            self.lanes = [lane for lane in self.lanes if all(lane.run is not run for run in ended)]
            if self.uses_graph and self.lanes:
                self.graph = GraphStepper([lane.trainer for lane in self.lanes])
        return events


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: allocated on a GPU, or of this process on a CPU; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
