"""Compares the norms of any runs: the best setting of each norm, and the paired differences between them.

Runs are compared if they are of the same experiment: the same stream, strategy, memory, network and amount of training.
Within an experiment the other settings, such as the learning rate, are choices, and each norm is represented by its
best one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from contnorm.bench.comparison import compare_scores
from contnorm.bench.config.defaults import DEFAULT_IF_NONE, changed, run_names
from contnorm.bench.config.schema import RunConfig, flatten_settings, format_settings, format_value
from contnorm.bench.label_metrics import mean_ap
from contnorm.bench.metrics import MAIN_SCORES, acc_so_far, score_title
from contnorm.bench.records import Record, Runs
from contnorm.bench.sequential import Verdict, decide_family
from contnorm.bench.text import data_part, data_remarks, spread
from contnorm.paper.cells import moments_label
from contnorm.report.runs import score_of
from contnorm.report.tables import MOST_CURVES, Document, Table, curves_over_tasks, paired_differences, score_by_rate

SCORES, LABEL_SCORES = MAIN_SCORES, ("map", "c_f1", "o_f1")  # the first one selects the best setting
EXPERIMENT_KEYS = ("strategy.name", "strategy.code", "train.passes", "train.updates", "train.max_steps")
EXPERIMENT_GROUPS = ("stream.", "memory.", "model.")
NORM_KEYS = ("norm.name", "norm.groups", "norm.auto_channels", "norm.freeze_after")  # part of a norm's label
IN_TITLE = ("stream.name", "stream.source", "stream.part", "strategy.name", "train.max_steps")  # in every title
PART_KEYS = ("stream.part", "stream.holdout")  # which samples the scores are of
MIN_SHARE_OF_SEEDS = 0.5  # a setting with fewer seeds than this share of the most is not chosen
MOST_FOR_ALL_PAIRS = 4  # norms
MOST_DRAWN = 12  # experiments that a page shows unfolded and with figures
ONE_SETTING, ON_TEST = "one setting", "test tasks"

HOW_COMPARED = (
    "Runs are compared if stream, strategy, memory, network and number of epochs are the same. Of the other settings, "
    "each norm has its best: that with the highest mean of the first score over seeds. A setting with a diverged seed, "
    "or with fewer than half of the seeds of another one of its norm, is chosen only if there is no other."
)
HOW_PAIRED = (
    "Differences are paired over the seeds that both have. The comparisons of a table are decided together, by the "
    "seeds from 100 on, with looks at 16, 24, 32, ... and 128 seeds; their intervals allow for both. With fewer seeds "
    "there is no verdict, and the interval is an ordinary 95 % interval."
)
EXACT_MOMENTS = "An asterisk marks evaluation with exact moments instead of running ones."

Key = tuple[tuple[str, str], ...]


@dataclass
class Setting:
    """Runs of a norm with equal settings.

    Attributes:
        norm: Label of the norm; with an asterisk if it is evaluated with exact moments, ``bn memory`` if with those of
            the memory.
        values: Settings that are not part of the experiment or of the norm, by dotted key.
        rows: Of each seed the scores by name, the ``curve`` of scores after each task and the ``record``.
        diverged: Seeds that diverged.
    """

    norm: str
    values: Mapping[str, Any]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    diverged: set[int] = field(default_factory=set)

    @property
    def lr(self) -> float:
        return float(self.values["train.lr"])

    @property
    def exact(self) -> bool:
        """Whether it is evaluated with exact moments, which are not available in practice."""
        return self.norm.endswith("*")

    def scores(self, name: str) -> dict[int, Any]:
        """A score, or ``curve`` or ``record``, by seed."""
        return {seed: row[name] for seed, row in self.rows.items()}

    def column(self, name: str) -> list[Any]:
        return list(self.scores(name).values())

    def mean(self, name: str) -> float:
        """Mean of a score over seeds; minus infinity if all diverged."""
        return fmean(self.column(name)) if self.rows else -math.inf


@dataclass(frozen=True)
class BestSetting:
    """The setting that represents a norm; None if all its runs diverged.

    Attributes:
        tried: Number of settings of the norm with runs, diverged ones included.
        chosen_on: What it was chosen by: one setting, test tasks, validation tasks or held-out training samples.
    """

    norm: str
    setting: Setting | None
    tried: int
    chosen_on: str


@dataclass(frozen=True)
class Experiment:
    """All runs of one experiment.

    Attributes:
        title: Stream, strategy and the settings in which it differs from other experiments of the same names.
        config: Settings of one of its runs.
        settings: All settings with runs.
        validation: What its scores are on if it is for validation: validation tasks, or held-out training samples.
        best: Best setting of each norm, from the highest mean to the lowest; then those evaluated with exact moments.
    """

    title: str
    config: RunConfig
    settings: Sequence[Setting]
    validation: str
    best: Sequence[BestSetting]

    @cached_property
    def records(self) -> list[Record]:
        return [row["record"] for setting in self.settings for row in setting.rows.values()]

    @cached_property
    def score_names(self) -> tuple[str, ...]:
        return LABEL_SCORES if self.records[0].multi_label else SCORES

    @property
    def title_of_score(self) -> str:
        return score_title(self.score_names[0])

    @property
    def chosen(self) -> list[Setting]:
        """Best setting of each norm that has one."""
        return [best.setting for best in self.best if best.setting is not None]

    @cached_property
    def varying(self) -> list[str]:
        """Keys in which its settings differ; always has the learning rate."""
        return _varying([setting.values for setting in self.settings])

    def values(self, setting: Setting) -> list[str]:
        """The settings that vary, as in ``lr=0.01``. Those of norms are named only if they vary for this norm."""
        same_norm = _varying([one.values for one in self.settings if one.norm == setting.norm])
        keys = [key for key in self.varying if not key.startswith("norm.") or key in same_norm]
        texts = {key.removeprefix("train."): setting.values.get(key) for key in keys}
        return [f"{key}={format_value(value)}" for key, value in texts.items() if value is not None]

    def name(self, setting: Setting) -> str:
        """Name of a setting in legends: its norm and the settings that vary, as in ``norm=cn8, lr=0.01``."""
        return ", ".join([f"norm={setting.norm}", *self.values(setting)])

    @cached_property
    def differences(self) -> list[tuple[Setting, Setting, Verdict | None]]:
        """Differences between norms, decided as one family: all pairs of few norms, otherwise the first minus each.

        The verdict is None for norms without a shared seed.
        """
        chosen, name = self.chosen, self.score_names[0]
        few = len(chosen) <= MOST_FOR_ALL_PAIRS
        pairs = list(combinations(chosen, 2) if few else ((chosen[0], other) for other in chosen[1:]))
        alone = {
            i: compare_scores(a.scores(name), b.scores(name), name, (a.norm, b.norm), diverged=a.diverged | b.diverged)
            for i, (a, b) in enumerate(pairs)
            if a.rows.keys() & b.rows.keys()
        }
        family = decide_family(alone)
        return [(a, b, family.get(number)) for number, (a, b) in enumerate(pairs)]

    @property
    def rates(self) -> list[float]:
        """Learning rates of all runs, in order."""
        return sorted({setting.lr for setting in self.settings})

    def best_by_rate(self, norm: str) -> dict[float, Setting]:
        """For each learning rate of a norm its best setting."""
        by_rate: dict[float, list[Setting]] = {}
        for one in self.settings:
            if one.norm == norm:
                by_rate.setdefault(one.lr, []).append(one)
        return {rate: _highest(some, self.score_names[0]) or some[0] for rate, some in sorted(by_rate.items())}


def experiments_of(runs: Runs) -> list[Experiment]:
    """Group runs by experiment and find the best setting of each norm.

    The best setting has the highest mean of the first score (ACC; mAP for several labels). A setting does not count if
    one of its seeds diverged, or if it has fewer than half of the seeds of another setting of its norm, unless no other
    is left. If there are validation runs of the same experiment, these choose the setting.

    Returns:
        The experiments: first those on test tasks, and of these first those with several norms.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> from contnorm.bench.records import make_record
        >>> configs = [from_dict({"norm": {"name": "bn"}, "train": {"lr": lr}}) for lr in (0.1, 0.3)]
        >>> counts = [{"matrix": {"correct": [[correct]], "total": [10]}} for correct in (6, 8)]
        >>> runs = Runs([make_record(config, 0, some) for config, some in zip(configs, counts)])
        >>> [experiment] = experiments_of(runs)
        >>> experiment.title, [(best.norm, best.setting.lr, best.tried) for best in experiment.best]
        ('permuted-mnist, single', [('bn', 0.3, 2)])
    """
    settings: dict[Key, dict[Key, Setting]] = {}
    configs: dict[Key, RunConfig] = {}
    for record in sorted(runs.records, key=lambda r: (run_names(r.config), r.hash, r.seed)):
        key = _experiment_key(record.config)
        configs.setdefault(key, record.config)
        for moments, counted in record.evaluated.items():
            names = LABEL_SCORES if record.multi_label else SCORES
            row: dict[str, Any] = {name: score_of(record, counted, name) for name in names}
            row["curve"] = [mean_ap(one) for one in counted.tally] if record.multi_label else acc_so_far(counted)
            row["record"] = record
            place, norm, values = _setting_key(record.config, moments)
            setting = settings.setdefault(key, {}).setdefault(place, Setting(norm, values))
            setting.rows.setdefault(record.seed, row)  # settings of evaluation alone may give several records of a seed
    for record in runs.diverged:
        if (key := _experiment_key(record.config)) in settings:
            place, norm, values = _setting_key(record.config, record.config.evaluate.moments)
            settings[key].setdefault(place, Setting(norm, values)).diverged.add(record.seed)
    for setting in (setting for some in settings.values() for setting in some.values()):
        setting.rows = dict(sorted(setting.rows.items()))
    titles, experiments = _titles(configs), []
    for key, some in settings.items():
        data, own = _validation_data(configs[key]), list(some.values())
        first = next(row for setting in own for row in setting.rows.values())
        name = next(one for one in (SCORES[0], LABEL_SCORES[0]) if one in first)
        validation = "", list[Setting]()  # data and settings of the same experiment, scored on other samples
        for other in settings if not data else ():
            same = {item for item in {*other} ^ {*key} if item[0] not in PART_KEYS} == set()
            if same and (of := _validation_data(configs[other])):
                validation = of, list(settings[other].values())
                break
        best = [_best(norm, own, data, validation, name) for norm in dict.fromkeys(setting.norm for setting in own)]
        best.sort(key=lambda one: (one.norm.endswith("*"), -one.setting.mean(name) if one.setting else math.inf))
        experiments.append(Experiment(titles[key], configs[key], own, data, best))
    return sorted(experiments, key=lambda one: (bool(one.validation), len(one.best) < 2, one.title))


def _is_experiment_key(key: str) -> bool:
    return key in EXPERIMENT_KEYS or key.startswith(EXPERIMENT_GROUPS)


def _experiment_values(config: RunConfig) -> dict[str, Any]:
    """Settings of an experiment that are changed from the defaults of its stream and strategy."""
    values = {key: value for key, value in changed(config).items() if _is_experiment_key(key)}
    return {key: value for key, value in values.items() if value is not None or key not in DEFAULT_IF_NONE}


@lru_cache(maxsize=4096)
def _experiment_key(config: RunConfig) -> Key:
    values = {key: format_value(value) for key, value in _experiment_values(config).items()}
    return tuple(sorted({"stream.name": config.stream.name, "strategy.name": config.strategy.name, **values}.items()))


@lru_cache(maxsize=4096)
def _setting_key(config: RunConfig, moments: str) -> tuple[Key, str, dict[str, Any]]:
    """Key, label of the norm and values of a setting within its experiment."""
    norm = run_names(config)[2] + moments_label(moments, config.evaluate.weights)
    values = {
        key: value
        for key, value in flatten_settings(config.as_dict()).items()
        if not (_is_experiment_key(key) or key in NORM_KEYS or key.startswith("evaluate."))
    }
    return (("norm", norm), *((key, format_value(value)) for key, value in values.items())), norm, values


def _titles(configs: Mapping[Key, RunConfig]) -> dict[Key, str]:
    """Titles of experiments: stream, strategy, and what differs between experiments of equal stream and strategy."""
    by_names: dict[tuple[str, ...], list[Key]] = {}
    for key, config in configs.items():
        by_names.setdefault(run_names(config)[:2], []).append(key)
    titles = {}
    for names, keys in by_names.items():
        settings = {key: flatten_settings(configs[key].as_dict()) for key in keys}
        candidates = dict.fromkeys(
            one for key in keys for one in _experiment_values(configs[key]) if one not in IN_TITLE
        )
        varying = [one for one in candidates if len({format_value(some.get(one)) for some in settings.values()}) > 1]
        for key, some in settings.items():
            values = [(one.removeprefix("train."), some[one]) for one in varying if some.get(one) is not None]
            parts = [f"{one}={format_value(value)}" for one, value in values]
            titles[key] = ", ".join(filter(None, [*names, *parts, _validation_data(configs[key])]))
    return titles


def _validation_data(config: RunConfig) -> str:
    """What the scores of a validation run are of; empty for a run that is scored on test samples."""
    if config.stream.part == "validate":
        return "validation tasks"
    return "" if config.stream.holdout is None else "held-out training samples"


def _best(
    norm: str, settings: Sequence[Setting], data: str, validation: tuple[str, list[Setting]], name: str
) -> BestSetting:
    """Best setting of a norm: by the validation runs if their best setting was run here, otherwise by these runs."""
    own = [one for one in settings if one.norm == norm]
    validated = [one for one in validation[1] if one.norm == norm]
    if sum(bool(one.rows) for one in validated) > 1 and (chosen := _highest(validated, name)):
        same = [one for one in own if one.rows and one.values == chosen.values]
        if same:
            return BestSetting(norm, same[0], len(validated), validation[0])
    return BestSetting(norm, _highest(own, name), len(own), ONE_SETTING if len(own) == 1 else data or ON_TEST)


def _highest(settings: Sequence[Setting], name: str) -> Setting | None:
    """Setting with the highest mean, of equal ones that with the smallest learning rate; None if all diverged."""
    finished = [one for one in settings if one.rows]
    stable = [one for one in finished if not one.diverged] or finished
    most = max((len(one.rows) for one in stable), default=0)
    candidates = [one for one in stable if len(one.rows) >= MIN_SHARE_OF_SEEDS * most]
    return max(candidates, key=lambda one: (one.mean(name), -one.lr), default=None)


def _varying(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose value is not the same for all, and the learning rate, which is first."""
    keys = dict.fromkeys(key for one in values for key in one)  # own settings of a component are not in all
    varying = [key for key in keys if len({format_value(one.get(key)) for one in values}) > 1]
    return ["train.lr", *(key for key in varying if key != "train.lr")]


