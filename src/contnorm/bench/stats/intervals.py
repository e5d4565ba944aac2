"""Where a mean lies, 95 % of the time: Student's for one sample, Welch's for two, and by resampling."""

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
    """From where to where."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.low:+.2f} to {self.high:+.2f}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def t_interval(values: Sequence[float]) -> Interval | None:
    """Student's, two-sided, of the mean; None for fewer than two values, or where one is no number.

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
    """Welch's, of the mean of ``values`` less another mean, of which only deviation and count are known.

    None for one value on either side, and where either has no spread: from values that are all the same nothing can be
    said of how far others would lie from them.

    Example:
        >>> str(welch_interval([1.0, 2.0, 3.0], 2.0, 1.0, 3)), welch_interval([1.0, 2.0, 3.0], 2.0, 0.0, 3)
        ('-2.27 to +2.27', None)
    """
    ours, spread = spread_over_seeds(list(values))
    if not (spread > 0 and std > 0 and runs > 1):  # not so for what is no number, either
        return None
    a, b = spread**2 / len(values), std**2 / runs
    apart = ours - mean
    freedom = (a + b) ** 2 / (a**2 / (len(values) - 1) + b**2 / (runs - 1))
    half = _t(freedom) * math.sqrt(a + b)
    return Interval(apart - half, apart + half)


def bootstrap_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """Of the mean, by drawing the values again and again; the draws are the same each time.

    With few values it is narrower than Student's: it knows no spread but theirs.

    Example:
        >>> bootstrap_interval([2.0, 2.0, 2.0]), bootstrap_interval([1.0])
        (Interval(low=2.0, high=2.0), None)
    """
    if len(values) < 2 or any(map(math.isnan, values)):
        return None
    chance = np.random.default_rng(seed)
    drawn = np.asarray(values)[chance.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    return _middle(drawn)


def bootstrap_apart(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """Of the mean of ``values`` less that of ``others``, by drawing from both sides, each for itself.

    Example:
        >>> bootstrap_apart([3.0, 3.0], [1.0, 1.0]), bootstrap_apart([3.0, 3.0], [1.0])
        (Interval(low=2.0, high=2.0), None)
    """
    if min(len(values), len(others)) < 2 or any(map(math.isnan, (*values, *others))):
        return None
    chance = np.random.default_rng(seed)
    drawn = [np.asarray(side)[chance.integers(len(side), size=(RESAMPLES, len(side)))] for side in (values, others)]
    return _middle(drawn[0].mean(axis=1) - drawn[1].mean(axis=1))


def effect_size(differences: Sequence[float]) -> float:
    """The mean of paired differences over their deviation; not a number for one, or where all are the same.

    Example:
        >>> effect_size([1.0, 2.0, 3.0])
        2.0
    """
    mean, std = spread_over_seeds(list(differences))
    return mean / std if std > 0 else float("nan")


def effect_apart(values: Sequence[float], others: Sequence[float]) -> float:
    """How far two means lie apart, over the deviation of both sides together; not a number where there is none.

    Example:
        >>> effect_apart([2.0, 3.0, 4.0], [1.0, 2.0, 3.0])
        1.0
    """
    (mean, a), (other, b) = spread_over_seeds(list(values)), spread_over_seeds(list(others))
    n, m = len(values) - 1, len(others) - 1
    together = (n * a**2 + m * b**2) / (n + m) if n and m else math.nan
    return (mean - other) / math.sqrt(together) if together > 0 else math.nan


def variance_ratio_interval(values: Sequence[float], others: Sequence[float]) -> Interval | None:
    """The F interval of the variance of ``values`` over that of ``others``; None where either has none.

    Example:
        >>> found = variance_ratio_interval([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
        >>> found is not None and found.low < 1 < found.high
        True
    """
    (_, a), (_, b) = spread_over_seeds(list(values)), spread_over_seeds(list(others))
    if math.isnan(a) or math.isnan(b) or b == 0:
        return None
    ratio, n, m = (a / b) ** 2, len(values) - 1, len(others) - 1
    low, high = _quantiles().fdtri(n, m, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(ratio / high), float(ratio / low))


def _middle(drawn: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(low), float(high))


def _t(freedom: float) -> float:
    return float(_quantiles().stdtrit(freedom, (1 + LEVEL) / 2))


def _quantiles() -> Any:
    """SciPy's, imported where one is wanted: every command comes by this file, and few have intervals to make."""
    return import_module("scipy.special")
