"""The online training loop: one pass over the stream, with an evaluation after each task.

The loop trains several runs (lanes) together and yields their events. It has no callbacks.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from contnorm.bench.components import is_user_code
from contnorm.bench.engine.checkpoint import CheckpointWriter, load_checkpoint
from contnorm.bench.engine.cuda_graph import stepper_for
from contnorm.bench.engine.evaluate import Measurements, evaluate_ahead, evaluate_task, run_results, task_scores
from contnorm.bench.engine.run import Event, Kind, Run
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.moments.pooling import NonFiniteMomentsError

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

__all__ = ["Lane", "peak_memory", "train_lanes"]

REPORT_EVERY = 20  # steps between progress reports; each copies the losses to the host and checks them
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
    """

    run: Run
    trainer: Trainer
    checkpoint: Path | None = None
    measured: Measurements = field(default_factory=Measurements)
    saved: int = 0

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        found = None if self.checkpoint is None else load_checkpoint(self.checkpoint)
        if found is not None:
            tensors, progress = found
            self.trainer.load(tensors, progress)
            self.measured, self.saved = Measurements(**progress["measured"]), self.trainer.done

    def save(self, writer: CheckpointWriter) -> None:
        """Write a checkpoint in the background, unless all steps are saved."""
        if self.checkpoint is not None and self.saved < self.trainer.done:
            progress = {**self.trainer.progress(), "measured": vars(self.measured)}
            writer.save(self.checkpoint, self.trainer.state(), progress)
            self.saved = self.trainer.done

    def add_train_time(self, task: int, seconds: float) -> None:
        """Add the seconds of steps of a task."""
        by_task = self.measured.train_by_task
        by_task.extend([0.0] * (task + 1 - len(by_task)))
        by_task[task] += seconds
        self.measured.seconds["train"] += seconds

    def event(self, kind: Kind, **content: Any) -> Event:
        """Return an event of the run."""
        return Event(kind, self.run, self.trainer.done, len(self.trainer.plan.steps), **content)

    def diverged(self, what: str, task: int) -> Event:
        """Return the event of a divergence, with its most likely cause."""
        trainer, config = self.trainer, self.run.config
        why = f"seed {self.run.seed}: {what} at step {trainer.done} of {len(trainer.plan.steps)} (task {task})."
        why += f" Most likely the learning rate of {config.train.lr} is too high for norm {config.norm.name!r}"
        why += f", or the loss of strategy {config.strategy.name!r} is wrong" if trainer.has_user_strategy else ""
        if trainer.norm_hooks.has_losses:
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
    group, tasks = _Group(lanes, stop, every, log_every), len(lanes[0].trainer.plan.ends)
    yield from [lane.event("started") for lane in lanes]
    with group.writer:
        try:
            with group.interruptible():
                for lane in lanes:
                    evaluate_ahead(lane.trainer, lane.measured)
            for task in range(lanes[0].measured.tasks, tasks):
                yield from group.learn(task)
                yield from group.end_task(task)
                if stop() and task + 1 < tasks:
                    raise StopRequested
        except StopRequested:
            group.save()
            yield from [lane.event("stopped", saved=lane.saved) for lane in group.lanes]
            return
    yield from [lane.event("finished", results=run_results(lane.trainer, lane.measured)) for lane in group.lanes]


