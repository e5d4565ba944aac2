"""`sweep`: run all combinations of some settings, and choose the best setting of each norm."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from contnorm.bench.api.arguments import DEFAULT_NORM, resolve_run
from contnorm.bench.api.execution import RunInterrupted
from contnorm.bench.api.progress import is_interactive
from contnorm.bench.api.result import Result
from contnorm.bench.api.run import find_stream, run, run_experiments
from contnorm.bench.api.stream import Stream, list_seeds
from contnorm.bench.api.sweep_result import SweepResult, Trial
from contnorm.bench.comparison import scores_of
from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.bench.config.sources import RUN_ARGUMENTS, format_value
from contnorm.bench.engine.run import Event, Run
from contnorm.bench.escape import escape_terminal
from contnorm.bench.grid import expand_grid, is_grid, list_values
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import SCORES
from contnorm.bench.records import Record, Store, make_record
from contnorm.bench.streams import tasks
from contnorm.errors import UserError, unknown

__all__ = ["HOLDOUT", "Sweep", "SweepGrid", "check_score", "sweep"]

HOLDOUT = 0.2  # share of the training samples that replaces the test samples of a stream without validation tasks
TEST_SAMPLES = "test samples"
MAX_SETTINGS = 10_000  # each is checked before the first run, and is a row of the table
_FEWEST_ROWS, _LINES_BELOW = 5, 16  # of a live table; lines of a terminal for progress bars and messages


def sweep(
    stream: Stream | str,
    *,
    settings: Mapping[str, Any] | None = None,
    tag: str | None = None,
    seeds: int | Iterable[int] = 3,
    validation: bool = False,
    score: str | None = None,
    by: str | Sequence[str] = "norm",
    **options: Any,
) -> SweepResult:
    """Run all combinations of some settings, and choose the best setting of each norm.

    A list, tuple, range or NumPy array as the value of an argument or of a setting is a grid. Runs of all settings
    share the lanes. With a folder ``runs``, recorded runs are not repeated, and after a stop the same call continues.

    Args:
        stream: A stream, or the name of one.
        settings: Further settings by dotted key; their values may be lists too. Settings of the stream may not.
        tag: As in `run`; not with a list of networks or strategies.
        seeds: Number of seeds of each setting, counted from 0, or the seeds.
        validation: Whether to train and measure on validation data: on the validation tasks of the stream where it
            reserves some, otherwise on a share of the training samples of each class (``stream.holdout``).
        score: Name of the score to choose by; by default ``"acc"``, or the first score of a multi-label stream. For
            forgetting (``"fm..."``) the lowest mean is the best.
        by: Names of the settings for each combination of which one setting is chosen.
        **options: Arguments of `run`: ``norm``, ``strategy``, ``model``, ``memory``, ``lr``, ``batch_size`` and
            ``replay``, which may be lists; ``runs``, ``device``, ``lanes``, ``progress`` and so on; and settings by
            dotted key.

    Returns:
        The scores of all settings, and the best ones. A setting with a diverged seed is never chosen.

    Raises:
        UserError: If a list is empty, or a setting is unknown or invalid; nothing is run then.
        RunInterrupted: After Ctrl-C, when the runs are saved; its ``result`` has those that finished.

    Example:
        >>> from contnorm.bench.api.stream import load_stream
        >>> logging.getLogger("contnorm").setLevel("ERROR")  # the settings are chosen on the test samples
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> result = sweep(stream, norm=["bn", "gn"], lr=[0.01, 0.1], seeds=1)
        >>> len(result.trials), list(result.best), list(result.to_frame().columns[:3])
        (4, ['bn', 'gn'], ['norm', 'lr', 'mean'])
    """
    grid = SweepGrid.of(settings, tag, options)
    names = (by,) if isinstance(by, str) else tuple(by)
    for name in names:
        if name not in ("norm", *grid.axes):
            raise unknown("setting in by:", name, ["norm", *(axis for axis in grid.axes if axis != "norm")])
    session = Sweep(stream, grid, seeds, validation, score)
    session.result.by = names
    session.run(grid.trials(session.seeds))
    return session.finish()


@dataclass(frozen=True)
class SweepGrid:
    """The settings of a sweep.

    Attributes:
        values: Values of each argument of `run` and of each setting by dotted key.
        axes: Names of those that were given as lists.
        stream: Settings of the stream.
        tag: Tag of a network or strategy.
        options: Arguments that control how runs are executed.
    """

    values: Mapping[str, list[Any]]
    axes: tuple[str, ...]
    stream: Mapping[str, Any]
    tag: str | None
    options: Mapping[str, Any]

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None, tag: str | None, arguments: Mapping[str, Any]) -> SweepGrid:
        """Collect the grid from the arguments of `sweep` or `tune`."""
        parameters = inspect.signature(run).parameters
        values: dict[str, Any] = {}
        stream: dict[str, Any] = {}
        options: dict[str, Any] = {}
        argument_of = {key: name for name, key in RUN_ARGUMENTS.items()}
        plain = [(key, value) for key, value in arguments.items() if "." not in key]
        dotted = [(key, value) for key, value in arguments.items() if "." in key]
        for key, value in [*plain, *flatten_settings(settings or {}).items(), *dotted]:
            name = argument_of.get(key, key)
            if key.startswith("stream."):
                if is_grid(value):
                    raise UserError(
                        f"{key}={value!r}: a list here would compare scores of different tasks. Sweep each stream on "
                        f"its own."
                    )
                stream[key.partition(".")[2]] = value
            elif name in values:
                raise UserError(f"{key} is given twice, with {values[name]!r} and {value!r}. Give it once.")
            elif name in RUN_ARGUMENTS or "." in key:
                values |= {} if value is None and name == key and name in RUN_ARGUMENTS else {name: value}
            elif key in parameters:
                options[key] = value
            else:
                raise unknown("argument", key, parameters)
        lists = {name: list_values(name, value) for name, value in values.items()}
        count = math.prod(map(len, lists.values()))
        if count > MAX_SETTINGS:
            raise UserError(f"the lists have {count:,} combinations, and at most {MAX_SETTINGS:,} can be run at once.")
        if tag is not None and any(len(lists.get(name, ())) > 1 for name in ("model", "strategy")):
            raise UserError(f"tag={tag!r} names one object, and a list of them is given. Define them in a file.")
        return cls(lists, tuple(name for name, value in values.items() if is_grid(value)), stream, tag, options)

    def combinations(self, without: str | None = None) -> list[dict[str, Any]]:
        """Return all combinations of the values, norms first; optionally without those of one setting."""
        norms = {"norm": self.values["norm"]} if "norm" in self.values else {}
        return expand_grid({name: values for name, values in {**norms, **self.values}.items() if name != without})

    def trials(self, seeds: Sequence[int], combinations: Sequence[Mapping[str, Any]] | None = None) -> list[Trial]:
        """Return a trial for each combination of values; by default for all."""
        labels = {name: _labels(values) for name, values in self.values.items()}
        trials = []
        for values in self.combinations() if combinations is None else combinations:
            setting = {"norm": str(DEFAULT_NORM)}
            for name in ("norm", *self.axes):
                if name in values:
                    known = (label for value, label in labels[name] if value is values[name])
                    setting[name] = next(known, values[name])
            arguments = {name: value for name, value in values.items() if name in RUN_ARGUMENTS}
            settings = {key: value for key, value in values.items() if key not in RUN_ARGUMENTS}
            arguments |= ({"settings": settings} if settings else {}) | ({} if self.tag is None else {"tag": self.tag})
            trials.append(Trial(setting, arguments, tuple(seeds)))
        return trials


class Sweep:
    """Runs the trials of a sweep in one or several rounds, and follows them: it is the `RunMonitor` of its runs.

    Args:
        stream: A stream, or the name of one.
        grid: The settings.
        seeds, validation, score: As in `sweep`.
        tuned: Name of the setting that `tune` searches; None for a sweep.

    Attributes:
        seeds: The seeds of each setting.
        result: The result so far.
    """

    def __init__(
        self,
        stream: Stream | str,
        grid: SweepGrid,
        seeds: int | Iterable[int],
        validation: bool,
        score: str | None,
        tuned: str | None = None,
    ) -> None:
        self.seeds = list_seeds(seeds)
        self._stream, chosen_on = _stream_to_use(find_stream(stream), grid.stream, validation)
        score = check_score(score, self._stream)
        progress, runs = grid.options.get("progress", False), grid.options.get("runs")
        self._console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
        self._options = {**grid.options, "progress": self._console or False}
        self._store = None if runs is None else Store(Path(runs).expanduser())
        self._of_config: dict[RunConfig, list[Trial]] = {}
        self._records: dict[RunConfig, dict[int, Record]] = {}
        self._is_announced = False  # whether the rule is printed
        lower = score.startswith("fm")
        over = "with one seed" if len(self.seeds) == 1 else f"mean over {len(self.seeds)} seeds"
        ties = tuned or ("lr" if "lr" in grid.axes else None)
        rule = (
            f"{'lowest' if lower else 'highest'} {score} on the {chosen_on}, {over}; a setting with a diverged seed is "
            f"not chosen; on ties, {'the first setting' if ties is None else f'the smallest {ties}'}."
        )
        self.result = SweepResult(
            [], grid.axes, self._stream.name, score, tuple(self.seeds), chosen_on, rule, tuned=tuned,
            lower_is_better=lower,
        )  # fmt: skip

    def run(self, trials: Sequence[Trial]) -> None:
        """Run some settings; their scores are entered into the result. The rule of choice is printed first."""
        recorded = self._store is not None
        experiments = [resolve_run(self._stream, trial.arguments, recorded) for trial in trials]
        for trial, one in zip(trials, experiments, strict=True):
            trial.config = one.config
            self._of_config.setdefault(one.config, []).append(trial)
        self.result.trials += trials
        try:
            results = run_experiments(self._stream, experiments, seeds=self.seeds, monitor=self, **self._options)
        except RunInterrupted as stopped:
            for config, records in self._records.items():
                for trial in self._of_config[config]:
                    trial.result = trial.result or Result(records.values(), diverged=trial.diverged)
            stopped.result = self._with_warning()
            raise
        except UserError:
            self.result.trials[:] = [one for one in self.result.trials if all(one is not trial for trial in trials)]
            raise
        for trial, result in zip(trials, results, strict=True):
            trial.result = result if isinstance(result, Result) else None

    def finish(self) -> SweepResult:
        """Return the result, and log its warning."""
        result = self._with_warning()
        if result.warning:
            logging.getLogger("contnorm").warning(result.warning)
        return result

    def _with_warning(self) -> SweepResult:
        result = self.result
        if result.chosen_on == TEST_SAMPLES and any(len(trials) > 1 for trials in result.groups.values()):
            result.warning = (
                "the best settings are chosen on the test samples that their scores are measured on, so these scores "
                "are too high. Choose them with validation=True (--validation), then run them on the test samples."
            )
        if any(trial.config is not None and trial.config.train.max_steps is not None for trial in result.trials):
            note = "train.max_steps is set: the scores are of the first steps only, and are not comparable."
            result.notes = [*(line for line in result.notes if line != note), note]
        return result

    def start(self, runs: Sequence[Run]) -> None:
        """Nothing to do: the experiments are known."""

    def label(self, run: Run) -> str:
        """Return the name of a run on progress bars."""
        return escape_terminal(f"{self._of_config[run.config][0].describe()} seed {run.seed}")

    def update(self, event: Event) -> None:
        """Enter the score of a finished run into its trials, and print a line where no live table is shown."""
        if self._console is not None and not self._is_announced:
            self._console.print(Text(f"Rule: {self.result.rule}"), soft_wrap=not self._console.is_terminal)
        self._is_announced = True
        run, trials = event.run, self._of_config[event.config]
        if event.kind == "diverged":
            for trial in trials:
                trial.diverged[run.seed] = event.why
            outcome = "diverged"
        elif event.kind in ("finished", "recorded"):
            if event.kind == "finished":
                record = make_record(run.config, run.seed, event.results, event.path)
            else:
                assert self._store is not None
                record = self._store.load_run(run.config, run.seed)
            self._records.setdefault(run.config, {})[run.seed] = record
            scores, name = scores_of(record), self.result.score
            if name not in scores:
                raise UserError(
                    f"score {name!r}: these runs do not measure it. Use one of {', '.join(scores)}, or set "
                    f"evaluate.ahead=true for forward transfer."
                )
            for trial in trials:
                trial.scores[run.seed] = scores[name]
            outcome = f"{name} {scores[name]:.2f}{' (recorded before)' if event.kind == 'recorded' else ''}"
        else:
            return
        if self._console is not None and not is_interactive(self._console):
            total = sum(len(trial.seeds) for trial in self.result.trials)
            done = total - sum(trial.unfinished for trial in self.result.trials)
            line = f"{self.label(run)}: {outcome}; {done} of {total} runs done"
            self._console.print(Text(escape_terminal(line)), soft_wrap=True)

    def __rich__(self) -> RenderableType:
        """Return the table of scores so far; the best settings so far if the terminal is too low for all."""
        trials = self.result.trials
        room = max(_FEWEST_ROWS, (self._console.height if self._console else 0) - _LINES_BELOW)
        shown = trials
        if len(shown) > room:
            sign = 1 if self.result.lower_is_better else -1
            shown = sorted(shown, key=lambda trial: (not trial.scores, sign * trial.mean if trial.scores else 0.0))[
                :room
            ]
        heads = [*trials[0].setting, f"{self.result.score} so far", "seeds"]
        table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
        for trial in shown:
            done = f"{len(trial.scores)}/{len(trial.seeds)}"
            done += f", {len(trial.diverged)} diverged" if trial.diverged else ""
            cells = [*map(format_value, trial.setting.values()), trial.spread(), done]
            table.add_row(*(Text(escape_terminal(cell)) for cell in cells))
        if len(shown) == len(trials):
            return table
        return Group(table, Text(f"the best {len(shown)} of {len(trials)} settings so far"))


def _stream_to_use(stream: Stream, settings: Mapping[str, Any], validation: bool) -> tuple[Stream, str]:
    """Return the stream with its settings, on validation data if requested; and what settings are chosen on."""
    values = {**stream.settings, **settings}
    if validation and tasks.find_stream(values["name"]).validation > 0:
        # The number of tasks is that of the test tasks. All validation tasks are used, and there are few.
        values = {key: value for key, value in values.items() if key != "tasks"} | {"part": "validate"}
    elif validation and not values.get("holdout"):
        values = {**values, "holdout": HOLDOUT}
    chosen_on = TEST_SAMPLES
    if values.get("part") == "validate":
        chosen_on = "validation tasks (stream.part=validate)"
    elif values.get("holdout"):
        chosen_on = f"held-out training samples (stream.holdout={values['holdout']:g})"
    if values == stream.settings:
        return stream, chosen_on
    source = stream.source if stream.root is None or stream.is_loaded else None
    return Stream(values, stream.root, source, stream.allow_missing), chosen_on


def check_score(score: str | None, stream: Stream) -> str:
    """Return the name of a score of a stream; by default the first one."""
    scores = list(LABEL_SCORES if stream._spec.kind == "multi-label" else SCORES)
    if score is not None and score not in scores:
        raise unknown("score", score, scores)
    return score or scores[0]


def _labels(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the values of a setting with what is shown for each: themselves, or a text for an object."""
    labels: list[tuple[Any, Any]] = []
    for value in values:
        label = value if isinstance(value, str | int | float | None) else _object_label(value)
        same = sum(label == other or str(other).startswith(f"{label} (") for _, other in labels)
        labels.append((value, f"{label} ({same + 1})" if same and not isinstance(label, float | int) else label))
    return labels


def _object_label(value: Any) -> str:
    """Return a short text for a network, strategy or memory that is passed as an object.

    Example:
        >>> from torch import nn
        >>> from contnorm.bench.memories import Ring
        >>> _object_label(Ring(50)), _object_label(_object_label), _object_label(nn.Identity())
        ('Ring(size=50, per=task)', '_object_label', 'Identity')
    """
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    settings = getattr(value, "overrides", None)  # of a strategy or memory
    if named is value or not isinstance(settings, Mapping):
        return str(named.__name__)
    names = ("strategy.name", "memory.kind")
    shown = [f"{key.rpartition('.')[2]}={v}" for key, v in settings.items() if key not in names and v is not None]
    return f"{named.__name__}({', '.join(shown)})"
