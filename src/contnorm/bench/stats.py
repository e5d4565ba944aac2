"""95 % confidence intervals, and paired and unpaired comparisons of scores over seeds. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from statistics import fmean
from typing import Any, NamedTuple

from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.bench.records import spread_over_seeds

__all__ = [
    "Interval",
    "PairedDifference",
    "bootstrap_difference",
    "bootstrap_interval",
    "cohens_d",
    "effect_size",
    "equivalence_probability",
    "paired_difference",
    "paired_p_value",
    "seeds_for_effect",
    "std_interval",
    "summarize_differences",
    "t_interval",
    "t_quantile",
    "t_test_power",
    "variance_ratio_interval",
    "welch_interval",
    "welch_p_value",
]

LEVEL = 0.95
POWER = 0.8
RESAMPLES = 10_000
MOST_SEEDS = 1_000_000  # limit of `seeds_for_effect`


class Interval(NamedTuple):
    """Confidence interval from ``low`` to ``high``."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+.2f} to {self.high:+.2f}"

    def holds(self, value: float) -> bool:
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


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Bootstrap interval of the mean (percentile method), with a fixed seed.

    With few values it is narrower than Student's t interval, and too narrow.

    Example:
        >>> bootstrap_interval([2.0, 2.0, 2.0]), bootstrap_interval([1.0])
        (Interval(low=2.0, high=2.0), None)
    """
    return _bootstrap((values,), np.mean, seed)


def bootstrap_difference(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """Bootstrap interval of the mean of ``values`` minus that of ``others``; both are resampled independently.

    Example:
        >>> bootstrap_difference([3.0, 3.0], [1.0, 1.0]), bootstrap_difference([3.0, 3.0], [1.0])
        (Interval(low=2.0, high=2.0), None)
    """
    return _bootstrap((values, others), _mean_difference, seed)


def effect_size(differences: Sequence[float]) -> float:
    """Mean of paired differences over their standard deviation; NaN for a single one or if all are equal.

    Example:
        >>> effect_size([1.0, 2.0, 3.0])
        2.0
    """
    mean, std = spread_over_seeds(list(differences))
    return mean / std if std > 0 else float("nan")


def cohens_d(values: Sequence[float], others: Sequence[float]) -> float:
    """Difference of two means over the pooled standard deviation (Cohen's d); NaN if that is 0 or undefined.

    Example:
        >>> cohens_d([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
        1.0
    """
    (mean, a), (other, b) = spread_over_seeds(list(values)), spread_over_seeds(list(others))
    n, m = len(values) - 1, len(others) - 1
    pooled = (n * a**2 + m * b**2) / (n + m) if n and m else math.nan
    return (mean - other) / math.sqrt(pooled) if pooled > 0 else math.nan


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


def std_interval(values: Sequence[float]) -> Interval | None:
    """Chi-squared interval of the standard deviation of normally distributed values; None if it is undefined.

    Example:
        >>> interval = std_interval([1.0, 2.0, 3.0, 4.0, 5.0])
        >>> interval and (round(interval.low, 2), round(interval.high, 2))
        (0.95, 4.54)
    """
    _, std = spread_over_seeds(list(values))
    if math.isnan(std):
        return None
    degrees_of_freedom = len(values) - 1
    quantiles = _scipy_stats().chi2.ppf([(1 + LEVEL) / 2, (1 - LEVEL) / 2], degrees_of_freedom)
    low, high = (std * math.sqrt(degrees_of_freedom / float(quantile)) for quantile in quantiles)
    return Interval(low, high)


def paired_p_value(differences: Sequence[float]) -> float:
    """p value of a two-sided paired t test; NaN for fewer than two differences or if all are equal.

    Example:
        >>> round(paired_p_value([1.0, 2.0, 3.0]), 4)
        0.0742
    """
    effect = effect_size(differences)
    if math.isnan(effect):
        return math.nan
    count = len(differences)
    return float(2 * _scipy_stats().t.sf(abs(effect) * math.sqrt(count), count - 1))


def welch_p_value(values: Sequence[float], others: Sequence[float]) -> float:
    """p value of Welch's two-sided t test; NaN where `welch_interval` is None.

    Example:
        >>> round(welch_p_value([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]), 4)
        0.0705
    """
    mean, std = spread_over_seeds(list(others))
    if welch_interval(values, mean, std, len(others)) is None:
        return math.nan
    return float(_scipy_stats().ttest_ind(values, others, equal_var=False).pvalue)


def seeds_for_effect(effect: float, samples: int = 1, *, power: float = POWER, level: float = LEVEL) -> int | None:
    """Smallest number of seeds with which a t test, by default at 5 %, detects an effect with a power of 80 %.

    It is computed from the noncentral t distribution, and assumes normally distributed differences and that the effect
    is the true one. The result is at most `MOST_SEEDS`.

    Args:
        effect: Mean over standard deviation: of paired differences, or with two samples of the difference of means
            over the pooled standard deviation (Cohen's d).
        samples: 1 for paired seeds, 2 for two experiments without common seeds; the number is of each.
        power: Probability of detection.
        level: Confidence level: 1 minus the size of the test.

    Returns:
        The number, or None if the effect is 0 or not finite.

    Example:
        >>> seeds_for_effect(0.5), seeds_for_effect(0.5, samples=2), seeds_for_effect(0.0)
        (34, 64, None)
    """
    size = abs(effect)
    if not 0 < size < math.inf:  # also False for NaN
        return None
    low, high = 1, 2
    while high < MOST_SEEDS and t_test_power(size, high, samples, level) < power:
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if t_test_power(size, middle, samples, level) < power else (low, middle)
    return high


def t_test_power(effect: float, seeds: int, samples: int = 1, level: float = LEVEL) -> float:
    """Probability that a two-sided t test rejects zero, in the direction of the effect.

    Example:
        >>> round(t_test_power(0.5, 34), 2), round(t_test_power(0.5, 34, level=0.99), 2)
        (0.81, 0.58)
    """
    degrees_of_freedom = samples * (seeds - 1)
    critical = t_quantile(degrees_of_freedom, level)
    return float(_scipy_stats().nct.sf(critical, degrees_of_freedom, effect * math.sqrt(seeds / samples)))


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


@dataclass(frozen=True)
class PairedDifference:
    """Differences on shared seeds.

    Attributes:
        differences: One per seed.
        mean: Mean of the differences.
        t: Student's t interval of the mean; None for one seed.
        bootstrap: Bootstrap interval of the mean; None for one seed.
        effect: Mean over standard deviation; NaN for one seed or if all differences are equal.
    """

    differences: tuple[float, ...]
    mean: float
    t: Interval | None
    bootstrap: Interval | None
    effect: float


def paired_difference(values: Mapping[int, float], others: Mapping[int, float]) -> PairedDifference | None:
    """Compare ``values`` minus ``others`` on their shared seeds; None if they share none.

    Example:
        >>> pair = paired_difference({0: 3.0, 1: 5.0, 2: 9.0}, {0: 1.0, 1: 2.0})
        >>> pair and (pair.differences, pair.mean)
        ((2.0, 3.0), 2.5)
    """
    seeds = sorted(values.keys() & others.keys())
    return summarize_differences([values[seed] - others[seed] for seed in seeds]) if seeds else None


def summarize_differences(differences: Sequence[float]) -> PairedDifference:
    """Mean, intervals and effect size of differences.

    Example:
        >>> str(summarize_differences([1.0, 2.0, 3.0]).t)
        '-0.48 to +4.48'
    """
    return PairedDifference(
        tuple(differences),
        fmean(differences),
        t_interval(differences),
        bootstrap_interval(differences),
        effect_size(differences),
    )


def _bootstrap(samples: tuple[Sequence[float], ...], statistic: Callable[..., Any], seed: int) -> Interval | None:
    """Percentile interval of a statistic; None if a sample has fewer than two values or one is NaN."""
    if min(map(len, samples)) < 2 or any(math.isnan(value) for sample in samples for value in sample):
        return None
    generator = np.random.default_rng(seed)
    result = _scipy_stats().bootstrap(
        samples, statistic, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile", rng=generator
    )
    return Interval(float(result.confidence_interval.low), float(result.confidence_interval.high))


def _mean_difference(values: NDArray[np.float64], others: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    difference: NDArray[np.float64] = values.mean(axis=axis) - others.mean(axis=axis)
    return difference


@lru_cache(maxsize=4096)
def t_quantile(degrees_of_freedom: float, level: float = LEVEL) -> float:
    """Half width of a two-sided Student's t interval, in standard errors.

    Example:
        >>> round(t_quantile(4), 3), round(t_quantile(4, 0.99), 3)
        (2.776, 4.604)
    """
    return float(_scipy_stats().t.ppf((1 + level) / 2, degrees_of_freedom))


def _scipy_stats() -> Any:
    """Import scipy.stats on use: it takes most of a second, and few commands compute intervals."""
    return import_module("scipy.stats")
