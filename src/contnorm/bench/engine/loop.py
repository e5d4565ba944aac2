"""The online training loop: one pass over the stream, with an evaluation after each task.

The loop trains several trainers (runs in progress) together and yields the events of each. It has no callbacks: the
scheduler and the progress bars read the events.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from contnorm.bench.components import is_user_code
from contnorm.bench.engine.checkpoint import Checkpoints, CheckpointWriter
from contnorm.bench.engine.cuda_graph import Stepper, stepper_for
from contnorm.bench.engine.evaluate import (
    CorrectCounts,
    LabelRow,
    count_correct,
    count_labels,
)
from contnorm.bench.engine.events import (
    Diverged,
    Event,
    Failed,
    Finished,
    Started,
    Steps,
    Stopped,
    TaskDone,
    peak_memory,
)
from contnorm.bench.engine.measurements import Measurements, add_accuracy_row, add_label_row, run_results, task_scores
from contnorm.bench.engine.resume import resume_run
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.signals import StopRequested
from contnorm.errors import UserCodeError, UserError
from contnorm.moments.reestimate import NonFiniteMomentsError

__all__ = ["train_together"]

GPU_SAVE_SECONDS = 10.0  # least time between checkpoints on a GPU, where short tasks take less than writing one


@dataclass
class _Run:
    """A trainer with its checkpoints and measurements."""

    trainer: Trainer
    checkpoints: Checkpoints | None
    measured: Measurements
    saved: int = 0  # steps in the last checkpoint

    def save(self, saver: CheckpointWriter, required: bool = False) -> None:
        """Write a checkpoint."""
        if self.checkpoints is None:
            return
        progress = {**self.trainer.progress(), "tally": vars(self.measured)}
        saver.save(self.checkpoints, self.trainer.state(), progress, required)
        self.saved = self.trainer.done


def train_together(
    trainers: Sequence[Trainer],
    checkpoints: Sequence[Checkpoints | None] | None = None,
    every: int = 500,
    report_every: int = 20,
    stop: Callable[[], bool] = lambda: False,
    log_every: int | None = None,
) -> Iterator[tuple[Trainer, Event]]:
    """Train trainers with batches of the same shape over the stream, starting from their checkpoints.

    All checkpoints must be of the same step.

    Args:
        trainers: The runs.
        checkpoints: The checkpoints of each run; None to save nothing.
        every: Steps between checkpoints. One is also written at the end of each task. On a GPU they are written if the
            last one is 10 seconds old, and none after the last task: repeating steps is faster than more writes.
        report_every: Steps between progress reports. Each one copies the losses to the host and checks them.
        stop: Returns True to request a stop. Called at each report and checkpoint, between slow steps, and between the
            layers and batches of an evaluation. The runs are then saved and end; an interrupted evaluation is
            repeated on resume.
        log_every: Steps after which a report is made as well, for loggers.
    """
    intervals = (every, report_every, *(() if log_every is None else (log_every,)))
    if checkpoints is None:
        runs = [_Run(trainer, None, Measurements(), saved=trainer.done) for trainer in trainers]
        yield from _learn(runs, None, intervals, stop)
        return
    measurements = [resume_run(trainer, store) for trainer, store in zip(trainers, checkpoints, strict=True)]
    runs = [
        _Run(trainer, store, measured, saved=trainer.done)
        for trainer, store, measured in zip(trainers, checkpoints, measurements, strict=True)
    ]
    with CheckpointWriter() as saver:
        yield from _learn(runs, saver, intervals, stop)


def _learn(
    runs: list[_Run], saver: CheckpointWriter | None, intervals: tuple[int, ...], stop: Callable[[], bool]
) -> Iterator[tuple[Trainer, Event]]:
    ends, every = runs[0].trainer.plan.ends, intervals[0]
    yield from ((run.trainer, Started(run.trainer.done, len(run.trainer.plan.steps))) for run in runs)
    try:
        _evaluate_ahead(runs, stop)
    except StopRequested:
        yield from _stopped(runs, saver)
        return
    stepper, saves = stepper_for([run.trainer for run in runs]), _SaveTimer(runs[0].trainer.device)
    for task in range(min(run.measured.tasks for run in runs), len(ends)):
        _start_task(runs, task, stepper)
        _check_first_loss(runs, stepper, stop)
        while runs and runs[0].trainer.done < ends[task]:
            done = runs[0].trainer.done
            until = min(ends[task], *((done // interval + 1) * interval for interval in intervals))
            started = time.perf_counter()
            losses = stepper.advance(until - done, stop)
            _add_train_time(runs, task, started)
            verdicts = [_verdict(run.trainer, task, loss) for run, loss in zip(runs, losses, strict=True)]
            failed = [run for run, verdict in zip(runs, verdicts, strict=True) if isinstance(verdict, Failed)]
            _drop_checkpoints(failed, saver)
            yield from ((run.trainer, verdict) for run, verdict in zip(runs, verdicts, strict=True))
            if failed:
                stepper, runs = _without(failed, runs, stepper)
            if stop():
                yield from _stopped(runs, saver)
                return
            if until % every == 0 and until < ends[task] and saves.are_due():
                _save(runs, saver)
        _call_task_end(runs, task, stepper)
        try:
            diverged = yield from _end_task(runs, task, saver, stop, saves, last=task + 1 == len(ends))
        except StopRequested:  # the interrupted evaluation is repeated on resume
            yield from _stopped(runs, saver)
            return
        if diverged:
            stepper, runs = _without(diverged, runs, stepper)
    if saver is not None:
        saver.finish([run.checkpoints for run in runs if run.checkpoints is not None])
    yield from ((run.trainer, Finished(run_results(run.trainer, run.measured))) for run in runs)


def _start_task(runs: Sequence[_Run], task: int, stepper: Stepper) -> None:
    """Call the hooks before a task, of runs that have not started it."""
    called = [run.trainer.start_task(task) for run in runs if run.measured.tasks <= task]
    if any(called):
        stepper.reset()


def _call_task_end(runs: Sequence[_Run], task: int, stepper: Stepper) -> None:
    """Call the hooks after a task, of runs that are finite and have not been evaluated after it."""
    trainers = [run.trainer for run in runs if run.trainer.has_task_hooks and run.measured.tasks <= task]
    called = [trainer.end_task(task) for trainer in trainers if trainer.nonfinite_tensor() is None]
    if any(called):
        stepper.reset()


def _check_first_loss(runs: Sequence[_Run], stepper: Stepper, stop: Callable[[], bool]) -> None:
    """Do the first step of runs with a user's strategy, and raise an error if its loss is not finite.

    A loss that is not finite before any update is a mistake in the strategy, and no divergence to record.
    """
    if not runs or runs[0].trainer.done or not any(run.trainer.has_user_strategy for run in runs):
        return
    started = time.perf_counter()
    losses = stepper.advance(1, stop)
    _add_train_time(runs, 0, started)
    for run, loss in zip(runs, losses, strict=True):
        if not math.isfinite(loss) and run.trainer.has_user_strategy:
            raise UserCodeError(
                f"strategy {run.trainer.config.strategy.name!r}: its loss is {loss} at the first step, before any "
                f"update of the weights. Check its loss for divisions by zero and logarithms of zero."
            )


def _without(ended: Sequence[_Run], runs: Sequence[_Run], stepper: Stepper) -> tuple[Stepper, list[_Run]]:
    """Return the runs that continue, and a stepper for them."""
    continuing = [run for run in runs if all(run is not other for other in ended)]
    return stepper_for([run.trainer for run in continuing]) if continuing else stepper, continuing


def _stopped(runs: Sequence[_Run], saver: CheckpointWriter | None) -> Iterator[tuple[Trainer, Stopped]]:
    """Save all runs that have done at least one step, and yield `Stopped` for each run."""
    _save([run for run in runs if run.trainer.done], saver)
    if saver is not None:
        saver.flush()
    yield from ((run.trainer, Stopped(run.trainer.done, len(run.trainer.plan.steps), run.saved)) for run in runs)


def _end_task(
    runs: list[_Run],
    task: int,
    saver: CheckpointWriter | None,
    stop: Callable[[], bool],
    saves: _SaveTimer,
    last: bool,
) -> Generator[tuple[Trainer, Event], None, list[_Run]]:
    """Evaluate the runs, then save them. After the last task, save first: its evaluation is recorded right away.

    Yields the scores of the evaluated runs, and the diverged runs, which it returns.
    """
    if last and runs and runs[0].trainer.device.type == "cpu":  # on a GPU, repeating steps is faster than this write
        with suppress(UserError):  # a full disk may still have room for the record
            _save(runs, saver, required=True)
    diverged = _nonfinite(runs, task)
    finite = [run for run in runs if all(run is not other for other, _ in diverged)]
    # A run that resumed from a checkpoint written after this evaluation has the row already.
    to_evaluate = [run for run in finite if run.measured.tasks == task]
    diverged += _evaluate(to_evaluate, task, stop)
    ended = [run for run, _ in diverged]
    yield from ((run.trainer, _task_done(run, task)) for run in to_evaluate if all(run is not other for other in ended))
    if ended:
        _drop_checkpoints(ended, saver)
        yield from ((run.trainer, verdict) for run, verdict in diverged)
    if not last and saves.are_due():
        _save([run for run in runs if all(run is not other for other in ended)], saver, required=True)
    return ended


def _task_done(run: _Run, task: int) -> TaskDone:
    trainer, measured = run.trainer, run.measured
    ends, memory = trainer.plan.ends, peak_memory(trainer.device)
    scores = task_scores(trainer, measured, task)
    return TaskDone(task, ends, scores, dict(measured.seconds), memory, trainer.config, trainer.seed)


def _nonfinite(runs: Sequence[_Run], task: int) -> list[tuple[_Run, Diverged]]:
    """Return the runs with non-finite weights or running moments; the last loss of a task can't show them."""
    names = [(run, run.trainer.nonfinite_tensor()) for run in runs]
    return [
        (run, Diverged(_divergence_message(run.trainer, repr(name), task))) for run, name in names if name is not None
    ]


