"""Our runs beside a published number: agrees, above or below, by the interval of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from contnorm.comparison.intervals import Interval, t_interval, welch_interval
from contnorm.results import spread_over_seeds

__all__ = ["Beside", "beside"]

Verdict = Literal["agrees", "above", "below", "none"]


@dataclass(frozen=True)
class Beside:
    """Ours, less the published.

    Attributes:
        mean: Ours, over seeds.
        std: Its sample standard deviation; not a number for one seed.
        difference: Of the means.
        interval: Of the difference, 95 %; None for one seed.
        verdict: ``"none"`` where there is no interval.
        how: ``"welch"``, from both deviations; ``"ours"``, from ours alone, where none is published.
    """

    mean: float
    std: float
    difference: float
    interval: Interval | None
    verdict: Verdict
    how: Literal["welch", "ours"]


def beside(values: Sequence[float], mean: float, std: float | None, runs: int = 5) -> Beside:
    """What our values, one a seed, say of a published mean and deviation over so many runs.

    Example:
        >>> beside([10.0, 11.0, 12.0], 11.2, 1.0).verdict, beside([10.0, 10.1, 9.9], 20.0, 0.1).verdict
        ('agrees', 'below')
        >>> beside([10.0], 11.2, 1.0).verdict, beside([10.0, 11.0, 12.0], 11.2, None).how
        ('none', 'ours')
    """
    ours, spread = spread_over_seeds(list(values))
    if std is None:
        interval = t_interval([value - mean for value in values])
    else:
        interval = welch_interval(values, mean, std, runs)
    how: Literal["welch", "ours"] = "ours" if std is None else "welch"
    return Beside(ours, spread, ours - mean, interval, _verdict(interval), how)


def _verdict(interval: Interval | None) -> Verdict:
    if interval is None:
        return "none"
    if interval.holds(0.0):
        return "agrees"
    return "above" if interval.low > 0 else "below"
