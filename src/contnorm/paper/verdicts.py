"""Compare our runs with a published number: agrees, above or below, by the interval of the difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from contnorm.bench.records import spread_over_seeds
from contnorm.bench.stats.intervals import Interval, t_interval, welch_interval

__all__ = ["Beside", "beside"]

Verdict = Literal["agrees", "above", "below", "none"]


@dataclass(frozen=True)
class Beside:
    """Comparison of our runs with a published number.

    Attributes:
        mean: Our mean over seeds.
        std: Our sample standard deviation; NaN for one seed.
        difference: Our mean minus the published mean.
        interval: 95 % interval of the difference; None if it is undefined.
        verdict: ``"none"`` if there is no interval.
        how: ``"welch"``, from both standard deviations; ``"ours"``, from ours only, if none is published.
        why: Reason why there is no interval; empty if there is one.
    """

    mean: float
    std: float
    difference: float
    interval: Interval | None
    verdict: Verdict
    how: Literal["welch", "ours"]
    why: str = ""


def beside(values: Sequence[float], mean: float, std: float | None, runs: int = 5) -> Beside:
    """Compare our values, one per seed, with a published mean and standard deviation over ``runs`` runs.

    Example:
        >>> beside([10.0, 11.0, 12.0], 11.2, 1.0).verdict, beside([10.0, 10.1, 9.9], 20.0, 0.1).verdict
        ('agrees', 'below')
        >>> beside([10.0], 11.2, 1.0).verdict, beside([10.0, 11.0, 12.0], 11.2, None).how
        ('none', 'ours')
        >>> beside([10.0, 10.0], 11.2, 1.0).why, beside([10.0, 11.0], 11.2, 0.0).why
        ('all our seeds are the same', 'the published deviation is 0')
    """
    ours, spread = spread_over_seeds(list(values))
    how: Literal["welch", "ours"] = "ours" if std is None else "welch"
    why, interval = _no_interval_reason(values, spread, std), None
    if not why:
        differences = [value - mean for value in values]
        interval = t_interval(differences) if std is None else welch_interval(values, mean, std, runs)
    return Beside(ours, spread, ours - mean, interval, _verdict(interval), how, why)


def _no_interval_reason(values: Sequence[float], spread: float, std: float | None) -> str:
    """Reason why no interval can be computed; empty if it can."""
    if len(values) < 2:
        return "one seed"
    if math.isnan(spread):
        return "a seed has no number"
    if spread == 0:
        return "all our seeds are the same"
    return "the published deviation is 0" if std == 0 else ""


def _verdict(interval: Interval | None) -> Verdict:
    if interval is None:
        return "none"
    if interval.holds(0.0):
        return "agrees"
    return "above" if interval.low > 0 else "below"
