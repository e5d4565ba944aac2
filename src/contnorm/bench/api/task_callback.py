"""The callback of `run` after each task, and the exception that stops its runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from contnorm.bench.api.run_logs import restored_random_state
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.events import Failed, Finished, Started, Stopped, TaskDone
from contnorm.bench.engine.job import Job, RunEnvironment
from contnorm.bench.engine.run_dir import RunDir
from contnorm.bench.engine.scheduler import Event
from contnorm.bench.metrics.task_scores import rows_of
from contnorm.bench.records import Record
from contnorm.errors import UserError

__all__ = ["OnTaskDone", "StopRun", "TaskCallback"]

OnTaskDone = Callable[[TaskDone], object]

_calls = threading.local()  # ``open``: the callbacks that this thread is in, from the outside to the inside


class StopRun(Exception):  # noqa: N818 - a request, as StopIteration is
    """Raised by an ``on_task_done`` callback to stop the runs of its call, which then raises it.

    Any other exception stops the runs too. They are saved, and the same call continues them.

    Args:
        message: Reason of the stop.
        discard: Whether to remove what the call has written to the folder of runs instead of saving it: checkpoints,
            and the records of runs that finished in this call. Records of earlier calls stay.

    Attributes:
        discard: As the argument.

    Example:
        >>> from contnorm.bench.api.run import run
        >>> from contnorm.bench.api.stream import load_stream
        >>> def check(event):
        ...     if event.average < 101:
        ...         raise StopRun(f"{event.done} of {event.steps} steps")
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> run(stream, norm="bn", on_task_done=check)
        Traceback (most recent call last):
        contnorm.bench.api.task_callback.StopRun: 5 of 10 steps
    """

    discard = False

    def __init__(self, message: str = "", *, discard: bool = False) -> None:
        super().__init__(message)
        self.discard = discard


class TaskCallback:
    """Calls a function with the `TaskDone` events of runs. Its first exception requests a stop.

    ``bool()`` of this object is True after an exception. The runs are then stopped as after a signal, so that each
    launcher ends them the same way, and `raise_error` raises the exception.

    Args:
        call: The function; None to do nothing.
        jobs: The runs.
        environment: Environment of the runs.
    """

    def __init__(self, call: OnTaskDone | None, jobs: Sequence[Job], environment: RunEnvironment) -> None:
        if call is not None and not callable(call):
            raise UserError(f"on_task_done={call!r}: use a function of one argument, the bench.TaskDone.")
        self._call, self._environment = call, environment
        self._seeds: dict[str, tuple[int, ...]] = {}
        for job in jobs if call is not None else ():  # hashing is not free
            self._seeds[job.config.hash] = (*self._seeds.get(job.config.hash, ()), job.seed)
        self._jobs, self._started, self._running = list(jobs), set[Job](), set[Job]()
        self.error: BaseException | None = None
        for outer in getattr(_calls, "open", ()):
            outer._check_nested(jobs, environment)

    def __bool__(self) -> bool:
        return self.error is not None

    def handle(self, event: Event) -> None:
        """Call the function if a task was learned; once for each task of a run that is recorded already."""
        if self._call is None:
            return
        if isinstance(event.what, Started):
            self._started.add(event.job)
            self._running.add(event.job)
        elif isinstance(event.what, Finished | Stopped | Failed):
            self._running.discard(event.job)
        elif isinstance(event.what, TaskDone):
            self._notify([event.what])
        elif event.what == "recorded":
            with suppress(UserError):  # a damaged record is reported where it is read for the result
                self._notify(_recorded_tasks(self._environment.store.load_run(event.job.config, event.job.seed)))

    def _notify(self, events: Iterable[TaskDone]) -> None:
        assert self._call is not None
        for event in events:
            if self.error is not None:
                return
            try:
                with restored_random_state(), self._as_open():
                    self._call(replace(event, seeds=self._seeds[event.hash]))
            except BaseException as error:  # of any type: it is raised when the runs are saved
                if type(error) in (KeyboardInterrupt, GeneratorExit):  # such as the second Ctrl-C: end at once
                    raise
                self.error = error

    @contextmanager
    def _as_open(self) -> Iterator[None]:
        """Make the call known to runs that the function starts."""
        before: tuple[TaskCallback, ...] = getattr(_calls, "open", ())
        _calls.open = (*before, self)
        try:
            yield
        finally:
            _calls.open = before

    def _check_nested(self, jobs: Sequence[Job], environment: RunEnvironment) -> None:
        """Reject runs that the function starts and that this call executes: each would wait for the other."""
        ours, theirs = self._environment.runs, environment.runs
        if ours is None or theirs is None or ours.resolve() != theirs.resolve():
            return
        for job in self._running.intersection(jobs):
            if not self._environment.store.has(job.config, job.seed):
                raise UserError(
                    f"on_task_done: started run {job.config.hash}, seed {job.seed}, which the call that it follows is "
                    f"executing. Use other settings, or another folder for runs."
                )

    def raise_error(self) -> None:
        """Raise the exception of the function, if there is one; if it says so, after discarding the runs."""
        if self.error is None:
            return
        if isinstance(self.error, StopRun) and self.error.discard and self._environment.runs is not None:
            for job in self._jobs:
                run_dir = RunDir.of(job, self._environment.store)
                run_dir.clear_if_free()
                if job in self._started:
                    weights_path(run_dir.record).unlink(missing_ok=True)
                    run_dir.record.unlink(missing_ok=True)
                with suppress(OSError):
                    run_dir.record.parent.rmdir()
        raise self.error


def _recorded_tasks(record: Record) -> Iterator[TaskDone]:
    """Yield the events of a recorded run."""
    ends = record.task_ends
    for task, scores in enumerate(rows_of(record.counted)):
        yield TaskDone(task, ends, scores, {}, None, record.config, record.seed, recorded=True)
