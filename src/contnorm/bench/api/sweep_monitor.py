"""Follows the runs of a sweep: collects their scores, and shows them in a live table or as lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from contnorm.bench.api.result import Result
from contnorm.bench.api.sweep_result import Trial
from contnorm.bench.comparison import scores_of
from contnorm.bench.components import is_user_code
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.config.sources import format_value
from contnorm.bench.engine.events import Diverged, Finished
from contnorm.bench.engine.job import Job
from contnorm.bench.engine.scheduler import Event
from contnorm.bench.escape import escape_terminal
from contnorm.bench.models import NETWORKS
from contnorm.bench.models.build import build_model
from contnorm.bench.records import Record, Store, make_record
from contnorm.errors import UserError

__all__ = ["SweepMonitor"]

_LINES_BELOW = 16  # lines of a terminal that are left for progress bars and messages
_FEWEST_ROWS = 5
_ANY_SHAPE = (3, 32, 32)  # of an image; whether a norm fits the channels of a network does not depend on it


def _check_networks(configs: Sequence[RunConfig]) -> None:
    """Build the networks of the package without data, so that a norm that does not fit is rejected before any run.

    The network of each run is checked again with its data when it starts.
    """
    for model, norm in dict.fromkeys((replace(config.model, weights=None), config.norm) for config in configs):
        if model.name in NETWORKS and not is_user_code(norm.name):
            with torch.device("meta"):
                build_model(model, norm, _ANY_SHAPE, outputs=2, total_steps=1)


class SweepMonitor:
    """A `RunMonitor` that enters the score of each run into the trials of a sweep.

    Args:
        score: Name of the score.
        lower_is_better: Whether the lowest score is the best.
        console: Terminal or notebook to print to; None for no output.
        runs: Folder of records; None if there is none.

    Attributes:
        trials: All settings so far.
        rule: Rule of choice to print when the first run starts; None for no line.
    """

    def __init__(self, score: str, lower_is_better: bool, console: Console | None, runs: Path | None) -> None:
        self.trials: list[Trial] = []
        self.rule: str | None = None
        self._score, self._lower_is_better = score, lower_is_better
        self._store = None if runs is None else Store(runs)
        self._of_config: dict[RunConfig, list[Trial]] = {}
        self._records: dict[RunConfig, dict[int, Record]] = {}
        self._next: Sequence[Trial] = ()
        widgets = console is not None and console.is_jupyter and find_spec("ipywidgets") is not None
        interactive = console is not None and (console.is_terminal or widgets)
        self._height = console.height if console is not None else 0
        self._shown = console
        self._line_console = None if interactive else console  # an interactive one shows the table instead of lines

    def add(self, trials: Sequence[Trial]) -> None:
        """Add the settings that are run next."""
        self._next = trials
        self.trials += trials

    def remove(self, trials: Sequence[Trial]) -> None:
        """Remove settings that can't be run."""
        self.trials[:] = [trial for trial in self.trials if not any(trial is other for other in trials)]
        for config, known in self._of_config.items():
            self._of_config[config] = [trial for trial in known if not any(trial is other for other in trials)]
        self._records = {config: records for config, records in self._records.items() if self._of_config[config]}

    def start(self, configs: Sequence[RunConfig]) -> None:
        """Get the settings of the trials that were added last; rejects norms that do not fit their network."""
        _check_networks(configs)
        for trial, config in zip(self._next, configs, strict=True):
            trial.config = config
            self._of_config.setdefault(config, []).append(trial)

    def label(self, job: Job) -> str:
        return escape_terminal(f"{self._of_config[job.config][0].describe()} seed {job.seed}")

    def update(self, event: Event) -> None:
        job, what = event.job, event.what
        if self._shown is not None and self.rule is not None:
            self._shown.print(Text(f"Rule: {self.rule}"), soft_wrap=not self._shown.is_terminal)
        self.rule = None
        if isinstance(what, Diverged):
            for trial in self._of_config[job.config]:
                trial.diverged[job.seed] = what.why
            self._print(f"{self.label(job)}: diverged; {self._progress()}")
        elif isinstance(what, Finished) or what == "recorded":
            record = self._record(event)
            self._records.setdefault(job.config, {})[job.seed] = record
            value = self._value(record)
            for trial in self._of_config[job.config]:
                trial.scores[job.seed] = value
            recorded = " (recorded before)" if what == "recorded" else ""
            self._print(f"{self.label(job)}: {self._score} {value:.2f}{recorded}; {self._progress()}")

    def fill_results(self) -> None:
        """Give each setting without a result that of its finished seeds, as after a stop."""
        for config, records in self._records.items():
            for trial in self._of_config[config]:
                if trial.result is None:
                    trial.result = Result(records.values(), diverged=trial.diverged)

    def _record(self, event: Event) -> Record:
        job = event.job
        if isinstance(event.what, Finished):
            return make_record(job.config, job.seed, event.what.results, event.path)
        assert self._store is not None  # without a folder nothing is recorded before
        return self._store.load_run(job.config, job.seed)

    def _value(self, record: Record) -> float:
        scores = scores_of(record)
        if self._score not in scores:
            raise UserError(
                f"score {self._score!r}: these runs do not measure it. Use one of {', '.join(scores)}, or set "
                f"evaluate.ahead=true for forward transfer."
            )
        return scores[self._score]

    def _progress(self) -> str:
        done = sum(len(trial.seeds) - trial.unfinished for trial in self.trials)
        return f"{done} of {sum(len(trial.seeds) for trial in self.trials)} runs done"

    def _print(self, line: str) -> None:
        if self._line_console is not None:
            self._line_console.print(Text(escape_terminal(line)), soft_wrap=True)

    def __rich__(self) -> RenderableType:
        """Return the table of scores so far; the best settings so far if the terminal is too low for all."""
        room = max(_FEWEST_ROWS, self._height - _LINES_BELOW)
        shown = self.trials
        if len(shown) > room:
            sign = 1 if self._lower_is_better else -1
            ranked = sorted(shown, key=lambda trial: (not trial.scores, sign * trial.mean if trial.scores else 0.0))
            shown = ranked[:room]
        heads = [*self.trials[0].setting, f"{self._score} so far", "seeds"]
        table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
        for trial in shown:
            done = f"{len(trial.scores)}/{len(trial.seeds)}"
            done += f", {len(trial.diverged)} diverged" if trial.diverged else ""
            cells = [*map(format_value, trial.setting.values()), trial.spread(), done]
            table.add_row(*(Text(escape_terminal(cell)) for cell in cells))
        if len(shown) == len(self.trials):
            return table
        return Group(table, Text(f"the best {len(shown)} of {len(self.trials)} settings so far"))