# --- Tables ----------------------------------------------------------------------------------------------------------


def comparison(experiments: Sequence[Experiment], lead: Sequence[str] = ()) -> Document:
    """Document with the tables and figures of all experiments; ``lead`` are sentences at its top."""
    several = any(len(one.settings) > 1 for one in experiments) or len(experiments) > 1
    exact = any(setting.exact for one in experiments for setting in one.settings)
    notes = [HOW_COMPARED] if several else []
    notes += [HOW_PAIRED] if any(one.differences for one in experiments) else []
    notes += [EXACT_MOMENTS] if exact else []
    tables = []
    for number, experiment in enumerate(experiments, 1):
        names, rows = experiment.score_names, list[list[str]]()
        others = any(len(experiment.values(setting)) > 1 for setting in experiment.chosen)
        for best in experiment.best:
            if (setting := best.setting) is None:
                cells = ["-", "diverged", *["-"] * (len(names) - 1), "0", *(["-"] if others else [])]
            else:
                cells = [f"{setting.lr:g}", *(spread(setting.column(name)) for name in names), str(len(setting.rows))]
                cells += [", ".join(experiment.values(setting)[1:]) or "-"] if others else []
            rows.append([best.norm, *cells, str(best.tried), best.chosen_on])
        heads = ["norm", "lr", *map(score_title, names), "seeds", *(["other settings"] if others else [])]
        folded, below = number > MOST_DRAWN, [_curves(experiment), _rates(experiment), _pairs(experiment)]
        best_settings = Table(
            f"{experiment.title}: best setting of each norm",
            [*heads, "settings tried", "chosen on"],
            rows,
            notes=list(_notes(experiment)),
            lead=headline(experiment),
            figures=[] if folded else [figure for table in below for figure in table.figures],
            folded=folded,
            name=f"experiment-{number}",
        )
        curves, rates, pairs = (replace(table, figures=()) for table in below)
        tables += [best_settings, *([replace(pairs, folded=folded)] if pairs.rows else []), curves]
        tables += [rates] if len(experiment.rates) > 1 else []
    return Document("comparison", "Comparison of the norms", tables, [*lead, *notes])


