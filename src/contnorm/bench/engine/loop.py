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

from contnorm.bench.engine.checkpoint import CheckpointWriter, load_checkpoint
from contnorm.bench.engine.cuda_graph import stepper_for
from contnorm.bench.engine.evaluate import Measurements, evaluate_ahead, evaluate_task, run_results, task_scores
from contnorm.bench.engine.run import Event, Kind, Run
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.signals import StopRequested, raise_on_stop
from contnorm.bench.user_code import is_user_code
from contnorm.moments.reestimate import NonFiniteMomentsError

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
    on_cpu, ends = lanes[0].trainer.device.type == "cpu", lanes[0].trainer.plan.ends
    intervals = (every, REPORT_EVERY, log_every or every)
    lanes, last_save = list(lanes), time.monotonic()

    def interruptible() -> AbstractContextManager[None]:
        return raise_on_stop() if on_cpu else nullcontext()

    def is_save_due() -> bool:
        nonlocal last_save
        if not on_cpu and time.monotonic() - last_save < GPU_SAVE_SECONDS:
            return False
        last_save = time.monotonic()
        return True

    def drop(ended: Sequence[Event]) -> None:
        nonlocal stepper
        if ended:
            lanes[:] = [lane for lane in lanes if all(event.run is not lane.run for event in ended)]
            stepper = stepper_for([lane.trainer for lane in lanes]) if lanes else stepper

    yield from [lane.event("started") for lane in lanes]
    with CheckpointWriter() as writer:
        try:
            with interruptible():
                for lane in lanes:
                    evaluate_ahead(lane.trainer, lane.measured)
            stepper = stepper_for([lane.trainer for lane in lanes])
            for task in range(lanes[0].measured.tasks, len(ends)):
                if any([lane.trainer.start_task(task) for lane in lanes]):
                    stepper.reset()
                while lanes and (done := lanes[0].trainer.done) < ends[task]:
                    until = min(ends[task], *((done // interval + 1) * interval for interval in intervals))
                    started = time.perf_counter()
                    losses = stepper.advance(until - done, stop)
                    _add_train_time(lanes, task, (time.perf_counter() - started) / len(lanes))
                    events = [_report(lane, task, loss) for lane, loss in zip(lanes, losses, strict=True)]
                    yield from events
                    drop([event for event in events if event.is_end])
                    if stop():
                        raise StopRequested
                    if until % every == 0 and until < ends[task] and is_save_due():
                        for lane in lanes:
                            lane.save(writer)
                # The last loss of a task can't show weights or moments that are not finite.
                events = _nonfinite(lanes, task)
                if any([lane.trainer.end_task(task) for lane in lanes if all(e.run is not lane.run for e in events)]):
                    stepper.reset()
                    events = _nonfinite(lanes, task)
                yield from events
                drop(events)
                if on_cpu or (task + 1 < len(ends) and is_save_due()):
                    for lane in lanes:
                        lane.save(writer)
                events = []
                for lane in lanes:
                    with interruptible():
                        events.append(_evaluate(lane, task))
                yield from events
                drop([event for event in events if event.is_end])
                if stop() and task + 1 < len(ends):
                    raise StopRequested
        except StopRequested:
            for lane in lanes:
                lane.save(writer)
            yield from [lane.event("stopped", saved=lane.saved) for lane in lanes]
            return
    yield from [lane.event("finished", results=run_results(lane.trainer, lane.measured)) for lane in lanes]


def _report(lane: Lane, task: int, loss: float) -> Event:
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


def _add_train_time(lanes: Sequence[Lane], task: int, share: float) -> None:
    """Add the share of each run in the time of steps that were done together."""
    for lane in lanes:
        by_task = lane.measured.train_by_task
        by_task.extend([0.0] * (task + 1 - len(by_task)))
        by_task[task] += share
        lane.measured.seconds["train"] += share


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: allocated on a GPU, or of this process on a CPU; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
