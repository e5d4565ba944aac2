"""`sweep`: run all combinations of some settings, and choose the best one of each norm; `tune`: a sweep in rounds."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contnorm.bench.api.arguments import DEFAULT_NORM, as_stream, check_score, resolve_run
from contnorm.bench.api.progress import RunInterrupted
from contnorm.bench.api.result import Result
from contnorm.bench.api.run import run_experiments
from contnorm.bench.api.stream import Stream
from contnorm.bench.config.defaults import run_names
from contnorm.bench.config.schema import RUN_ARGUMENTS, RunConfig, flatten_settings, format_value
from contnorm.bench.figures import COLORS, MARKERS, with_png
from contnorm.bench.grid import LEARNING_RATES, LineSearch, Refine, best_candidate
from contnorm.bench.records import Store, spread_over_seeds
from contnorm.bench.rng import list_seeds
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserCodeError, UserError, unknown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

HOLDOUT = 0.2  # share of the training samples that replaces the test samples of a stream without validation tasks
TEST_SAMPLES = "test samples"
MAX_SETTINGS = 10_000  # each is checked before the first run, and is a row of the table
_Values = dict[str, list[tuple[Any, Any]]]  # by name of a setting: what is shown for each value, and the value


@dataclass
class Trial:
    """One setting of a sweep, with the scores of its seeds.

    Attributes:
        setting: Value of each setting that the sweep varies, and of the norm, as it is shown; by name.
        arguments: Arguments of `bench.run` that repeat it.
        seeds: The seeds that it is run with.
        config: The resolved settings; None until the sweep starts.
        scores: Score of each finished seed.
        diverged: Reason of each diverged seed.
        result: Result of the finished seeds; None if there is none.

    Example:
        >>> trial = Trial({"norm": "cn", "lr": 0.03}, {"norm": "cn", "lr": 0.03}, (0, 1, 2), scores={0: 61.0, 1: 63.0})
        >>> trial.mean, trial.unfinished, trial.describe()
        (62.0, 1, 'cn lr=0.03')
    """

    setting: Mapping[str, Any]
    arguments: Mapping[str, Any]
    seeds: tuple[int, ...]
    config: RunConfig | None = None
    scores: dict[int, float] = field(default_factory=dict)
    diverged: dict[int, str] = field(default_factory=dict)
    result: Result | None = field(default=None, repr=False)

    @property
    def mean(self) -> float:
        """Mean score over the finished seeds; NaN if there is none."""
        return spread_over_seeds(list(self.scores.values()))[0] if self.scores else math.nan

    @property
    def std(self) -> float:
        """Standard deviation over the finished seeds; NaN for fewer than two."""
        return spread_over_seeds(list(self.scores.values()))[1] if self.scores else math.nan

    @property
    def unfinished(self) -> int:
        """Number of seeds that neither finished nor diverged."""
        return len(self.seeds) - len(self.scores) - len(self.diverged)

    @property
    def eligible(self) -> bool:
        """Whether it can be chosen: all seeds finished, and none diverged."""
        return len(self.scores) == len(self.seeds)

    def describe(self) -> str:
        """Return the settings in one line."""
        rest = [f"{name}={format_value(value)}" for name, value in self.setting.items() if name != "norm"]
        return " ".join([str(self.setting["norm"]), *rest])


@dataclass(repr=False)
class SweepResult:
    """Result of `bench.sweep` and `bench.tune`.

    Attributes:
        trials: The settings in the order of the grid, each a `Trial`.
        axes: Names of the settings that vary.
        stream: Name of the stream.
        score: Name of the score that settings are chosen by.
        seeds: The seeds of each setting.
        chosen_on: The samples that settings are chosen on: ``"test samples"``, validation tasks, or held-out samples.
        rule: The rule by which settings are chosen, in words.
        by: Names of the settings for each combination of which one setting is chosen.
        tuned: Name of the setting that `bench.tune` searched; None for a sweep.
        remarks: Remarks on the search, such as that a best value is at an edge of the grid.

    Example:
        >>> low = Trial({"norm": "bn", "lr": 0.01}, {}, (0,), scores={0: 61.0})
        >>> high = Trial({"norm": "bn", "lr": 0.1}, {}, (0,), scores={0: 70.0})
        >>> result = SweepResult([low, high], ("norm", "lr"), "split-mnist", "acc", (0,), "test samples", "highest acc")
        >>> result.best["bn"].setting["lr"], result.best["bn"].mean
        (0.1, 70.0)
    """

    trials: list[Trial]
    axes: tuple[str, ...]
    stream: str
    score: str
    seeds: tuple[int, ...]
    chosen_on: str
    rule: str
    by: tuple[str, ...] = ("norm",)
    tuned: str | None = None
    remarks: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every seed of every setting finished or diverged."""
        return all(trial.unfinished == 0 for trial in self.trials)

    @property
    def groups(self) -> dict[Any, list[Trial]]:
        """The settings among which one is chosen: by norm, or by the tuple of the values of `by`."""
        groups: dict[Any, list[Trial]] = {}
        for trial in self.trials:
            values = tuple(trial.setting[name] for name in self.by)
            groups.setdefault(values[0] if len(values) == 1 else values, []).append(trial)
        return groups

    @property
    def best(self) -> dict[Any, Trial]:
        """The chosen setting of each norm (see `by`).

        A norm is missing while it has unfinished settings, and if every setting has a diverged seed. On ties, the
        smallest value of the tuned setting or the learning rate is chosen; then the first setting.
        """

        def order(trial: Trial) -> float:
            value = trial.setting.get(self.tuned or "lr")
            return float(value) if isinstance(value, int | float) else 0.0

        lower = self.score.startswith("fm")
        finished = {name: trials for name, trials in self.groups.items() if not any(t.unfinished for t in trials)}
        chosen = {name: best_candidate(trials, order, lower) for name, trials in finished.items()}
        return {name: trial for name, trial in chosen.items() if trial is not None}

    @property
    def warning(self) -> str | None:
        """Why scores of the chosen settings are biased; None if they were chosen on validation samples."""
        if self.chosen_on != TEST_SAMPLES or all(len(trials) == 1 for trials in self.groups.values()):
            return None
        return (
            "the best settings are chosen on the test samples that their scores are measured on, so these scores are "
            "too high. Choose them with validation=True (--validation), then run them on the test samples."
        )

    @property
    def notes(self) -> list[str]:
        """Remarks on the search and the choice: ties, values at an edge, and norms for which nothing is chosen."""
        notes, best = list(self.remarks), self.best
        for name, trials in self.groups.items():
            label = " ".join(map(str, name)) if isinstance(name, tuple) else str(name)
            chosen, missing = best.get(name), sum(trial.unfinished for trial in trials)
            if missing:
                notes.append(f"{label}: nothing is chosen yet; unfinished runs: {missing}.")
            elif chosen is None:
                notes.append(f"{label}: every setting has a diverged seed, so none is chosen.")
            elif ties := [t.describe() for t in trials if t.eligible and t is not chosen and t.mean == chosen.mean]:
                notes.append(f"{', '.join(ties)} did as well as the chosen {chosen.describe()}.")
            elif "lr" in self.axes and self.tuned is None:  # `tune` has its own remark
                rates = {trial.setting["lr"] for trial in trials}
                if len(rates) > 1 and chosen.setting["lr"] in (min(rates), max(rates)):
                    notes.append(f"{label}: lr={chosen.setting['lr']:g} is at the edge of the grid; extend it.")
        if any(trial.config is not None and trial.config.train.max_steps is not None for trial in self.trials):
            notes.append("train.max_steps is set: the scores are of the first steps only, and are not comparable.")
        return notes

    def to_frame(self) -> pd.DataFrame:
        """Return a pandas data frame with one row per setting.

        Columns: the settings that vary, ``mean`` and ``std`` of the score, ``seeds`` (finished), ``diverged``,
        ``unfinished``, ``best`` (whether it is chosen) and ``hash`` (of the resolved settings).
        """
        import pandas  # only where a table is made

        chosen = [id(trial) for trial in self.best.values()]
        rows = [
            {
                **trial.setting,
                "mean": trial.mean,
                "std": trial.std,
                "seeds": len(trial.scores),
                "diverged": len(trial.diverged),
                "unfinished": trial.unfinished,
                "best": id(trial) in chosen,
                "hash": None if trial.config is None else trial.config.hash,
            }
            for trial in self.trials
        ]
        return pandas.DataFrame(rows)

    def plot(self) -> Figure:
        """Return a matplotlib figure: the mean score over a numeric setting, one curve per norm; the best is circled.

        The axis is the tuned setting, the learning rate, or the first setting that varies. Settings with a diverged or
        missing seed are left out.
        """
        from matplotlib.figure import Figure

        frame = self.to_frame()
        axis = self.tuned or ("lr" if "lr" in self.axes else next((one for one in self.axes if one != "norm"), "norm"))
        is_number = frame[axis].dtype.kind in "if"
        drawn = Figure(figsize=(6.4, 4.2), layout="constrained")
        ax = drawn.add_subplot()
        others = [name for name in self.trials[0].setting if name != axis]
        frame["curve"] = frame[others].astype(str).agg(", ".join, axis=1) if others else self.score
        usable = frame[frame["seeds"] == len(self.seeds)]
        for number, (curve, rows) in enumerate(usable.groupby("curve", sort=False)):
            rows = rows.sort_values(axis) if is_number else rows.assign(**{axis: rows[axis].map(format_value)})
            style: dict[str, Any] = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
            line = "-" if is_number else ""
            ax.errorbar(
                rows[axis], rows["mean"], rows["std"].fillna(0), label=curve, capsize=3, linestyle=line, **style
            )
            best = rows[rows["best"]]
            circle: dict[str, Any] = {"marker": "o", "markersize": 13, "fillstyle": "none", "linestyle": ""}
            ax.plot(best[axis], best["mean"], color=style["color"], **circle)
        if is_number and (frame[axis] > 0).all():
            ax.set_xscale("log")
        ax.set_xlabel(axis)
        ax.set_ylabel(f"{self.score} (percent)")
        ax.set_title(f"{self.stream}, {self.chosen_on}\nmean and standard deviation over seeds", fontsize="medium")
        if not usable.empty:
            ax.legend()
        return with_png(drawn)

    def __repr__(self) -> str:
        best = ", ".join(f"{trial.describe()}: {trial.mean:.2f}" for trial in self.best.values())
        chosen = f"; best {self.score}, chosen on {self.chosen_on}: {best}" if best else ""
        missing = sum(trial.unfinished for trial in self.trials)
        unfinished = f", {missing} runs missing" if missing else ""
        names = {run_names(trial.config)[0] for trial in self.trials if trial.config is not None}  # with the source
        stream = next(iter(names), self.stream)
        return f"SweepResult({stream}, {len(self.trials)} settings, {len(self.seeds)} seeds{unfinished}{chosen})"

    def _repr_html_(self) -> str:
        """Show the table of settings, as in a notebook."""
        return self.to_frame().to_html()


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
        RunInterrupted: After Ctrl-C, when the runs are saved; its ``result`` has those that are recorded.

    Example:
        >>> from contnorm.bench.api.stream import load_stream
        >>> logging.getLogger("contnorm").setLevel("ERROR")  # the settings are chosen on the test samples
        >>> stream = load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> result = sweep(stream, norm=["bn", "gn"], lr=[0.01, 0.1], seeds=1)
        >>> len(result.trials), list(result.best), list(result.to_frame().columns[:3])
        (4, ['bn', 'gn'], ['norm', 'lr', 'mean'])
    """
    values, axes, of_stream, execution = _grid(settings, tag, options)
    names = (by,) if isinstance(by, str) else tuple(by)
    for name in names:
        if name not in ("norm", *axes):
            raise unknown("setting in by:", name, ["norm", *(axis for axis in axes if axis != "norm")])
    chosen, result = _start(stream, of_stream, axes, seeds, validation, score)
    result.by = names
    trials = [_trial(values, one, axes, tag, result.seeds) for one in product(*values.values())]
    _run(chosen, result, trials, execution)
    if result.warning:
        logging.getLogger("contnorm").warning(result.warning)
    return result


def tune(
    stream: Stream | str,
    *,
    over: str = "lr",
    settings: Mapping[str, Any] | None = None,
    tag: str | None = None,
    seeds: int | Iterable[int] = 3,
    extensions: int = 3,
    refine: Refine | None = "between",
    score: str | None = None,
    **options: Any,
) -> SweepResult:
    """Search for the best value of one setting on validation data, for each norm and each combination of other lists.

    The values of ``over`` are tried first. While the best one is the smallest or the largest tried, the next value
    beyond is tried, at the ratio of the grid. Then a value between the best one and the better of its neighbors is
    tried. The searches of all norms run together. The test samples are never used (see ``validation`` of `sweep`).

    Args:
        stream: A stream, or the name of one.
        over: The setting to search: ``"lr"``, ``"batch_size"``, ``"replay"``, or a numeric setting by dotted key.
        settings, tag: As in `sweep`. The list of ``over`` is the grid, of at least two values above 0; the default for
            ``lr`` is 0.003, 0.01, 0.03, 0.1, 0.3. Every other list makes separate searches.
        seeds: Number of seeds of each setting, counted from 0, or the seeds.
        extensions: Largest number of values beyond the grid, for each search.
        refine: ``"between"`` the best two neighbors, ``"around"`` the best value (a value on either side), or None.
        score, **options: As in `sweep`.

    Returns:
        The scores of all settings; ``best`` has the best one of each search.

    Raises:
        UserError: If a value is invalid; nothing is run then.
        RunInterrupted: After Ctrl-C, when the runs are saved. The same call continues.

    Example:
        >>> from contnorm.bench.api.stream import load_stream
        >>> tune(load_stream("split-mnist", source="digits"), norm=["bn", "cn"], lr=[0.1, -1.0])
        Traceback (most recent call last):
        contnorm.errors.UserError: lr=-1,0.1: use numbers above 0, such as 0.01,0.03,0.1.
    """
    axis = next((name for name, key in RUN_ARGUMENTS.items() if key == over), over)
    if axis == "lr" and "train.lr" not in flatten_settings(settings or {}):
        options.setdefault("lr", LEARNING_RATES)
    values, axes, of_stream, execution = _grid(settings, tag, options)
    if axis not in axes or not all(isinstance(value, int | float) for _, value in values[axis]):
        raise UserError(f"over={over!r}: give at least two values of {axis}, numbers, from which the search starts.")
    chosen, result = _start(stream, of_stream, axes, seeds, True, score)
    result.tuned, result.by = axis, ("norm", *(name for name in axes if name not in ("norm", axis)))
    grid, lower = [value for _, value in values[axis]], result.score.startswith("fm")
    options = {"extensions": extensions, "refine": refine, "lower_is_better": lower, "name": axis}
    others = product(*(pairs for name, pairs in values.items() if name != axis))
    searches = [(one, LineSearch(grid, **options), list[Trial]()) for one in others]
    names = [*(name for name in values if name != axis), axis]
    while round_ := [(search, value) for search in searches for value in search[1].propose()]:
        trials = [_trial(names, (*one, (value, value)), axes, tag, result.seeds) for (one, *_), value in round_]
        refused = _run_round(chosen, result, trials, execution)
        for ((_, line, tried), value), trial in zip(round_, trials, strict=True):
            line.record(value, trial.mean if trial.eligible else None)
            if all(trial is not other for other in refused):
                tried.append(trial)
    result.trials = [trial for *_, tried in searches for trial in sorted(tried, key=lambda one: one.setting[axis])]
    for _, line, tried in searches:
        if line.at_edge:
            label = next(trial for trial in tried if trial.setting[axis] == line.best).describe()
            result.remarks.append(f"{label}: is at the edge of the values that were tried; one beyond may be better.")
    return result


def _grid(
    settings: Mapping[str, Any] | None, tag: str | None, arguments: Mapping[str, Any]
) -> tuple[_Values, tuple[str, ...], dict[str, Any], dict[str, Any]]:
    """Sort the arguments of a sweep.

    Returns:
        The values of each argument of `run` and of each setting, norms first; the names of those that are lists; the
        settings of the stream; and the arguments that say how runs are executed.
    """
    argument_of = {key: name for name, key in RUN_ARGUMENTS.items()}
    given: dict[str, Any] = {"norm": None}
    of_stream, execution = dict[str, Any](), dict[str, Any]()
    for key, value in [*arguments.items(), *flatten_settings(settings or {}).items()]:
        name = argument_of.get(key, key)
        if key.startswith("stream."):
            if _is_list(value):
                raise UserError(f"{key}={value!r}: scores on different tasks can't be compared. Sweep each on its own.")
            of_stream[key.partition(".")[2]] = value
        elif key in arguments and name not in RUN_ARGUMENTS and "." not in key:
            execution[key] = value
        elif given.get(name) is not None:
            raise UserError(f"{key} is given twice, with {given[name]!r} and {value!r}. Give it once.")
        elif value is not None or key not in RUN_ARGUMENTS:
            given[name] = value
    if given["norm"] is None:
        del given["norm"]
    axes = tuple(name for name, value in given.items() if _is_list(value))
    values = {name: _pairs(value if name in axes else [value]) for name, value in given.items()}
    count = math.prod(map(len, values.values()))
    if not 1 <= count <= MAX_SETTINGS:
        raise UserError(f"the lists have {count:,} combinations. Use lists with values, and at most {MAX_SETTINGS:,}.")
    if tag is not None and any(len(values.get(name, ())) > 1 for name in ("model", "strategy")):
        raise UserError(f"tag={tag!r} names one object, and a list of them is given. Define them in a file.")
    return values, axes, of_stream, execution


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple | range | np.ndarray)


def _pairs(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return each value once, with what is shown for it: itself, or the text of an object."""
    pairs: list[tuple[Any, Any]] = []
    for value in values.tolist() if isinstance(values, np.ndarray) else values:
        if value is None or isinstance(value, str | int | float):
            if not any(type(value) is type(other) and value == other for _, other in pairs):
                pairs.append((value, value))
        else:
            named = inspect.isroutine(value) or isinstance(value, type)
            shown = value.__name__ if named else repr(value).partition("\n")[0].rstrip("(")
            same = sum(value is not other and str(label).startswith(shown) for label, other in pairs)
            pairs.append((f"{shown} ({same + 1})" if same else shown, value))
    return pairs