class _Group:
    """The lanes that are still trained, and their stepper."""

    def __init__(self, lanes: Sequence[Lane], stop: Callable[[], bool], every: int, log_every: int | None) -> None:
        self.lanes, self.stop, self.every = list(lanes), stop, every
        self.intervals = (every, REPORT_EVERY, log_every or every)
        self.on_cpu, self.plan = lanes[0].trainer.device.type == "cpu", lanes[0].trainer.plan
        self.stepper = stepper_for([lane.trainer for lane in lanes])
        self.writer, self.last_save = CheckpointWriter(), time.monotonic()

    def interruptible(self) -> AbstractContextManager[None]:
        """Let a signal interrupt an evaluation; on a GPU it takes less time than the interruption would."""
        return raise_on_stop() if self.on_cpu else nullcontext()

    def save(self) -> None:
        """Write a checkpoint of each lane."""
        self.last_save = time.monotonic()
        for lane in self.lanes:
            lane.save(self.writer)

    @property
    def is_save_due(self) -> bool:
        """Whether the last checkpoints are old enough for new ones."""
        return self.on_cpu or time.monotonic() > self.last_save + GPU_SAVE_SECONDS

    def learn(self, task: int) -> Iterator[Event]:
        """Do the steps of a task; yields the progress of the lanes, and drops those that diverge."""
        called = [lane.trainer.start_task(task) for lane in self.lanes]
        if any(called):
            self.stepper.reset()
        end = self.plan.ends[task]
        while self.lanes and (done := self.lanes[0].trainer.done) < end:
            until = min(end, *((done // interval + 1) * interval for interval in self.intervals))
            started = time.perf_counter()
            losses = self.stepper.advance(until - done, self.stop)
            share = (time.perf_counter() - started) / len(self.lanes)
            for lane in self.lanes:
                lane.add_train_time(task, share)
            yield from self._without_ended([_report(*lane, task) for lane in zip(self.lanes, losses, strict=True)])
            if self.stop():
                raise StopRequested
            if until % self.every == 0 and until < end and self.is_save_due:
                self.save()

    def end_task(self, task: int) -> Iterator[Event]:
        """Call the hooks after a task, save the lanes, then evaluate them; yields the scores."""
        yield from self._without_ended(_nonfinite(self.lanes, task))  # which the last loss can't show
        called = [lane.trainer.end_task(task) for lane in self.lanes]
        if any(called):
            self.stepper.reset()
            yield from self._without_ended(_nonfinite(self.lanes, task))
        if self.on_cpu or (task + 1 < len(self.plan.ends) and self.is_save_due):
            self.save()
        events = []
        for lane in self.lanes:
            with self.interruptible():
                events.append(_evaluate(lane, task))
        yield from self._without_ended(events)

    def _without_ended(self, events: Sequence[Event]) -> Sequence[Event]:
        """Drop the lanes that have ended by some events, which are returned."""
        ended = [event.run for event in events if event.is_end]
        if ended:
            self.lanes = [lane for lane in self.lanes if all(lane.run is not run for run in ended)]
            self.stepper = stepper_for([lane.trainer for lane in self.lanes]) if self.lanes else self.stepper
        return events


def _report(lane: Lane, loss: float, task: int) -> Event:
    """Return the progress of a run, or its divergence if the loss of the last step is not finite."""
    if math.isfinite(loss):
        return lane.event("steps", task=task, loss=loss)
    return lane.diverged(f"the loss is {loss}", lane.trainer.plan.steps[lane.trainer.done - 1].task)


def _nonfinite(lanes: Sequence[Lane], task: int) -> list[Event]:
    """Return the divergence of runs with weights or running moments that are not finite."""
    names = [(lane, lane.trainer.nonfinite_tensor()) for lane in lanes]
    return [lane.diverged(f"{name!r} is not finite", task) for lane, name in names if name is not None]


def _evaluate(lane: Lane, task: int) -> Event:
    """Evaluate a run after a task; returns its scores, or its divergence.

    The last update before an evaluation can make weights very large without a loss that shows it, but the moments of
    the data show it.
    """
    trainer, measured, started = lane.trainer, lane.measured, time.perf_counter()
    try:
        evaluate_task(trainer, measured, task)
    except NonFiniteMomentsError as error:
        return lane.diverged(f"the moments of the training data at layer {error.layer!r} are not finite", task)
    measured.seconds["evaluate"] += time.perf_counter() - started
    return lane.event(
        "task",
        task=task,
        scores=task_scores(trainer, measured, task),
        last=task + 1 == len(trainer.plan.ends),
        seconds=dict(measured.seconds),
        memory=peak_memory(trainer.device),
    )


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: allocated on a GPU, or of this process on a CPU; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
