"""Paired comparison of two experiments on the seeds that both have."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from contnorm.bench.config.defaults import resolved_settings, run_names, varying
from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.bench.config.sources import format_value
from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.records import Record, spread_over_seeds
from contnorm.bench.selection import SHORT_KEYS, setting_keys
from contnorm.bench.spread import Spread, spread_ratio
from contnorm.bench.stats import (
    MOST_SEEDS,
    Interval,
    cohens_d,
    effect_size,
    paired_difference,
    paired_p_value,
    seeds_for_effect,
    t_interval,
    welch_interval,
    welch_p_value,
)
from contnorm.errors import UserError

__all__ = [
    "Comparison",
    "HasRecords",
    "PairedScores",
    "check_streams",
    "compare",
    "compare_spread",
    "differing_keys",
    "experiment_names",
    "list_variations",
    "paired_scores",
    "paired_verdict",
    "score_title",
    "scores_of",
    "seeds_to_resolve",
    "short_key",
    "unpaired_verdict",
]

SHOWN = 4  # settings, and values of a setting, that a message names


class HasRecords(Protocol):
    """An object with records, such as a `bench.Result` or `bench.Runs`."""

    @property
    def records(self) -> list[Record]: ...


@dataclass(frozen=True)
class Comparison:
    """The difference of a score between two experiments, a minus b, on the seeds that both have.

    Attributes:
        score: Name of the score.
        seeds: The shared seeds.
        differences: The difference for each of them, in percentage points.
        mean: Mean difference.
        interval: 95 % interval of the mean (Student's t); None for one seed.
        bootstrap: Bootstrap 95 % interval; too narrow with few seeds. None for one seed.
        effect: Mean over standard deviation of the differences; NaN for one seed.
        seeds_needed: Number of seeds with which a difference of this size would be resolved (95 % interval without
            zero, with a probability of 80 %), if mean and standard deviation stay as observed; None if it can't be
            estimated.
        only_a, only_b: Seeds that only one of the experiments has; they are not compared.
        same_settings: Whether a and b are the same experiment.
        p: p value of a two-sided paired t test; NaN for one seed or if all differences are equal.
        names: Names of a and b in the verdict: what their settings differ in.
        differing: Keys of the settings in which a and b differ, apart from defaults of streams and strategies.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> from contnorm.bench.records import make_record
        >>> def records(norm, correct):
        ...     config = from_dict({"norm": {"name": norm}})
        ...     counts = [{"matrix": {"correct": [[count]], "total": [100]}} for count in correct]
        ...     return [make_record(config, seed, one) for seed, one in enumerate(counts)]
        >>> difference = compare(records("cn", [70, 74, 75]), records("bn", [60, 65, 62]))
        >>> round(difference.mean, 2), difference.resolved, difference.differing
        (10.67, True, ('norm.name',))
    """

    score: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    mean: float
    interval: Interval | None
    bootstrap: Interval | None
    effect: float
    seeds_needed: int | None
    only_a: tuple[int, ...] = ()
    only_b: tuple[int, ...] = ()
    same_settings: bool = False
    p: float = math.nan
    names: tuple[str, str] = ("a", "b")
    differing: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Which experiment has the higher score, in a sentence; or that it is undecided, with the seeds needed."""
        return paired_verdict(self.score, self.names, self.differences)

    @property
    def resolved(self) -> bool:
        """Whether the 95 % interval does not contain zero."""
        return self.interval is not None and not self.interval.holds(0)

    @property
    def identical(self) -> bool:
        """Whether a and b have the same score for every shared seed."""
        return not any(self.differences)

    def __str__(self) -> str:
        parts = [f"{self.score}: {self.mean:+.2f} points"]
        if self.identical:
            parts = [f"{self.score}: no difference, the values of a and b are identical"]
        elif self.interval is not None:
            parts[0] += f", 95 % interval {self.interval}"
            parts[0] += "" if math.isnan(self.effect) else f", effect {self.effect:+.2f}"
        parts += ["a and b are the same experiment"] if self.same_settings else []
        parts.append(f"{len(self.seeds)} {'seed' if len(self.seeds) == 1 else 'seeds'} in common")
        parts += [f"{len(rest)} only in {name}" for name, rest in (("a", self.only_a), ("b", self.only_b)) if rest]
        if self.identical:
            return "; ".join(parts)
        if self.interval is None:
            parts.append("more seeds are needed for an interval")
        elif not self.resolved and self.seeds_needed is not None:
            parts.append(f"to resolve a difference of this size, about {self.seeds_needed} seeds would be needed")
        return "; ".join(parts)

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(str(self))}</p>"