def headline(experiment: Experiment) -> str:
    """Sentences on the norm with the highest score, and whether it differs from the next one."""
    first, chosen = experiment.chosen[0], experiment.chosen
    scores = first.column(experiment.score_names[0])
    exact = any(setting.exact for setting in chosen) and not first.exact
    several = sum(setting.exact == first.exact for setting in chosen) > 1
    what = f"{'Highest ' if several else ''}{experiment.title_of_score}{' without exact moments' if exact else ''}"
    seeds = f"{len(scores)} seed{'' if len(scores) == 1 else 's'}"
    sentence = f"{what}: {spread(scores)} with {experiment.name(first)} ({seeds})."
    for a, b, verdict in experiment.differences[:1]:
        none = f"{a.norm} and {b.norm} have no seed in common, so they are not compared."
        sentence += f" {none if verdict is None else verdict.sentence}"
    return sentence


def _pairs(experiment: Experiment) -> Table:
    """Table and figure of the paired differences."""
    rows, differences = [], {}
    for a, b, verdict in experiment.differences:
        names, values = [], (experiment.values(a), experiment.values(b))
        for one, own, others in ((a, *values), (b, *values[::-1])):  # with the settings in which they differ
            more = ", ".join(value for value in own if value not in others)
            names.append(f"{one.norm} ({more})" if more else one.norm)
        name = " minus ".join(names)
        cells = ["-", "-", "0", "no shared seeds"]
        if verdict is not None:
            differences[name] = list(verdict.differences.values())
            interval, seeds = verdict.interval or verdict.uncorrected, verdict.seeds or len(verdict.differences)
            known = verdict.outcome in ("equivalent", "undecided")
            outcome = verdict.outcome if known else f"{a.norm} is {verdict.outcome}"
            cells = [f"{verdict.mean:+.2f}", str(interval or "-"), str(seeds), outcome]
        rows.append([name, *cells])
    title, unit = f"{experiment.title}: paired differences", f"points of {experiment.title_of_score}"
    few = len(experiment.chosen) <= MOST_FOR_ALL_PAIRS
    notes = [] if few else [f"{experiment.chosen[0].norm}, the first norm above, minus each other norm."]
    draw = partial(paired_differences, differences, f"{title} at the best settings", unit)
    heads = ("difference", "points", "interval", "seeds", "verdict")
    return Table(title, heads, rows, notes, figures=[draw] if differences else [])