def _evaluate_ahead(runs: Sequence[_Run], stop: Callable[[], bool]) -> None:
    """Evaluate all tasks before the first is learned, if ``evaluate.ahead`` is set."""
    for run in runs:
        if run.trainer.config.evaluate.ahead and run.measured.before is None:
            (right,) = count_correct([run.trainer], [len(run.trainer.plan.ends)], stop)
            run.measured.before, run.measured.before_task = right


def _verdict(trainer: Trainer, task: int, loss: float) -> Steps | Failed:
    """Return the progress of a run, or its divergence if the loss of the last step is not finite."""
    steps = len(trainer.plan.steps)
    if math.isfinite(loss):
        return Steps(trainer.done, steps, task, loss)
    last_task = trainer.plan.steps[trainer.done - 1].task
    return Diverged(
        f"seed {trainer.seed}: the loss is {loss} at step {trainer.done} of {steps} (task {last_task}). "
        f"{_likely_cause(trainer)}"
    )


class _SaveTimer:
    """Whether checkpoints are due: always on a CPU; on a GPU if the last were due `GPU_SAVE_SECONDS` ago."""

    def __init__(self, device: torch.device) -> None:
        self.pause = GPU_SAVE_SECONDS if device.type == "cuda" else 0.0
        self._now = time.monotonic
        self.last = self._now()

    def are_due(self) -> bool:
        now = self._now()
        if now - self.last < self.pause:
            return False
        self.last = now
        return True


