"""Paired comparison of two experiments on the seeds that both have."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from contnorm.bench.config.defaults import varying
from contnorm.bench.config.schema import RunConfig, flatten_settings
from contnorm.bench.config.sources import format_value
from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.bench.records import Record
from contnorm.bench.stats import Interval, effect_size, paired_difference
from contnorm.bench.streams.tasks import STREAMS, stream_defaults
from contnorm.errors import UserError

__all__ = ["Comparison", "compare", "scores_of", "seeds_to_resolve"]

POWER, LEVEL = 0.8, 0.95
MOST_SEEDS = 1_000_000
SHOWN = 4  # settings, and values of a setting, that a message names


class _HasRecords(Protocol):
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
            zero, with a probability of 80 %); None if it can't be estimated.
        only_a, only_b: Seeds that only one of the experiments has; they are not compared.
        same_settings: Whether a and b are the same experiment.
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


def compare(
    a: _HasRecords | Iterable[Record], b: _HasRecords | Iterable[Record], score: str | None = None
) -> Comparison:
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
    first, second = _by_seed(a, "a"), _by_seed(b, "b")
    configs = [next(iter(records.values())).config for records in (first, second)]
    _check_streams(*configs)
    seeds = tuple(sorted(first.keys() & second.keys()))
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
    pair = paired_difference({s: scores[s][score] for s in seeds}, {s: others[s][score] for s in seeds})
    assert pair is not None  # there are shared seeds
    needed = seeds_to_resolve(pair.differences)
    return Comparison(
        score,
        seeds,
        pair.differences,
        pair.mean,
        pair.t,
        pair.bootstrap,
        pair.effect,
        needed,
        only_a=tuple(sorted(first.keys() - second.keys())),
        only_b=tuple(sorted(second.keys() - first.keys())),
        same_settings=configs[0].hash == configs[1].hash,
    )


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
    effect = abs(effect_size(differences)) if len(differences) > 1 else math.nan
    if not effect > 0:  # also False for NaN
        return None
    low, high = 1, 2
    while high < MOST_SEEDS and _power(effect, high) < POWER:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _power(effect, middle) < POWER else (low, middle)
    return high


def _power(effect: float, seeds: int) -> float:
    """Probability that a two-sided paired t test rejects zero."""
    stats = import_module("scipy.stats")  # takes half a second to import
    critical = stats.t.ppf((1 + LEVEL) / 2, seeds - 1)
    return float(stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds)))


def _by_seed(runs: _HasRecords | Iterable[Record], name: str) -> dict[int, Record]:
    records: list[Any] = list(runs) if isinstance(runs, Iterable) else list(getattr(runs, "records", [runs]))
    if not all(isinstance(record, Record) for record in records):
        raise UserError(f"{name}={runs!r}: use a result of bench.run, a selection of bench.load_runs, or records.")
    if not records:
        raise UserError(f"{name} has no records to compare.")
    configs = list({record.config.hash: record.config for record in records}.values())
    if len(configs) > 1:
        raise UserError(
            f"{name} has records of {len(configs)} experiments, which differ in {_list_variations(configs)}. Select "
            f"one with where(...)."
        )
    return {record.seed: record for record in records}


def _list_variations(configs: Sequence[RunConfig]) -> str:
    """Settings in which experiments differ, with their values."""
    settings = [flatten_settings(config.as_dict()) for config in configs]
    # Defaults differ between streams and strategies; they are named only if nothing else differs.
    chosen = varying(configs)
    keys = [key for key in settings[0] if key in chosen] or [
        key for key in settings[0] if len({format_value(values[key]) for values in settings}) > 1
    ]
    variations = []
    for key in keys[:SHOWN]:
        values = list(dict.fromkeys(format_value(of_run[key]) for of_run in settings))
        variations.append(f"{key} ({', '.join([*values[:SHOWN], *(['...'] if len(values) > SHOWN else [])])})")
    rest = [f"{len(keys) - SHOWN} more"] if len(keys) > SHOWN else []
    return ", ".join([*variations, *rest])


def _check_streams(a: RunConfig, b: RunConfig) -> None:
    """Reject experiments of different streams: runs of the same seed have other data then, so they are not pairs."""
    first, second = _stream_settings(a), _stream_settings(b)
    for key, value in first.items():
        if value != second[key]:
            raise UserError(
                f"a and b have different streams, so their seeds are not pairs: stream.{key} is {format_value(value)} "
                f"and {format_value(second[key])}. Compare experiments of the same stream."
            )


def _stream_settings(config: RunConfig) -> dict[str, Any]:
    """Settings of a stream, with its defaults where none are recorded."""
    settings: dict[str, Any] = config.as_dict()["stream"]
    spec = STREAMS.get(config.stream.name)
    defaults = {} if spec is None else stream_defaults(spec, config.stream.scenario).get("stream", {})
    return {key: defaults.get(key) if value is None else value for key, value in settings.items()}