def _curves(experiment: Experiment) -> Table:
    """Table and figure of the scores after each task: of the best settings, or of all settings of a single norm."""
    shown = experiment.chosen
    if len(shown) == 1:
        finished = [one for one in experiment.settings if one.rows]
        shown = sorted(finished, key=lambda one: -one.mean(experiment.score_names[0]))
    part = f", the {MOST_CURVES} highest of {len(shown)} settings" if len(shown) > MOST_CURVES else ""
    curves = {experiment.name(setting): setting.column("curve") for setting in shown[:MOST_CURVES]}
    points = {name: [list(values) for values in zip(*some, strict=False)] for name, some in curves.items()}
    tasks = max(map(len, points.values()), default=0)
    rows = [[name, *map(spread, some), *["-"] * (tasks - len(some))] for name, some in points.items()]
    label = "mAP" if experiment.score_names is LABEL_SCORES else "accuracy"
    title, heads = f"{experiment.title}: {label} after each task", ["setting", *(f"task {i + 1}" for i in range(tasks))]
    draw = partial(curves_over_tasks, curves, title, f"{label} on tasks so far, %")
    return Table(f"{title}{part}", heads, rows, figures=[draw], folded=True)


def _rates(experiment: Experiment) -> Table:
    """Table and figure of the score of each norm at each learning rate."""
    rows, points, name = [], {}, experiment.score_names[0]
    for norm in [setting.norm for setting in experiment.chosen]:
        by_rate, cells = experiment.best_by_rate(norm), []
        for rate in experiment.rates:
            one = by_rate.get(rate)
            text = "-" if one is None else spread(one.column(name)) if one.rows else "diverged"
            cells.append(f"{text}, {len(one.diverged)} diverged" if one and one.rows and one.diverged else text)
        rows.append([norm, *cells])
        finished = {rate: one.column(name) for rate, one in by_rate.items() if one.rows}
        deviations = {rate: stdev(some) if len(some) > 1 else 0.0 for rate, some in finished.items()}
        points[f"norm={norm}"] = [(rate, fmean(some), deviations[rate]) for rate, some in finished.items()]
    title = f"{experiment.title}: {experiment.title_of_score} by learning rate"
    shown = dict(list(points.items())[:MOST_CURVES])
    draw = partial(score_by_rate, shown, title, f"{experiment.title_of_score} (percent)")
    heads = ["norm", *(f"lr={rate:g}" for rate in experiment.rates)]
    return Table(title, heads, rows, figures=[draw] if len(experiment.rates) > 1 else [], folded=True)


