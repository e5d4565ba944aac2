"""Progress of runs on a terminal or in a notebook, with rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from contnorm.bench.config.defaults import stream_name
from contnorm.bench.engine.run import Event, Run
from contnorm.bench.escape import escape_terminal

__all__ = ["RunMonitor", "RunProgress", "is_interactive"]


class RunMonitor(Protocol):
    """Follows the runs of several experiments, such as to show a table of their scores so far."""

    def start(self, runs: Sequence[Run]) -> None:
        """Get a run of each experiment, before anything is run."""

    def label(self, run: Run) -> str:
        """Return the name of a run on progress bars."""

    def update(self, event: Event) -> None:
        """Get an event of a run."""

    def __rich__(self) -> RenderableType:
        """Return what is shown above the progress bars."""


def is_interactive(console: Console | None) -> bool:
    """Whether progress bars can be updated: on a terminal, or in a notebook, where rich needs ipywidgets."""
    if console is None:
        return False
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


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
    """Shows progress bars, and prints a line for each run that ends.

    Args:
        runs: The runs.
        console: The terminal or notebook to print to; None for no output.
        monitor: Names the runs, and is shown above the bars. It prints the lines of finished runs itself.
        quiet: Whether recorded runs get no line.
        hint: A sentence that says how to continue after a stop.

    Attributes:
        unfinished: Runs that are neither recorded nor failed.
    """

    def __init__(
        self, runs: Sequence[Run], console: Console | None, monitor: RunMonitor | None, quiet: bool, hint: str
    ) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.console, self.hint = console or Console(quiet=True), hint
        self._shown, interactive = console is not None, is_interactive(console)
        self._label = _label if monitor is None else monitor.label
        self.bars: Progress = _Bars(*columns, monitor=monitor, console=self.console, disable=not interactive)
        self._lines = self._shown and monitor is None and not quiet
        self._total = self.bars.add_task("all runs", total=len(runs), visible=len(runs) > 1)
        self._bar_of: dict[Run, TaskID] = {}
        self.unfinished, self.count = dict.fromkeys(runs), len(runs)

    def __enter__(self) -> RunProgress:
        self.bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bars.stop()

    def print(self, text: str) -> None:
        """Print a line of text as it is."""
        self.console.print(Text(escape_terminal(text)), soft_wrap=True)

    def show(self, event: Event) -> None:
        """Show an event of a run."""
        run = event.run
        if event.kind == "steps" and self._shown:
            if run not in self._bar_of:
                self._bar_of[run] = self.bars.add_task(self._label(run), total=event.steps)
            self.bars.update(self._bar_of[run], completed=event.done)
        elif event.kind == "waiting":
            self.print(f"{self._label(run)}: waiting for {event.why}, which is running it.")
        elif event.kind == "stopped":
            self.print(f"{self._label(run)}: stopped after {event.done} of {event.steps} steps. {self.hint}")
        elif event.is_end:
            self.unfinished.pop(run, None)
            self.bars.advance(self._total)
            if run in self._bar_of:
                self.bars.update(self._bar_of[run], visible=False)
            if self._lines and event.kind == "recorded":
                self.print(f"{self._label(run)}: not run again; its record is {event.path}")
            elif self._lines and event.kind == "finished" and event.path is not None:
                self.print(f"{self._label(run)}: recorded in {event.path}")
            elif self._lines and event.kind == "finished" and not is_interactive(self.console):
                self.print(f"{self._label(run)}: finished, {len(self.unfinished)} of {self.count} runs to go")


def _label(run: Run) -> str:
    config = run.config
    return escape_terminal(f"{stream_name(config.stream)} {config.strategy.name} {config.norm.name} seed {run.seed}")
