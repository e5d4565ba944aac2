"""Confidence intervals of scores over seeds, and the power of t tests. Needs no torch.

The intervals here are those of one comparison that is looked at once. Which sign a comparison has is decided by
`contnorm.bench.sequential`, which allows several looks and several comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.records import spread_over_seeds
from contnorm.errors import UserError

LEVEL = 0.95
POWER = 0.8
RESAMPLES = 10_000
FEWEST_SEEDS = 8  # for a bootstrap of the spread
_EXTREME_SHARE = 0.05  # share of the seeds that are dropped at either end

_Values: TypeAlias = "NDArray[np.float64]"


class Interval(NamedTuple):
    """Confidence interval from ``low`` to ``high``."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+.2f} to {self.high:+.2f}"

    def holds(self, value: float) -> bool:
        """Whether a value lies in the interval."""
        return self.low <= value <= self.high


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Two-sided Student's t interval of the mean; None for fewer than two values or if one is not finite.

    Example:
        >>> str(t_interval([1.0, 2.0, 3.0])), t_interval([1.0])
        ('-0.48 to +4.48', None)
    """
    mean, std = spread_over_seeds(list(values))
    if math.isnan(std):
        return None
    half = t_quantile(len(values) - 1, level) * std / math.sqrt(len(values))
    return Interval(mean - half, mean + half)


def welch_interval(values: Sequence[float], mean: float, std: float, runs: int) -> Interval | None:
    """Welch's t interval of the mean of ``values`` minus another mean, given its standard deviation and sample size.

    None if either sample has a single value or a standard deviation of 0: identical values do not allow an estimate of
    the variance.

    Example:
        >>> str(welch_interval([1.0, 2.0, 3.0], 2.0, 1.0, 3)), welch_interval([1.0, 2.0, 3.0], 2.0, 0.0, 3)
        ('-2.27 to +2.27', None)
    """
    ours, spread = spread_over_seeds(list(values))
    if not (spread > 0 and std > 0 and runs > 1):  # the comparison is also False for NaN
        return None
    a, b = spread**2 / len(values), std**2 / runs
    difference = ours - mean
    degrees_of_freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (runs - 1))
    half = t_quantile(degrees_of_freedom) * math.sqrt(a + b)
    return Interval(difference - half, difference + half)


def variance_ratio_interval(values: Sequence[float], others: Sequence[float]) -> Interval | None:
    """F interval of the variance of ``values`` over that of ``others``; None if either variance is undefined.

    Example:
        >>> interval = variance_ratio_interval([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
        >>> interval is not None and interval.low < 1 < interval.high
        True
    """
    (_, a), (_, b) = spread_over_seeds(list(values)), spread_over_seeds(list(others))
    if math.isnan(a) or math.isnan(b) or b == 0:
        return None
    ratio, n, m = (a / b) ** 2, len(values) - 1, len(others) - 1
    low, high = _scipy_stats().f.ppf([(1 - LEVEL) / 2, (1 + LEVEL) / 2], n, m)
    return Interval(float(ratio / high), float(ratio / low))


class PairedDifference(NamedTuple):
    """Differences on shared seeds.

    Attributes:
        differences: One per seed.
        mean: Mean of the differences.
        t: Student's 95 % interval of the mean; None for one seed.
    """

    differences: tuple[float, ...]
    mean: float
    t: Interval | None


def summarize_differences(differences: Sequence[float]) -> PairedDifference:
    """Mean and 95 % interval of differences.

    Example:
        >>> str(summarize_differences([1.0, 2.0, 3.0]).t)
        '-0.48 to +4.48'
    """
    return PairedDifference(tuple(differences), math.fsum(differences) / len(differences), t_interval(differences))


def t_test_power(effect: float, seeds: int, level: float = LEVEL) -> float:
    """Probability that a two-sided t test of paired seeds rejects zero, in the direction of the effect.

    Args:
        effect: True mean difference over the standard deviation of the differences.
        seeds: Number of pairs.
        level: Confidence level: 1 minus the size of the test.

    Example:
        >>> round(t_test_power(0.5, 34), 2), round(t_test_power(0.5, 34, level=0.99), 2)
        (0.81, 0.58)
    """
    critical = t_quantile(seeds - 1, level)
    return float(_scipy_stats().nct.sf(critical, seeds - 1, effect * math.sqrt(seeds)))


def equivalence_probability(margin: float, seeds: int, level: float = LEVEL) -> float:
    """Probability that a t interval lies within a margin around 0, if the true mean is 0.

    Args:
        margin: The margin, in standard deviations of the values.
        seeds: Number of values.
        level: Confidence level of the interval.

    Example:
        >>> [round(equivalence_probability(0.5, seeds), 2) for seeds in (16, 32, 64)]
        [0.08, 0.56, 0.95]
    """
    stats, quantile = _scipy_stats(), t_quantile(seeds - 1, level)
    shares = (np.arange(2000) + 0.5) / 2000  # the sample standard deviation at equally likely quantiles
    stds = np.sqrt(stats.chi2.ppf(shares, seeds - 1) / (seeds - 1))
    room = np.maximum(margin * math.sqrt(seeds) - quantile * stds, 0)
    return float(np.mean(2 * stats.norm.cdf(room) - 1))


@lru_cache(maxsize=4096)
def t_quantile(degrees_of_freedom: float, level: float = LEVEL) -> float:
    """Half width of a two-sided Student's t interval, in standard errors.

    Example:
        >>> round(t_quantile(4), 3), round(t_quantile(4, 0.99), 3)
        (2.776, 4.604)
    """
    return float(_scipy_stats().t.isf((1 - level) / 2, degrees_of_freedom))


class Ratio(NamedTuple):
    """A ratio of two spreads, and its bootstrap interval."""

    value: float
    interval: Interval

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.interval.low:.2f} to {self.interval.high:.2f})"


@dataclass(frozen=True)
class Spread:
    """Spread of a score over seeds of experiment a, divided by that of b, on the seeds that both have.

    Two measures of spread are compared. The variance is the usual one, but a few extreme seeds determine it. The mean
    absolute deviation from the median is less sensitive to the tails, and its bootstrap interval misses the true ratio
    less often. Both are also shown without the lowest and the highest seeds of each experiment.
    docs/concepts/deciding.md has simulated rates.

    Attributes:
        seeds: Number of shared seeds.
        extremes: Number of seeds at either end that are left out in the ratios without extreme seeds.
        variance: Ratio of the sample variances.
        deviation: Ratio of the mean absolute deviations from the median.
        variance_without_extremes, deviation_without_extremes: The same, without the lowest and the highest scores of a
            and those of b.

    Example:
        >>> narrow = {seed: 60 + (seed % 7) / 10 for seed in range(40)}
        >>> wide = {seed: 60 + 5 * ((3 * seed) % 7) / 10 for seed in range(40)}
        >>> spread = spread_ratio(wide, narrow)
        >>> spread.outcome, spread.extremes, round(spread.variance.value)
        ('larger', 2, 26)
    """

    seeds: int
    extremes: int
    variance: Ratio
    deviation: Ratio
    variance_without_extremes: Ratio
    deviation_without_extremes: Ratio

    @property
    def outcome(self) -> Literal["larger", "smaller", "undecided"]:
        """Whether a has the larger spread: both intervals of the mean absolute deviations lie on one side of 1."""
        intervals = (self.deviation.interval, self.deviation_without_extremes.interval)
        if all(interval.low > 1 for interval in intervals):
            return "larger"
        return "smaller" if all(interval.high < 1 for interval in intervals) else "undecided"

    def __str__(self) -> str:
        return (
            f"ratio of mean absolute deviations {self.deviation}, without the {self.extremes} lowest and highest seeds "
            f"of each {self.deviation_without_extremes}; variance ratio {self.variance}, without these seeds "
            f"{self.variance_without_extremes}; bootstrap intervals, {self.seeds} seeds"
        )


def spread_ratio(
    a: Mapping[int, float], b: Mapping[int, float], *, level: float = LEVEL, resamples: int = RESAMPLES
) -> Spread:
    """Compare the spread of two sets of scores on their shared seeds.

    Seeds are resampled as pairs, with fixed random numbers, and the intervals are percentiles of the ratios. Extreme
    seeds are 5 % at either end, and at least one.

    Args:
        a, b: Scores by seed.
        level: Confidence level of the intervals.
        resamples: Number of bootstrap samples.

    Raises:
        UserError: If there are fewer than 8 shared seeds, or if all scores of an experiment are equal.

    Example:
        >>> scores = {seed: float(seed % 5) for seed in range(20)}
        >>> spread_ratio(scores, scores).variance
        Ratio(value=1.0, interval=Interval(low=1.0, high=1.0))
    """
    seeds = sorted(a.keys() & b.keys())
    if len(seeds) < FEWEST_SEEDS:
        raise UserError(f"the spread over seeds needs {FEWEST_SEEDS} shared seeds or more, got {len(seeds)}.")
    extremes = max(1, round(_EXTREME_SHARE * len(seeds)))
    whole = [np.array([scores[seed] for seed in seeds], dtype=np.float64) for scores in (a, b)]
    middle = [values.copy() for values in whole]
    for values in middle:
        order = np.argsort(values, kind="stable")
        values[[*order[:extremes], *order[-extremes:]]] = math.nan  # so that every seed keeps its place
    if not all(np.nanmax(values) > np.nanmin(values) for values in (*whole, *middle)):
        raise UserError("all scores of an experiment are equal, so its spread can't be compared.")
    samples = np.random.default_rng(0).integers(0, len(seeds), (resamples, len(seeds)))

    def ratio(pair: Sequence[_Values], scale: Callable[[_Values], _Values]) -> Ratio:
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have one value only
            ratios = scale(pair[0][samples]) / scale(pair[1][samples])
        low, high = np.nanquantile(ratios, [(1 - level) / 2, (1 + level) / 2])
        return Ratio(float(scale(pair[0]) / scale(pair[1])), Interval(float(low), float(high)))

    ratios = [ratio(pair, scale) for pair in (whole, middle) for scale in (_variance, _deviation)]
    return Spread(len(seeds), extremes, *ratios)


def _variance(values: _Values) -> _Values:
    """Sample variance over the last dimension, without NaN."""
    count = np.count_nonzero(~np.isnan(values), axis=-1)
    centered = values - (np.nansum(values, axis=-1) / np.maximum(count, 1))[..., None]
    variance: _Values = np.nansum(centered**2, axis=-1) / (count - 1)
    return variance


def _deviation(values: _Values) -> _Values:
    """Mean absolute deviation from the median over the last dimension, without NaN."""
    ordered = np.sort(values, axis=-1)  # NaN at the end; faster than nanmedian
    count = np.maximum(np.count_nonzero(~np.isnan(values), axis=-1), 1)
    low, high = ((count - 1) // 2)[..., None], (count // 2)[..., None]
    median = (np.take_along_axis(ordered, low, -1) + np.take_along_axis(ordered, high, -1)) / 2
    deviation: _Values = np.nansum(np.abs(values - median), axis=-1) / count
    return deviation


def _scipy_stats() -> Any:
    """Import scipy.stats on use: it takes most of a second, and few commands compute intervals."""
    return import_module("scipy.stats")