def _save(runs: Sequence[_Run], saver: CheckpointWriter | None, required: bool = False) -> None:
    if saver is not None:
        for run in runs:
            run.save(saver, required)


def _drop_checkpoints(runs: Sequence[_Run], saver: CheckpointWriter | None) -> None:
    """Drop the pending checkpoints of runs that have ended."""
    if saver is not None:
        saver.forget([run.checkpoints for run in runs if run.checkpoints is not None])


def _add_train_time(runs: Sequence[_Run], task: int, started: float) -> None:
    """Divide the elapsed time equally among runs that were trained together."""
    share = (time.perf_counter() - started) / len(runs)
    for run in runs:
        by_task = run.measured.train_by_task
        by_task.extend([0.0] * (task + 1 - len(by_task)))
        by_task[task] += share
        run.measured.seconds["train"] += share


def _evaluate(runs: Sequence[_Run], task: int, stop: Callable[[], bool]) -> list[tuple[_Run, Diverged]]:
    """Evaluate runs after a task, with running moments and, if configured, with others.

    Returns the runs that turn out to have diverged. The last update before an evaluation can make weights very large
    without a loss that shows it, but the moments of the data show it.
    """
    started = time.perf_counter()
    trainers = [run.trainer for run in runs]
    diverged = []
    if trainers and trainers[0].data.sequence.multi_label:
        rows: Sequence[LabelRow | CorrectCounts] = count_labels(trainers, task + 1, stop)
    else:
        tasks = [len(trainer.plan.ends) if trainer.config.evaluate.ahead else task + 1 for trainer in trainers]
        rows = count_correct(trainers, tasks, stop)
    for run, row in zip(runs, rows, strict=True):
        try:
            if isinstance(row, LabelRow):
                add_label_row(run.trainer, run.measured, task, row, stop)
            else:
                add_accuracy_row(run.trainer, run.measured, task, row, stop)
        except NonFiniteMomentsError as error:
            cause = f"the moments of the training data at layer {error.layer!r}"
            diverged.append((run, Diverged(_divergence_message(run.trainer, cause, task))))
    for run in runs:
        run.measured.seconds["evaluate"] += (time.perf_counter() - started) / len(runs)
    return diverged


def _divergence_message(trainer: Trainer, cause: str, task: int) -> str:
    return (
        f"seed {trainer.seed}: {cause}: not finite at step {trainer.done} of {len(trainer.plan.steps)} (after task "
        f"{task}). {_likely_cause(trainer)}"
    )


def _likely_cause(trainer: Trainer) -> str:
    config = trainer.config
    or_loss = f", or the loss of strategy {config.strategy.name!r} is wrong" if trainer.has_user_strategy else ""
    if trainer.norm_hooks.has_losses:
        or_loss += ", or an auxiliary_loss() of its layers is not finite"
    elif is_user_code(config.norm.name):
        or_loss += ", or its layers return values that are not finite"
    return f"Most likely the learning rate of {config.train.lr} is too high for norm {config.norm.name!r}{or_loss}."