def compare(a: HasRecords | Iterable[Record], b: HasRecords | Iterable[Record], score: str | None = None) -> Comparison:
    """Compare two experiments: the score of ``a`` minus that of ``b``, paired over the seeds that both have.

    Args:
        a, b: Results of `bench.run`, selections of `bench.load_runs`, or records; each of one experiment.
        score: Name of the score, such as ``"acc"`` or ``"fm"``; by default the first one.

    Raises:
        UserError: If the experiments have different streams, or no seed or no score in common, or if one of them is
            several experiments.

    Example:
        >>> runs = load_runs("runs")  # doctest: +SKIP
        >>> compare(runs.where(norm="cn"), runs.where(norm="bn"))  # doctest: +SKIP
    """
    scores = paired_scores(a, b, score)
    pair = paired_difference(scores.a, scores.b)
    assert pair is not None  # there are shared seeds
    needed = seeds_to_resolve(pair.differences)
    configs = scores.configs
    return Comparison(
        scores.name,
        tuple(sorted(scores.a)),
        pair.differences,
        pair.mean,
        pair.t,
        pair.bootstrap,
        pair.effect,
        needed,
        only_a=scores.only_a,
        only_b=scores.only_b,
        same_settings=configs[0].hash == configs[1].hash,
        p=paired_p_value(pair.differences),
        names=experiment_names(*configs),
        differing=tuple(differing_keys(*configs)),
    )


@dataclass(frozen=True)
class PairedScores:
    """One score of two experiments, on the seeds that both have.

    Attributes:
        name: Name of the score.
        a, b: The score by seed.
        configs: Settings of a and b.
        only_a, only_b: Seeds that only one of the experiments has.
    """

    name: str
    a: dict[int, float]
    b: dict[int, float]
    configs: tuple[RunConfig, RunConfig]
    only_a: tuple[int, ...] = ()
    only_b: tuple[int, ...] = ()


def paired_scores(
    a: HasRecords | Iterable[Record],
    b: HasRecords | Iterable[Record],
    score: str | None = None,
    *,
    defined: bool = False,
) -> PairedScores:
    """Scores of two experiments on the seeds that both have; arguments and errors are those of `compare`.

    With ``defined``, a score that is NaN for all seeds is an error too.
    """
    first, second = _by_seed(a, "a"), _by_seed(b, "b")
    configs = next(iter(first.values())).config, next(iter(second.values())).config
    check_streams(*configs)
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        raise UserError(
            f"the two experiments have no seed in common: {sorted(first)} and {sorted(second)}. Run both with the same "
            f"seeds."
        )
    scores, others = ({seed: scores_of(records[seed]) for seed in seeds} for records in (first, second))
    known = [name for name in scores[seeds[0]] if name in others[seeds[0]]]
    if not known:
        raise UserError(f"the two experiments have no score in common: {', '.join(scores[seeds[0]])} and others.")
    score = score or known[0]
    if score not in known:
        raise UserError(f"score {score!r}: use one that both experiments have: {', '.join(known)}.")
    values, theirs = ({seed: found[seed][score] for seed in seeds} for found in (scores, others))
    if defined and all(math.isnan(values[seed] - theirs[seed]) for seed in seeds):
        raise UserError(
            f"score {score!r} has no value in these runs, such as the forgetting of a single task. Use another score."
        )
    return PairedScores(
        score,
        values,
        theirs,
        configs,
        only_a=tuple(sorted(first.keys() - second.keys())),
        only_b=tuple(sorted(second.keys() - first.keys())),
    )


def compare_spread(
    a: HasRecords | Iterable[Record], b: HasRecords | Iterable[Record], score: str | None = None
) -> Spread:
    """Compare the spread of a score over seeds: that of ``a`` over that of ``b``, on the seeds that both have.

    Args:
        a, b: As in `compare`.
        score: Name of the score; by default the first one.

    Raises:
        UserError: As in `compare`, and for fewer than 8 shared seeds.

    Example:
        >>> runs = load_runs("runs")  # doctest: +SKIP
        >>> compare_spread(runs.where(norm="bn"), runs.where(norm="cn")).sentence  # doctest: +SKIP
    """
    scores = paired_scores(a, b, score, defined=True)
    spread = spread_ratio(scores.a, scores.b)
    return replace(spread, score=score_title(scores.name), names=experiment_names(*scores.configs))


def scores_of(record: Record) -> dict[str, float]:
    """Return every score of a record that its measurements allow, by name; in percent."""
    scores = {}
    for name in LABEL_SCORES if record.multi_label else SCORES:
        with suppress(ValueError):  # such as forward transfer, for which later tasks must be measured too
            scores[name] = record.score(name)
    return scores


