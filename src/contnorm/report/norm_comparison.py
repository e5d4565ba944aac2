"""Compares the norms of any runs: the best setting of each norm, and the paired differences between them.

Runs are compared if they are of the same experiment: the same stream, strategy, memory, network and amount of training.
Within an experiment the other settings, such as the learning rate, are choices, and each norm is represented by its
best one. Results are unformatted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from statistics import fmean
from typing import Any

from contnorm.bench.comparison import compare_scores
from contnorm.bench.config.defaults import changed, run_names
from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.bench.config.sources import format_value
from contnorm.bench.metrics.accuracy_matrix import MAIN_SCORES, acc_so_far, score
from contnorm.bench.metrics.multilabel import label_score, mean_ap
from contnorm.bench.records import DivergedRun, Record
from contnorm.bench.sequential import Verdict, decide_family
from contnorm.paper.cells import moments_label

__all__ = [
    "BestSetting",
    "Difference",
    "Experiment",
    "NormRuns",
    "compare_norms",
    "has_exact_moments",
    "short_key",
]

SCORES, LABEL_SCORES = MAIN_SCORES, ("map", "c_f1", "o_f1")  # the first one selects the best setting
EXPERIMENT_KEYS = ("strategy.name", "strategy.code", "train.passes", "train.updates", "train.max_steps")
EXPERIMENT_GROUPS = ("stream.", "memory.", "model.")
EVALUATION_GROUP = "evaluate."  # has no influence on the training; the moments are part of a norm's label
NORM_KEYS = ("norm.name", "norm.groups", "norm.auto_channels", "norm.freeze_after")  # part of a norm's label
DEFAULT_IF_NONE = ("stream.scenario", "stream.part", "stream.augment")
IN_TITLE = ("stream.name", "stream.source", "stream.part", "strategy.name", "train.max_steps")  # in every title
PART_KEYS = ("stream.part", "stream.holdout")  # which samples the scores are of
MIN_SHARE_OF_SEEDS = 0.5  # of the most seeds of a norm's settings; with fewer, a setting is not chosen
MOST_FOR_ALL_PAIRS = 4  # norms
ONE_SETTING, ON_TEST = "one setting", "test tasks"

Key = tuple[tuple[str, str], ...]


@dataclass
class NormRuns:
    """Runs of a norm with equal settings, one per seed.

    Attributes:
        norm: Label of the norm; with an asterisk if it is evaluated with exact moments, ``bn memory`` if with those of
            the memory.
        values: Settings that are not part of the experiment or of the norm, by dotted key.
        records: Record of each seed.
        scores: Scores of each seed by name, in percent.
        curves: Score after each task, for each seed.
        diverged: Seeds that diverged.
    """

    norm: str
    values: Mapping[str, Any]
    records: dict[int, Record] = field(default_factory=dict)
    scores: dict[int, dict[str, float]] = field(default_factory=dict)
    curves: dict[int, list[float]] = field(default_factory=dict)
    diverged: set[int] = field(default_factory=set)

    @property
    def lr(self) -> float:
        return float(self.values["train.lr"])

    def seed_scores(self, name: str) -> dict[int, float]:
        """Values of a score by seed."""
        return {seed: scores[name] for seed, scores in sorted(self.scores.items())}

    def mean(self, name: str) -> float:
        """Mean of a score over seeds."""
        return fmean(self.seed_scores(name).values())


@dataclass(frozen=True)
class BestSetting:
    """The setting that represents a norm.

    Attributes:
        setting: The setting; None if all runs of the norm diverged.
        tried: Number of settings of the norm with runs, diverged ones included.
        chosen_on: What it was chosen by: one setting, test tasks, validation tasks or held-out training samples.
    """

    norm: str
    setting: NormRuns | None
    tried: int
    chosen_on: str


@dataclass(frozen=True)
class Difference:
    """Paired difference between two norms at their best settings, ``a`` minus ``b``; None without shared seeds."""

    a: NormRuns
    b: NormRuns
    verdict: Verdict | None


@dataclass(frozen=True)
class Experiment:
    """All runs of one experiment.

    Attributes:
        title: Stream, strategy and the settings in which it differs from other experiments of the same names.
        shared: Settings of all its runs that are changed from the defaults, by dotted key.
        validation: What its scores are on if it is for validation: validation tasks, or held-out training samples.
        settings: All settings with runs.
        best: Best setting of each norm, from the highest mean to the lowest; then those evaluated with exact moments.
    """

    title: str
    shared: Mapping[str, Any]
    validation: str
    settings: Sequence[NormRuns]
    best: Sequence[BestSetting]

    @property
    def score_names(self) -> tuple[str, ...]:
        multi_label = any(record.multi_label for record in self.records)
        return LABEL_SCORES if multi_label else SCORES

    @property
    def records(self) -> list[Record]:
        return [record for setting in self.settings for record in setting.records.values()]

    @property
    def chosen(self) -> list[NormRuns]:
        """Best setting of each norm that has one."""
        return [best.setting for best in self.best if best.setting is not None]

    @cached_property
    def varying_keys(self) -> list[str]:
        """Keys in which its settings differ; always has the learning rate."""
        return _varying([setting.values for setting in self.settings])

    def name(self, setting: NormRuns) -> str:
        """Name of a setting in legends: its norm and the settings that vary, as in ``norm=cn8, lr=0.01``."""
        return ", ".join([f"norm={setting.norm}", *self.values(setting)])

    def values(self, setting: NormRuns) -> list[str]:
        """The settings that vary, as in ``lr=0.01``. Those of norms are named only if they vary for this norm."""
        same_norm = _varying([one.values for one in self.settings if one.norm == setting.norm])
        keys = [key for key in self.varying_keys if not key.startswith("norm.") or key in same_norm]
        return [
            f"{short_key(key)}={format_value(value)}" for key in keys if (value := setting.values.get(key)) is not None
        ]

    @cached_property
    def differences(self) -> list[Difference]:
        """Differences between norms, decided as one family: all pairs of few norms, otherwise the first minus each."""
        settings, name = self.chosen, self.score_names[0]
        few = len(settings) <= MOST_FOR_ALL_PAIRS
        pairs = list(combinations(settings, 2) if few else ((settings[0], other) for other in settings[1:]))
        alone = {number: _compare(a, b, name) for number, (a, b) in enumerate(pairs)}
        family = decide_family({number: one for number, one in alone.items() if one is not None})
        return [Difference(a, b, family.get(number)) for number, (a, b) in enumerate(pairs)]

    @property
    def rates(self) -> list[float]:
        """Learning rates of all runs, in order."""
        return sorted({setting.lr for setting in self.settings})

    def best_by_rate(self, norm: str) -> dict[float, NormRuns]:
        """For each learning rate of a norm its best setting; one without scores if all runs diverged."""
        by_rate: dict[float, list[NormRuns]] = {}
        for one in self.settings:
            if one.norm == norm:
                by_rate.setdefault(one.lr, []).append(one)
        return {rate: self._best_of(some) for rate, some in sorted(by_rate.items())}

    def _best_of(self, settings: Sequence[NormRuns]) -> NormRuns:
        finished = [one for one in settings if one.scores]
        return _highest(finished, self.score_names[0]) if finished else settings[0]


def compare_norms(records: Iterable[Record], diverged: Iterable[DivergedRun] = ()) -> list[Experiment]:
    """Group runs by experiment and find the best setting of each norm.

    The best setting has the highest mean of the first score (ACC; mAP for several labels). A setting does not count if
    one of its seeds diverged, or if it has fewer than half of the seeds of another setting of its norm, unless no other
    is left. If the records include validation runs of the same experiment, these choose the setting.

    Args:
        records: Records of finished runs.
        diverged: Diverged runs; those without settings are left out.

    Returns:
        The experiments: first those on test tasks, and of these first those with several norms.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
        >>> configs = [from_dict({"norm": {"name": "bn"}, "train": {"lr": lr}}) for lr in (0.1, 0.3)]
        >>> matrices = [AccuracyMatrix([[correct]], [10]) for correct in (6, 8)]
        >>> records = [Record(config, 0, matrix, {}, {}) for config, matrix in zip(configs, matrices)]
        >>> [experiment] = compare_norms(records)
        >>> experiment.title, [(best.norm, best.setting.lr, best.tried) for best in experiment.best]
        ('permuted-mnist, single', [('bn', 0.3, 2)])
    """
    settings: dict[Key, dict[Key, NormRuns]] = {}
    configs: dict[Key, RunConfig] = {}
    for record in sorted(records, key=lambda r: (run_names(r.config), r.config.hash, r.seed)):
        experiment = _experiment_key(record.config)
        configs.setdefault(experiment, record.config)
        _add(settings.setdefault(experiment, {}), record)
    for run in diverged:
        if run.config is not None and _experiment_key(run.config) in settings:
            by_key = settings[_experiment_key(run.config)]
            _setting(by_key, run.config, run.config.evaluate.moments).diverged.add(run.seed)
    titles = _titles(configs)
    experiments = [
        _experiment(titles[key], configs[key], list(by_key.values()), _validation_settings(key, settings, configs))
        for key, by_key in settings.items()
    ]
    return sorted(experiments, key=lambda one: (bool(one.validation), len(one.best) < 2, one.title))


def _is_experiment_key(key: str) -> bool:
    return key in EXPERIMENT_KEYS or key.startswith(EXPERIMENT_GROUPS)


def _experiment_values(config: RunConfig) -> dict[str, Any]:
    """Settings of an experiment that are changed from the defaults of its stream and strategy."""
    return {
        key: value
        for key, value in changed(config).items()
        if _is_experiment_key(key) and not (value is None and key in DEFAULT_IF_NONE)
    }


@lru_cache(maxsize=4096)
def _experiment_key(config: RunConfig) -> Key:
    names = [("stream.name", config.stream.name), ("strategy.name", config.strategy.name)]
    values = {key: format_value(value) for key, value in _experiment_values(config).items()}
    return tuple(sorted({**dict(names), **values}.items()))


def _add(settings: dict[Key, NormRuns], record: Record) -> None:
    """Add a record to its setting; with exact moments, its evaluation with running moments is one of another norm."""
    for moments, (scores, curve) in _evaluations(record):
        setting = _setting(settings, record.config, moments)
        if record.seed not in setting.scores:  # settings of evaluation alone may give several records of a seed
            setting.records[record.seed] = record
            setting.scores[record.seed] = scores
            setting.curves[record.seed] = curve


def _evaluations(record: Record) -> Iterator[tuple[str, tuple[dict[str, float], list[float]]]]:
    """Scores and the curve over tasks, by the moments of the evaluation."""
    if not record.multi_label:
        for moments, matrix in record.evaluated.items():
            yield moments, ({name: score(matrix, name) for name in SCORES}, acc_so_far(matrix))
        return
    for moments, counts in record.labels_evaluated.items():
        scores = {name: label_score(counts, name) for name in LABEL_SCORES}
        yield moments, (scores, [mean_ap(row) for row in counts.tally])


def _setting(settings: dict[Key, NormRuns], config: RunConfig, moments: str) -> NormRuns:
    """The setting of a run in an experiment; it is added if it is new."""
    norm = run_names(config)[2] + moments_label(moments, config.evaluate.weights)
    values = {
        key: value
        for key, value in flatten_settings(config.as_dict()).items()
        if not (_is_experiment_key(key) or key in NORM_KEYS or key.startswith(EVALUATION_GROUP))
    }
    key = (("norm", norm), *((key, format_value(value)) for key, value in values.items()))
    return settings.setdefault(key, NormRuns(norm, values))


def _titles(configs: Mapping[Key, RunConfig]) -> dict[Key, str]:
    """Titles of experiments: stream, strategy, and what differs between experiments of equal stream and strategy."""
    by_names: dict[tuple[str, ...], list[Key]] = {}
    for key, config in configs.items():
        by_names.setdefault(run_names(config)[:2], []).append(key)
    titles = {}
    for names, keys in by_names.items():
        varying = _varying_experiment_keys([configs[key] for key in keys])
        for key in keys:
            settings = flatten_settings(configs[key].as_dict())
            values = [(one, settings[one]) for one in varying if settings.get(one) is not None]
            parts = [f"{short_key(one)}={format_value(value)}" for one, value in values]
            titles[key] = ", ".join(filter(None, [*names, *parts, _validation_data(configs[key])]))
    return titles


def _varying_experiment_keys(configs: Sequence[RunConfig]) -> list[str]:
    keys = dict.fromkeys(key for config in configs for key in _experiment_values(config) if key not in IN_TITLE)
    settings = [flatten_settings(config.as_dict()) for config in configs]
    return [key for key in keys if len({format_value(values.get(key)) for values in settings}) > 1]


def _experiment(
    title: str, config: RunConfig, settings: list[NormRuns], validation: tuple[str, list[NormRuns]]
) -> Experiment:
    name = (LABEL_SCORES if any(r.multi_label for s in settings for r in s.records.values()) else SCORES)[0]
    data = _validation_data(config)
    by_norm: dict[str, list[NormRuns]] = {}
    for setting in settings:
        by_norm.setdefault(setting.norm, []).append(setting)
    best = [_best(norm, some, data, validation, name) for norm, some in by_norm.items()]
    means = {one.norm: one.setting.mean(name) if one.setting else float("-inf") for one in best}
    best.sort(key=lambda one: (has_exact_moments(one.norm), -means[one.norm]))
    varying = _varying([setting.values for setting in settings])
    shared = {
        key: value
        for key, value in changed(config).items()
        if not (key in IN_TITLE or key in varying or key in NORM_KEYS or key.startswith(EVALUATION_GROUP))
        and not (value is None and key in DEFAULT_IF_NONE)
    }
    return Experiment(title, shared, data, settings, best)


def _validation_data(config: RunConfig) -> str:
    """What the scores of a validation run are of; empty for a run that is scored on test samples."""
    if config.stream.part == "validate":
        return "validation tasks"
    return "" if config.stream.holdout is None else "held-out training samples"


def _validation_settings(
    key: Key, settings: Mapping[Key, Mapping[Key, NormRuns]], configs: Mapping[Key, RunConfig]
) -> tuple[str, list[NormRuns]]:
    """Settings of the validation runs of an experiment, and what they are scored on; none if it is one itself."""
    if not _validation_data(configs[key]):
        for other, by_key in settings.items():
            data = _validation_data(configs[other])
            if data and _without_part(other) == _without_part(key):
                return data, list(by_key.values())
    return "", []


def _without_part(key: Key) -> Key:
    return tuple(item for item in key if item[0] not in PART_KEYS)


def _best(
    norm: str, settings: Sequence[NormRuns], data: str, validation: tuple[str, list[NormRuns]], name: str
) -> BestSetting:
    """Best setting of a norm: by the validation runs if their best setting was run here, otherwise by these runs.

    Args:
        norm: Label of the norm.
        settings: Its settings.
        data: What these runs are scored on, if they are validation runs.
        validation: What the validation runs are scored on, and the settings of all norms in them.
        name: Score that selects the setting.
    """
    finished = [one for one in settings if one.scores]
    validated = [one for one in validation[1] if one.norm == norm]
    if sum(bool(one.scores) for one in validated) > 1:
        chosen = _highest([one for one in validated if one.scores], name)
        same = [one for one in finished if one.values == chosen.values]
        if same:
            return BestSetting(norm, same[0], len(validated), validation[0])
    chosen_on = ONE_SETTING if len(settings) == 1 else data or ON_TEST
    return BestSetting(norm, _highest(finished, name) if finished else None, len(settings), chosen_on)


def _highest(settings: Sequence[NormRuns], name: str) -> NormRuns:
    """Setting with the highest mean; of equal ones that with the smallest learning rate."""
    stable = [one for one in settings if not one.diverged] or settings
    most = max(len(one.scores) for one in stable)
    candidates = [one for one in stable if len(one.scores) >= MIN_SHARE_OF_SEEDS * most]
    return max(candidates, key=lambda one: (one.mean(name), -one.lr))


def has_exact_moments(norm: str) -> bool:
    """Whether a label is that of a norm that is evaluated with exact moments, which are not available in practice.

    Example:
        >>> has_exact_moments("bn*"), has_exact_moments("bn")
        (True, False)
    """
    return norm.endswith("*")


def _compare(a: NormRuns, b: NormRuns, name: str) -> Verdict | None:
    """Comparison on shared seeds; None if there are none."""
    first, second = a.seed_scores(name), b.seed_scores(name)
    if not first.keys() & second.keys():
        return None
    return compare_scores(first, second, name, (a.norm, b.norm), diverged=a.diverged | b.diverged)


def _varying(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose value is not the same for all, and the learning rate, which is first."""
    keys = dict.fromkeys(key for one in values for key in one)  # own settings of a component are not in all
    varying = [key for key in keys if len({format_value(one.get(key)) for one in values}) > 1]
    return ["train.lr", *(key for key in varying if key != "train.lr")]


def short_key(key: str) -> str:
    """Name of a setting in legends and rows: settings of the training without their group, as in ``lr=0.01``.

    Example:
        >>> short_key("train.lr"), short_key("memory.size")
        ('lr', 'memory.size')
    """
    return key.removeprefix("train.")