def _trial(
    names: Iterable[str], pairs: Iterable[tuple[Any, Any]], axes: Sequence[str], tag: str | None, seeds: tuple[int, ...]
) -> Trial:
    """Return the trial of a combination: for each name, what is shown and the value."""
    combination = dict(zip(names, pairs, strict=True))
    shown = {name: label for name, (label, _) in combination.items() if name == "norm" or name in axes}
    arguments = {name: value for name, (_, value) in combination.items() if name in RUN_ARGUMENTS}
    settings = {name: value for name, (_, value) in combination.items() if name not in RUN_ARGUMENTS}
    arguments |= ({"settings": settings} if settings else {}) | ({} if tag is None else {"tag": tag})
    return Trial({"norm": str(DEFAULT_NORM), **shown}, arguments, seeds)


def _start(
    stream: Stream | str,
    of_stream: Mapping[str, Any],
    axes: tuple[str, ...],
    seeds: int | Iterable[int],
    validation: bool,
    score: str | None,
) -> tuple[Stream, SweepResult]:
    """Return the stream with its settings, on validation data if requested; and a result without trials."""
    stream = as_stream(stream)
    name, chosen = check_score(score, stream), tuple(list_seeds(seeds))
    values = {**stream.settings, **of_stream}
    if validation and find_stream(values["name"]).validation > 0:
        # The number of tasks is that of the test tasks. All validation tasks are used, and there are few.
        values = {key: value for key, value in values.items() if key != "tasks"} | {"part": "validate"}
    elif validation and not values.get("holdout"):
        values = {**values, "holdout": HOLDOUT}
    chosen_on = TEST_SAMPLES
    if values.get("part") == "validate":
        chosen_on = "validation tasks (stream.part=validate)"
    elif values.get("holdout"):
        chosen_on = f"held-out training samples (stream.holdout={values['holdout']:g})"
    if values != stream.settings:
        source = stream.source if stream.root is None or stream.is_loaded else None
        stream = Stream(values, stream.root, source, stream.allow_missing)
    first, seed = "lowest" if name.startswith("fm") else "highest", "seed" if len(chosen) == 1 else "seeds"
    rule = (
        f"{first} mean {name} on the {chosen_on} over {len(chosen)} {seed}; a setting with a diverged seed is not "
        f"chosen; on ties, the smallest learning rate or tuned value."
    )
    return stream, SweepResult([], axes, stream.name, name, chosen, chosen_on, rule)


