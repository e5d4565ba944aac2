"""`sweep`: run all combinations of some settings, and choose the best setting of each norm."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from contnorm.bench.api.arguments import DEFAULT_NORM
from contnorm.bench.api.execution import RunInterrupted
from contnorm.bench.api.result import Result
from contnorm.bench.api.run import run_experiments
from contnorm.bench.api.stream import Stream, list_seeds, load_stream
from contnorm.bench.api.sweep_monitor import SweepMonitor
from contnorm.bench.api.sweep_result import SweepResult, Trial
from contnorm.bench.config.schema import flatten_settings
from contnorm.bench.config.sources import RUN_ARGUMENTS
from contnorm.bench.grid import expand_grid, is_grid, list_values
from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError, unknown

__all__ = ["HOLDOUT", "SweepGrid", "SweepInterrupted", "SweepSession", "check_score", "is_lower_better", "sweep"]

log = logging.getLogger("contnorm")

HOLDOUT = 0.2  # share of the training samples that replaces the test samples of a stream without validation tasks
_ARGUMENT_OF = {key: name for name, key in RUN_ARGUMENTS.items()}
_OWN_OPTIONS = ("stream", "experiments", "seeds", "runs", "progress", "monitor")


class SweepInterrupted(RunInterrupted):
    """A sweep was stopped by a signal, after saving what can be saved. The same call continues it.

    Attributes:
        signal: Number of the signal.
        result: The `SweepResult` of the runs that finished.

    Example:
        >>> issubclass(SweepInterrupted, RunInterrupted)
        True
    """

    def __init__(self, message: str, number: int, result: SweepResult) -> None:
        super().__init__(message, number)
        self.result = result


def sweep(
    stream: Stream | str,
    *,
    norm: Any = None,
    strategy: Any = None,
    model: Any = None,
    memory: Any = None,
    lr: Any = None,
    batch_size: Any = None,
    replay: Any = None,
    settings: Mapping[str, Any] | None = None,
    tag: str | None = None,
    seeds: int | Iterable[int] = 3,
    validation: bool = False,
    score: str | None = None,
    by: str | Sequence[str] = "norm",
    runs: str | Path | None = None,
    progress: bool | Console = False,
    **options: Any,
) -> SweepResult:
    """Run all combinations of some settings, and choose the best setting of each norm.

    A list, tuple, range or NumPy array as the value of an argument or of a setting is a grid. Runs of all settings
    share the lanes. With a folder ``runs``, recorded runs are not repeated, and after a stop the same call continues.

    Args:
        stream: A stream, or the name of one.
        norm, strategy, model, memory, lr, batch_size, replay: As in `run`, or lists of such values.
        settings: Further settings by dotted key; their values may be lists too. Settings of the stream may not.
        tag: As in `run`; not with a list of networks or strategies.
        seeds: Number of seeds of each setting, counted from 0, or the seeds.
        validation: Whether to train and measure on validation data: on the validation tasks of the stream where it
            reserves some, otherwise on a share of the training samples of each class (``stream.holdout``).
        score: Name of the score to choose by; by default ``"acc"``, or the first score of a multi-label stream. For
            forgetting (``"fm..."``) the lowest mean is the best.
        by: Names of the settings for each combination of which one setting is chosen.
        runs: Folder of records and checkpoints; None to keep the results in memory only.
        progress: Whether to show a live table of the scores so far; or the rich console to show it on.
        **options: Other arguments of `run_all` (``device``, ``devices``, ``lanes``, ``threads``, ``keep_weights``,
            ``on_task_done``), and settings by dotted key.

    Returns:
        The scores of all settings, and the best ones. A setting with a diverged seed is never chosen.

    Raises:
        UserError: If a list is empty, or a setting is unknown or invalid; nothing is run then.
        SweepInterrupted: After Ctrl-C, when the runs are saved.

    Example:
        >>> logging.getLogger("contnorm").setLevel("ERROR")  # the settings are chosen on the test samples
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> result = sweep(stream, norm=["bn", "gn"], lr=[0.01, 0.1], seeds=1, lanes=1)
        >>> len(result.trials), list(result.best), list(result.to_frame().columns[:3])
        (4, ['bn', 'gn'], ['norm', 'lr', 'mean'])
    """
    arguments = {
        "norm": norm,
        "strategy": strategy,
        "model": model,
        "memory": memory,
        "lr": lr,
        "batch_size": batch_size,
        "replay": replay,
    }
    grid = SweepGrid.of("sweep", arguments, settings, tag, options)
    names = (by,) if isinstance(by, str) else tuple(by)
    for name in names:
        if name not in ("norm", *grid.axes):
            raise unknown("setting in by:", name, ["norm", *(axis for axis in grid.axes if axis != "norm")])
    session = SweepSession(stream, grid, seeds, validation, score, runs, progress)
    session.result.by = names
    session.run(grid.trials(session.seeds))
    return session.finish()


MAX_SETTINGS = 10_000  # each is checked before the first run, and is a row of the table


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
    def of(
        cls,
        caller: str,
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any] | None,
        tag: str | None,
        options: Mapping[str, Any],
    ) -> SweepGrid:
        """Collect the grid from the arguments of `sweep` or `tune`."""
        execution, more = _split_options(caller, options)
        if not isinstance(settings, Mapping | None) or not all(isinstance(key, str) for key in settings or {}):
            raise UserError(
                f"settings={settings!r}: use a dictionary of settings by name, such as {{'train.lr': 0.1}}."
            )
        if not isinstance(tag, str | None):
            raise UserError(f"tag={tag!r}: use one name. A tag can't be swept; define the objects in a file instead.")
        values = {name: value for name, value in arguments.items() if value is not None}
        stream: dict[str, Any] = {}
        for key, value in [*flatten_settings(settings or {}).items(), *more.items()]:
            if key.startswith("stream."):
                stream[key.partition(".")[2]] = _single(key, value)
                continue
            name = _ARGUMENT_OF.get(key, key) if value is not None else key
            if name in values:
                raise UserError(f"{key} is given twice, with {values[name]!r} and {value!r}. Give it once.")
            values[name] = value
        lists = {name: list_values(name, value) for name, value in values.items()}
        count = math.prod(map(len, lists.values()))
        if count > MAX_SETTINGS:
            raise UserError(
                f"{caller}: the lists have {count:,} combinations, and at most {MAX_SETTINGS:,} can be run at once. "
                "Use fewer values, or several calls."
            )
        if tag is not None and any(len(lists.get(name, ())) > 1 for name in ("model", "strategy")):
            raise UserError(
                f"tag={tag!r} names one object, and a list of them is given. Define them in a file instead."
            )
        return cls(lists, tuple(name for name, value in values.items() if is_grid(value)), stream, tag, execution)

    def combinations(self, without: str | None = None) -> list[dict[str, Any]]:
        """Return all combinations of the values, norms first; optionally without those of one setting."""
        norms = {"norm": self.values["norm"]} if "norm" in self.values else {}
        return expand_grid({name: values for name, values in {**norms, **self.values}.items() if name != without})

    def trials(self, seeds: Sequence[int], combinations: Sequence[Mapping[str, Any]] | None = None) -> list[Trial]:
        """Return a trial for each combination of values; by default for all."""
        labels = {name: _labels(values) for name, values in self.values.items()}
        trials = []
        for values in self.combinations() if combinations is None else combinations:
            shown = ["norm", *(name for name in self.axes if name != "norm")]
            setting = {name: _shown(values[name], labels[name]) for name in shown if name in values}
            norm = {"norm": str(DEFAULT_NORM)} if "norm" not in values else {}
            trials.append(Trial({**norm, **setting}, self._arguments(values), tuple(seeds)))
        return trials

    def _arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `run` for one combination of values."""
        arguments = {name: value for name, value in values.items() if name in RUN_ARGUMENTS}
        settings = {key: value for key, value in values.items() if key not in RUN_ARGUMENTS}
        if settings:
            arguments["settings"] = settings
        return arguments if self.tag is None else {**arguments, "tag": self.tag}