def seeds_to_resolve(differences: Sequence[float]) -> int | None:
    """Return the number of seeds with which the mean of such differences is resolved.

    It is the smallest number for which a paired t test at 5 % rejects zero with a probability of 80 %, if mean and
    standard deviation are those of the differences. None for fewer than two differences, or if all are equal.

    Example:
        >>> seeds_to_resolve([1.0, 2.0, 3.0]), seeds_to_resolve([-1.0, 2.0, 0.5]), seeds_to_resolve([1.0, 1.0])
        (5, 73, None)
    """
    return seeds_for_effect(effect_size(differences)) if len(differences) > 1 else None


def paired_verdict(score: str, names: tuple[str, str], differences: Sequence[float]) -> str:
    """Sentence on which experiment has the higher score, from the differences of paired seeds.

    Args:
        score: Name of the score.
        names: Names of the first and the second experiment.
        differences: First minus second, for each seed.

    Example:
        >>> paired_verdict("acc", ("cn", "bn"), [1.0, 1.5, 2.0, 1.2])
        'cn is higher than bn in ACC by 1.43 points (95 % interval 0.73 to 2.12, 4 paired seeds, p = 0.007).'
    """
    seeds = f"{len(differences)} paired seed{'' if len(differences) == 1 else 's'}"
    if not any(differences):
        return f"No difference: {names[0]} and {names[1]} have the same {score_title(score)} in {seeds}."
    mean, interval = math.fsum(differences) / len(differences), t_interval(differences)
    if math.isnan(effect_size(differences)):
        if len(differences) == 1 or interval is None:
            return f"Undecided: {_difference(score, names, mean)} ({seeds}). An interval needs two seeds or more."
        return f"Undecided: {_difference(score, names, mean)} in each of {seeds}. Equal differences have no interval."
    test = "paired t test"
    return _verdict(
        score, names, mean, interval, seeds, paired_p_value(differences), seeds_to_resolve(differences), test
    )


def unpaired_verdict(score: str, names: tuple[str, str], values: Sequence[float], others: Sequence[float]) -> str:
    """Sentence on which experiment has the higher score, if their seeds are not paired.

    Args:
        score: Name of the score.
        names: Names of the first and the second experiment.
        values: Scores of the first.
        others: Scores of the second.

    Example:
        >>> unpaired_verdict("acc", ("cn", "bn"), [4.0, 5.0, 6.0], [1.0, 2.0, 3.0])
        'cn is higher than bn in ACC by 3.00 points (95 % interval 0.73 to 5.27, 3 and 3 unpaired seeds, p = 0.021).'
    """
    seeds = f"{len(values)} and {len(others)} unpaired seeds"
    mean, std = spread_over_seeds(list(others))
    difference = spread_over_seeds(list(values))[0] - mean
    interval = welch_interval(values, mean, std, len(others))
    if interval is None:
        reason = "An interval needs two seeds or more of each, with different scores."
        return f"Undecided: {_difference(score, names, difference)} ({seeds}). {reason}"
    needed = seeds_for_effect(cohens_d(values, others), samples=2)
    return _verdict(score, names, difference, interval, seeds, welch_p_value(values, others), needed, "t test")


def _verdict(
    score: str,
    names: tuple[str, str],
    mean: float,
    interval: Interval | None,
    seeds: str,
    p: float,
    needed: int | None,
    test: str,
) -> str:
    p_text = "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"
    if interval is not None and not interval.holds(0):
        low, high = sorted(map(abs, interval))
        direction = "higher" if mean > 0 else "lower"
        return (
            f"{names[0]} is {direction} than {names[1]} in {score_title(score)} by {abs(mean):.2f} points (95 % "
            f"interval {low:.2f} to {high:.2f}, {seeds}, {p_text})."
        )
    sentence = f"Undecided: {_difference(score, names, mean)} (95 % interval {interval}, {seeds}, {p_text})."
    if needed is None:
        return sentence
    count = f"More than {MOST_SEEDS:,}" if needed >= MOST_SEEDS else f"About {needed:,}"
    each = "" if test.startswith("paired") else " of each"
    return (
        f"{sentence} {count} seeds{each} would resolve a difference of this size (two-sided {test} at 5 %, power 80 %, "
        f"if mean and standard deviation stay as observed)."
    )


def _difference(score: str, names: tuple[str, str], mean: float) -> str:
    if not mean:
        return f"{names[0]} and {names[1]} have the same mean {score_title(score)}"
    direction = "higher" if mean > 0 else "lower"
    return f"{names[0]} is {abs(mean):.2f} points {direction} than {names[1]} in {score_title(score)}"


def score_title(score: str) -> str:
    """Name of a score in a sentence.

    Example:
        >>> score_title("acc"), score_title("fm_mammoth"), score_title("C-F1")
        ('ACC', 'fm_mammoth', 'C-F1')
    """
    return score.upper() if score in SCORES and "_" not in score else score


