"""Progress of runs on a terminal or in a notebook, with rich."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from contnorm.bench.config.defaults import changed, stream_name, varying
from contnorm.bench.config.sources import format_settings
from contnorm.bench.engine.run import Event, Run
from contnorm.bench.escape import escape_terminal


def is_interactive(console: Console | None) -> bool:
    """Whether progress bars can be updated: on a terminal, or in a notebook, where rich needs ipywidgets."""
    if console is None:
        return False
    return console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)


class RunProgress:
    """Shows progress bars, and prints a line for each run that ends.

    Args:
        runs: The runs.
        console: The terminal or notebook to print to; None for no output.
        quiet: Whether recorded runs get no line.
        hint: A sentence that says how to continue after a stop.

    Attributes:
        unfinished: Runs that are neither recorded nor failed.
    """

    def __init__(self, runs: Sequence[Run], console: Console | None, quiet: bool, hint: str) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        self.console, self.hint = console or Console(quiet=True), hint
        self._shown, interactive = console is not None, is_interactive(console)
        self._varying = varying(list(dict.fromkeys(run.config for run in runs))) - {"norm.name", "strategy.name"}
        self.bars = Progress(*columns, console=self.console, disable=not interactive)
        self._lines = self._shown and not quiet
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

    def _label(self, run: Run) -> str:
        """Name of a run: its stream, strategy and norm, and the settings in which the runs differ."""
        config = run.config
        own = format_settings(changed(config), self._varying)
        names = [stream_name(config.stream), config.strategy.name, config.norm.name, *([own] if own else [])]
        return escape_terminal(f"{' '.join(names)} seed {run.seed}")