def _split_options(caller: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into those of `run_all`, and settings by dotted key."""
    known = [name for name in inspect.signature(run_experiments).parameters if name not in _OWN_OPTIONS]
    execution, settings = {}, {}
    for name, value in options.items():
        if "." in name:
            settings[name] = value
        elif name in known:
            execution[name] = value
        else:
            raise unknown(f"argument of {caller}:", name, [*inspect.signature(sweep).parameters, *known])
    return execution, settings


def _single(key: str, value: Any) -> Any:
    if is_grid(value):
        raise UserError(
            f"{key}={value!r}: a list here would compare scores of different tasks. Sweep each stream on its own."
        )
    return value


class SweepSession:
    """Runs the trials of a sweep in one or several rounds.

    Args:
        stream: A stream, or the name of one.
        grid: The settings.
        seeds, validation, score, runs, progress: As in `sweep`.
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
        runs: str | Path | None,
        progress: bool | Console,
        tuned: str | None = None,
    ) -> None:
        if isinstance(stream, str):
            stream = load_stream(stream)
        if not isinstance(stream, Stream):
            raise UserError(
                f"stream is of type {type(stream).__name__}: use a name, or a stream of load_stream or "
                f"Stream.from_arrays. Sweep several streams one after the other."
            )
        self.seeds = list_seeds(seeds)
        self._stream, chosen_on = _stream_to_use(stream, grid.stream, validation)
        score = check_score(score, self._stream)
        lower = is_lower_better(score)
        self._runs, self._options = runs, dict(grid.options)
        self._console = progress if isinstance(progress, Console) else Console(stderr=True) if progress else None
        folder = None if runs is None else Path(runs).expanduser()
        self._monitor = SweepMonitor(score, lower, self._console, folder)
        self.result = SweepResult(
            self._monitor.trials,
            grid.axes,
            self._stream.name,
            score,
            tuple(self.seeds),
            chosen_on,
            _rule(score, lower, chosen_on, len(self.seeds), tuned or ("lr" if "lr" in grid.axes else None)),
            tuned=tuned,
            lower_is_better=lower,
        )

    def run(self, trials: Sequence[Trial]) -> None:
        """Run some settings; their scores are entered into the result. The rule of choice is printed before."""
        self._monitor.rule = None if self._monitor.trials else self.result.rule
        self._monitor.add(trials)
        try:
            results = run_experiments(
                self._stream,
                [trial.arguments for trial in trials],
                seeds=self.seeds,
                runs=self._runs,
                progress=self._console or False,
                monitor=self._monitor,
                **self._options,
            )
        except RunInterrupted as stopped:
            self._monitor.fill_results()
            raise SweepInterrupted(str(stopped), stopped.signal, self._with_warning()) from stopped
        except UserError:
            self._monitor.remove(trials)
            raise
        for trial, result in zip(trials, results, strict=True):
            trial.result = result if isinstance(result, Result) else None

    def finish(self) -> SweepResult:
        """Return the result, and log its warning."""
        result = self._with_warning()
        if result.warning:
            log.warning(result.warning)
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


