"""Progress of runs on a terminal or in a notebook, with rich."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from contnorm.bench.config.defaults import stream_name
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.events import Diverged, Failed, Finished, Started, Steps, Stopped, TaskDone
from contnorm.bench.engine.job import Job
from contnorm.bench.engine.run_dir import RunDir
from contnorm.bench.engine.scheduler import Event, Waiting
from contnorm.bench.escape import escape_terminal
from contnorm.bench.records import Store

__all__ = ["RunMonitor", "RunProgress"]


class RunMonitor(Protocol):
    """Follows the runs of several experiments, such as to show a table of their scores so far."""

    def start(self, configs: Sequence[RunConfig]) -> None:
        """Get the settings of each experiment, before anything is run."""

    def label(self, job: Job) -> str:
        """Return the name of a run on progress bars."""

    def update(self, event: Event) -> None:
        """Get an event of a run."""

    def __rich__(self) -> RenderableType:
        """Return what is shown above the progress bars."""


class _Bars(Progress):
    """Progress bars below the view of a monitor, if there is one; the view disappears at the end."""

    def __init__(self, *columns: Any, monitor: RunMonitor | None, **options: Any) -> None:
        self._monitor = monitor
        super().__init__(*columns, transient=monitor is not None, **options)

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._monitor is not None:
            yield self._monitor.__rich__()
        yield from super().get_renderables()


class RunProgress:
    """Shows progress bars, and prints a line for each event of a run.

    Args:
        jobs: The runs.
        console: The terminal or notebook to print to; None for no output.
        print_records: Whether to print the path of each record.
        resume_hint: A sentence that says how to continue after a stop.
        on_diverged: Called with each run that diverged, and the reason; such runs then are no failures.
        recorded: Whether the runs are recorded. If not, and there are no bars, a line is printed for each of them.
        monitor: Gets every event, names the runs, and is shown above the bars. It prints the lines of finished runs.
    """

    def __init__(
        self,
        jobs: list[Job],
        console: Console | None,
        print_records: bool,
        resume_hint: str,
        on_diverged: Callable[[Job, str], None] | None,
        recorded: bool = True,
        monitor: RunMonitor | None = None,
    ) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.console = console or Console(quiet=True)
        self.print_records, self.resume_hint, self.on_diverged = print_records, resume_hint, on_diverged
        self.monitor, self.label = monitor, _label
        if monitor is not None:
            self.print_records, self.label = False, monitor.label
        self.shown = console is not None
        # In a notebook, rich needs ipywidgets to update a bar.
        widgets = self.console.is_jupyter and find_spec("ipywidgets") is not None
        interactive = self.console.is_terminal or widgets
        hidden = not (self.shown and interactive)
        self.bars: Progress = _Bars(*columns, monitor=monitor, console=self.console, disable=hidden)
        self.print_finished = self.shown and not interactive and not recorded and monitor is None
        self.total_bar = self.bars.add_task("all runs", total=len(jobs), visible=len(jobs) > 1)
        self.total = f"{len(jobs)} runs"
        self.bar_of: dict[Job, TaskID] = {}
        self.waiting = dict.fromkeys(jobs)  # jobs that are neither recorded nor failed
        self.stopped: set[Job] = set()
        self.failures: list[str] = []

    def __enter__(self) -> RunProgress:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def print(self, text: str) -> None:
        self.console.print(Text(escape_terminal(text)), soft_wrap=True)

    def show_event(self, event: Event) -> None:
        job, what = event.job, event.what
        if self.monitor is not None:
            self.monitor.update(event)
        if isinstance(what, Started | TaskDone):
            return
        if isinstance(what, Steps):
            if not self.shown:
                return
            if job not in self.bar_of:
                self.bar_of[job] = self.bars.add_task(self.label(job), total=what.steps)
            self.bars.update(self.bar_of[job], completed=what.done)
        elif isinstance(what, Waiting):
            self.print(f"{self.label(job)}: waiting for {what.holder}, which is running it.")
        elif isinstance(what, Stopped):
            self.stopped.add(job)
            saved = "and saved" if what.saved in (None, what.done) else f"and {what.saved} of them are saved"
            self.print(
                f"{self.label(job)}: stopped after {what.done} of {what.steps} steps, {saved}. {self.resume_hint}"
            )
        else:
            self.waiting.pop(job, None)
            self._show_end(event)

    def _show_end(self, event: Event) -> None:
        self.bars.advance(self.total_bar)
        if event.job in self.bar_of:
            self.bars.update(self.bar_of[event.job], visible=False)
        if isinstance(event.what, Diverged) and self.on_diverged is not None:
            self.on_diverged(event.job, event.what.why)
        elif isinstance(event.what, Failed):
            self.failures.append(event.what.why)
        elif self.print_records:
            outcome = "recorded in" if isinstance(event.what, Finished) else "not run again; its record is"
            self.print(f"{self.label(event.job)}: {outcome} {event.path}")
        elif self.print_finished:
            self.print(f"{self.label(event.job)}: finished, {len(self.waiting)} of {self.total} to go")

    def show_waiting(self, store: Store | None, again: str) -> None:
        """Print how many runs were not started, and what to do: ``again`` if `resume` would not find them."""
        rest = [job for job in self.waiting if job not in self.stopped]
        noted = store is not None and all(RunDir.of(job, store).note.is_file() for job in rest)
        if rest:
            self.print(f"not started: {len(rest)} of {self.total}. {self.resume_hint if noted else again}")


def _label(job: Job) -> str:
    config = job.config
    return escape_terminal(f"{stream_name(config.stream)} {config.strategy.name} {config.norm.name} seed {job.seed}")