def _run(stream: Stream, result: SweepResult, trials: Sequence[Trial], execution: Mapping[str, Any]) -> None:
    """Run some settings, and enter them and their scores into the result."""
    runs: Any = execution.get("runs")
    experiments = [resolve_run(stream, trial.arguments, recorded=runs is not None) for trial in trials]

    def enter(trial: Trial, found: Result) -> None:
        trial.result, trial.diverged = found, found.diverged
        trial.scores = dict(zip(found.seeds, found.score(result.score).tolist(), strict=True))

    for trial, one in zip(trials, experiments, strict=True):
        trial.config = one.config
    try:
        outcomes = run_experiments(stream, experiments, seeds=result.seeds, **execution)
    except RunInterrupted as stopped:
        result.trials += trials
        for trial in trials if runs is not None else ():
            assert trial.config is not None
            found = Store(Path(runs).expanduser()).load_seeds(trial.config, result.seeds)
            if found.records:
                enter(trial, Result(found.records, diverged={one.seed: one.reason for one in found.diverged}))
        stopped.result = result
        raise
    result.trials += trials
    for trial, outcome in zip(trials, outcomes, strict=True):
        if isinstance(outcome, Result):
            enter(trial, outcome)
        else:
            trial.diverged = dict.fromkeys(result.seeds, str(outcome))


def _run_round(
    stream: Stream, result: SweepResult, trials: Sequence[Trial], execution: Mapping[str, Any]
) -> list[Trial]:
    """Run settings of a search. Those beyond the first grid that can't be run are noted and returned.

    For instance, a smaller memory than any of the grid may be too small for the replayed samples of a step.
    """
    is_first = not result.trials
    try:
        _run(stream, result, trials, execution)
    except UserError as error:
        if is_first or isinstance(error, UserCodeError):
            raise
        if len(trials) > 1:
            return [refused for trial in trials for refused in _run_round(stream, result, [trial], execution)]
        result.remarks.append(f"{trials[0].describe()}: can't be run. {error}")
        return list(trials)
    return []