TEST_SAMPLES = "test samples"


def _stream_to_use(stream: Stream, settings: Mapping[str, Any], validation: bool) -> tuple[Stream, str]:
    """Return the stream with its settings, on validation data if requested; and what settings are chosen on."""
    values = {**stream.settings, **settings}
    has_tasks = find_stream(values["name"]).validation > 0
    if validation and has_tasks:
        # The number of tasks is that of the test tasks. All validation tasks are used, and there are few.
        values = {key: value for key, value in values.items() if key != "tasks"} | {"part": "validate"}
    elif validation and not values.get("holdout"):
        values = {**values, "holdout": HOLDOUT}
    if values.get("part") == "validate":
        chosen_on = "validation tasks (stream.part=validate)"
    elif values.get("holdout"):
        chosen_on = f"held-out training samples (stream.holdout={values['holdout']:g})"
    else:
        chosen_on = TEST_SAMPLES
    if values == stream.settings:
        return stream, chosen_on
    source = stream.source if stream.root is None or stream.is_loaded else None
    return Stream(values, stream.root, source, stream.allow_missing), chosen_on


def is_lower_better(score: str) -> bool:
    """Whether the lowest value of a score is the best, as for forgetting."""
    return score.startswith("fm")


def check_score(score: str | None, stream: Stream) -> str:
    """Return the name of a score of a stream; by default the first one."""
    scores = list(LABEL_SCORES if stream._spec.kind == "multi-label" else SCORES)
    if score is not None and score not in scores:
        raise unknown("score", score, scores)
    return score or scores[0]


def _rule(score: str, lower: bool, chosen_on: str, seeds: int, ties: str | None) -> str:
    """Return the rule of choice in words; ``ties`` is the setting whose smallest value is chosen on ties."""
    over = "with one seed" if seeds == 1 else f"mean over {seeds} seeds"
    best = f"{'lowest' if lower else 'highest'} {score} on the {chosen_on}, {over}"
    first = "the first setting" if ties is None else f"the smallest {ties}"
    return f"{best}; a setting with a diverged seed is not chosen; on ties, {first}."


def _labels(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the values of a setting with what is shown for each: themselves, or a text for an object."""
    labels: list[tuple[Any, Any]] = []
    for value in values:
        label = value if isinstance(value, str | int | float | None) else _object_label(value)
        same = sum(label == other or str(other).startswith(f"{label} (") for _, other in labels)
        labels.append((value, f"{label} ({same + 1})" if same and not isinstance(label, float | int) else label))
    return labels


def _shown(value: Any, labels: Sequence[tuple[Any, Any]]) -> Any:
    return next((label for known, label in labels if known is value), value)


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
    shown = [
        f"{key.rpartition('.')[2]}={item}" for key, item in settings.items() if key not in names and item is not None
    ]
    return f"{named.__name__}({', '.join(shown)})"
