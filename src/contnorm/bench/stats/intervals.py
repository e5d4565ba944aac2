"""95 % confidence intervals: Student's t for one sample, Welch's t for two, bootstrap and variance ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.records import spread_over_seeds

__all__ = [
    "Interval",
    "bootstrap_apart",
    "bootstrap_interval",
    "effect_apart",
    "effect_size",
    "t_interval",
    "variance_ratio_interval",
    "welch_interval",
]

LEVEL = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    """Confidence interval from ``low`` to ``high``."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+.2f} to {self.high:+.2f}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def t_interval(values: Sequence[float]) -> Interval | None:
    """Two-sided Student's t interval of the mean; None for fewer than two values or if one is not finite.

    Example:
        >>> str(t_interval([1.0, 2.0, 3.0])), t_interval([1.0])
        ('-0.48 to +4.48', None)
    """
    mean, std = spread_over_seeds(list(values))
    if math.isnan(std):
        return None
    half = _t(len(values) - 1) * std / math.sqrt(len(values))
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
    half = _t(degrees_of_freedom) * math.sqrt(a + b)
    return Interval(difference - half, difference + half)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Bootstrap interval of the mean, with a fixed seed.

    With few values it is narrower than Student's t interval, and too narrow.

    Example:
        >>> bootstrap_interval([2.0, 2.0, 2.0]), bootstrap_interval([1.0])
        (Interval(low=2.0, high=2.0), None)
    """
    if len(values) < 2 or any(map(math.isnan, values)):
        return None
    generator = np.random.default_rng(seed)
    means = np.asarray(values)[generator.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    return _percentile_interval(means)


def bootstrap_apart(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """Bootstrap interval of the mean of ``values`` minus that of ``others``; both are resampled independently.

    Example:
        >>> bootstrap_apart([3.0, 3.0], [1.0, 1.0]), bootstrap_apart([3.0, 3.0], [1.0])
        (Interval(low=2.0, high=2.0), None)
    """
    if min(len(values), len(others)) < 2 or any(map(math.isnan, (*values, *others))):
        return None
    generator = np.random.default_rng(seed)
    samples = [
        np.asarray(group)[generator.integers(len(group), size=(RESAMPLES, len(group)))] for group in (values, others)
    ]
    return _percentile_interval(samples[0].mean(axis=1) - samples[1].mean(axis=1))


def effect_size(differences: Sequence[float]) -> float:
    """Mean of paired differences over their standard deviation; NaN for a single one or if all are equal.

    Example:
        >>> effect_size([1.0, 2.0, 3.0])
        2.0
    """
    mean, std = spread_over_seeds(list(differences))
    return mean / std if std > 0 else float("nan")


def effect_apart(values: Sequence[float], others: Sequence[float]) -> float:
    """Difference of two means over the pooled standard deviation (Cohen's d); NaN if that is 0 or undefined.

    Example:
        >>> effect_apart([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
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
    low, high = _quantiles().fdtri(n, m, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(ratio / high), float(ratio / low))


def _percentile_interval(samples: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _t(degrees_of_freedom: float) -> float:
    return float(_quantiles().stdtrit(degrees_of_freedom, (1 + LEVEL) / 2))


def _quantiles() -> Any:
    """SciPy's distribution functions, imported on use: every command imports this file, and few compute intervals."""
    return import_module("scipy.special")