def _notes(experiment: Experiment) -> Iterator[str]:
    """Notes on the selection, the shared settings, diverged runs and the data."""
    chosen_on, name = {best.chosen_on for best in experiment.best}, experiment.title_of_score
    if chosen_on == {ONE_SETTING}:
        yield "Nothing was chosen: each norm was run with one setting."
    elif ON_TEST in chosen_on:
        yield (
            f"Settings were chosen by {name} on the test tasks, so the scores of the chosen ones are too high, and the "
            "more so the more settings were tried. Choose on validation tasks for an unbiased comparison."
        )
    elif experiment.validation:
        yield (
            f"These are validation runs: settings were chosen by the same {name} that is shown, which is too high for "
            "the chosen ones. Run these settings on the test tasks for an unbiased comparison."
        )
    else:
        data = " and ".join(sorted(chosen_on - {ONE_SETTING}))
        yield f"Settings were chosen by {name} on {data}; the scores are on the test tasks."
    shared = {
        key: value
        for key, value in changed(experiment.config).items()
        if not (key in (*IN_TITLE, *NORM_KEYS, *experiment.varying) or key.startswith("evaluate."))
        and not (value is None and key in DEFAULT_IF_NONE)
    }
    if shared:
        yield f"Changed from the defaults in all runs: {format_settings(shared, shared)}."
    diverged = [
        f"{experiment.name(one)} ({len(one.diverged)} of {len(one.diverged | one.rows.keys())} seeds)"
        for one in experiment.settings
        if one.diverged
    ]
    if diverged:
        yield f"Diverged: {'; '.join(diverged)}."
    lengths = {len(curve) for setting in experiment.chosen for curve in setting.column("curve")}
    if len(lengths) > 1:
        yield (
            f"The runs reached {min(lengths)} to {max(lengths)} tasks (--max-steps): their scores are not comparable."
        )
    yield from dict.fromkeys(f"Some runs used {part}." for one in experiment.records if (part := data_part(one)))
    yield from data_remarks(experiment.records)