def differing_keys(a: RunConfig, b: RunConfig) -> list[str]:
    """Keys of settings in which two experiments differ, apart from defaults of their streams and strategies.

    Groups do not count if the norms differ and one of them has no groups.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> differing_keys(from_dict({"norm": {"name": "bn"}}), from_dict({"norm": {"name": "cn"}, "train": {"lr": 1}}))
        ['norm.name', 'train.lr']
    """
    first, second = resolved_settings(a), resolved_settings(b)
    keys = [key for key in varying([a, b]) if first.get(key) != second.get(key)]
    if first["norm.name"] != second["norm.name"] and None in (first["norm.groups"], second["norm.groups"]):
        keys = [key for key in keys if key not in ("norm.groups", "norm.auto_channels")]
    order = setting_keys()
    return sorted(keys, key=lambda key: order.index(key) if key in order else len(order))


def experiment_names(a: RunConfig, b: RunConfig) -> tuple[str, str]:
    """Names that distinguish two experiments: their norms, or the settings in which they differ; at most a few.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> bn, cn = (from_dict({"norm": {"name": name}}) for name in ("bn", "cn"))
        >>> experiment_names(cn, bn), experiment_names(bn, from_dict({"train": {"lr": 0.1}}))
        (('cn32', 'bn'), ('lr=0.03', 'lr=0.1'))
    """
    keys = differing_keys(a, b)
    norms = run_names(a)[-1], run_names(b)[-1]
    in_label = ("norm.name", "norm.groups", "norm.auto_channels", "norm.freeze_after")
    if norms[0] != norms[1] and all(key in in_label for key in keys):
        return norms
    if not 1 <= len(keys) <= SHOWN:
        return "a", "b"
    first, second = (
        ", ".join(f"{short_key(key)}={format_value(resolved_settings(config).get(key))}" for key in keys)
        for config in (a, b)
    )
    return first, second


def short_key(key: str) -> str:
    """Shortest key that selects a setting.

    Example:
        >>> short_key("norm.name"), short_key("train.lr"), short_key("strategy.code")
        ('norm', 'lr', 'strategy.code')
    """
    for short, full in SHORT_KEYS.items():
        if full == key:
            return short
    name = key.rpartition(".")[2]
    return name if [setting.rpartition(".")[2] for setting in setting_keys()].count(name) == 1 else key


def _by_seed(runs: HasRecords | Iterable[Record], name: str) -> dict[int, Record]:
    records: list[Any] = list(runs) if isinstance(runs, Iterable) else list(getattr(runs, "records", [runs]))
    if not all(isinstance(record, Record) for record in records):
        raise UserError(f"{name}={runs!r}: use a result of bench.run, a selection of bench.load_runs, or records.")
    if not records:
        raise UserError(f"{name} has no records to compare.")
    configs = list({record.config.hash: record.config for record in records}.values())
    if len(configs) > 1:
        raise UserError(
            f"{name} has records of {len(configs)} experiments, which differ in {list_variations(configs)}. Select "
            f"one with where(...)."
        )
    return {record.seed: record for record in records}


def list_variations(configs: Sequence[RunConfig]) -> str:
    """Settings in which experiments differ, with their values.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> list_variations([from_dict({"train": {"lr": lr}}) for lr in (0.03, 0.1)])
        'train.lr (0.03, 0.1)'
    """
    settings = [flatten_settings(config.as_dict()) for config in configs]
    known = dict.fromkeys(key for of_run in settings for key in of_run)  # components may have own settings
    # Defaults differ between streams and strategies; they are named only if nothing else differs.
    chosen = varying(configs)
    keys = [key for key in known if key in chosen] or [
        key for key in known if len({format_value(values.get(key)) for values in settings}) > 1
    ]
    variations = []
    for key in keys[:SHOWN]:
        values = list(dict.fromkeys(format_value(of_run.get(key)) for of_run in settings))
        variations.append(f"{key} ({', '.join([*values[:SHOWN], *(['...'] if len(values) > SHOWN else [])])})")
    rest = [f"{len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    return ", ".join([*variations, *rest])


def check_streams(a: RunConfig, b: RunConfig) -> None:
    """Reject experiments of different streams: runs of the same seed have other data then, so they are not pairs."""
    first, second = _stream_settings(a), _stream_settings(b)
    for key, value in first.items():
        if value != second[key]:
            raise UserError(
                f"a and b have different streams, so their seeds are not pairs: stream.{key} is {format_value(value)} "
                f"and {format_value(second[key])}. Compare experiments of the same stream."
            )


def _stream_settings(config: RunConfig) -> dict[str, Any]:
    """Settings of a stream by name, with its defaults where none are recorded."""
    settings = resolved_settings(config)
    return {name: settings[f"stream.{name}"] for name in config.as_dict()["stream"]}
