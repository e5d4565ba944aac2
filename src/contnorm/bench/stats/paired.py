"""Paired comparison of two series over their shared seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from contnorm.bench.stats.intervals import Interval, bootstrap_interval, effect_size, t_interval

__all__ = ["Paired", "paired", "summed_up"]


@dataclass(frozen=True)
class Paired:
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


def paired(values: Mapping[int, float], others: Mapping[int, float]) -> Paired | None:
    """Compare ``values`` minus ``others`` on their shared seeds; None if they share none.

    Example:
        >>> pair = paired({0: 3.0, 1: 5.0, 2: 9.0}, {0: 1.0, 1: 2.0})
        >>> pair and (pair.differences, pair.mean)
        ((2.0, 3.0), 2.5)
    """
    seeds = sorted(values.keys() & others.keys())
    return summed_up([values[seed] - others[seed] for seed in seeds]) if seeds else None


def summed_up(differences: Sequence[float]) -> Paired:
    """Mean, intervals and effect size of differences.

    Example:
        >>> str(summed_up([1.0, 2.0, 3.0]).t)
        '-0.48 to +4.48'
    """
    return Paired(
        tuple(differences),
        fmean(differences),
        t_interval(differences),
        bootstrap_interval(differences),
        effect_size(differences),
    )
