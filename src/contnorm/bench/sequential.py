"""Decide a paired comparison with as many seeds as it takes: looks at 8, 16, 32, ... seeds. Needs no torch.

A fixed number of seeds is often too few, and adding seeds until an ordinary 95 % interval excludes zero is wrong more
often than 5 %. The rule here may be looked at after each stage and be stopped at any of them, and still is wrong with
a probability of at most ``alpha``:

1. The seeds 100, 101, ... are used in order. Stages have 8, 16, 32, 64 and 128 seeds, then twice as many each.
2. A table with ``cases`` comparisons gives each of them ``alpha / cases``. Stage k spends the share ``w_k`` of that
   (`stage_weight`): its interval is the paired Student t interval of level ``1 - alpha / cases * w_k``.
3. The interval in force is the intersection of the intervals of all stages so far.
4. If it excludes zero, the first experiment is *higher* or *lower*; if it also lies within the margin, the difference
   is *within the margin*. If it contains zero and lies within the margin, the two are *equivalent*. Otherwise the
   comparison is *undecided*.

Why the error rate holds: the t interval of one stage misses the true mean difference with probability
``alpha / cases * w_k``, exactly if the differences are normally distributed. The probability that any interval of any
comparison misses is at most the sum of these, whatever the dependence between stages and comparisons (union bound).
The weights sum up to 0.95 over all stages, so the sum is below ``alpha``. While no interval misses, every intersection
contains the true difference. Then no verdict is wrong: not a sign, and not an equivalence of experiments whose
difference is the margin or more. It follows that the limit of seeds need not be fixed in advance, and that a verdict
stands once it is reached. Differences that are not normal make the first stages inexact; the documentation has the
rates of a simulation with recorded differences.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from statistics import fmean
from typing import Literal

from contnorm.bench.stats import POWER, Interval, equivalence_probability, t_interval, t_quantile, t_test_power
from contnorm.errors import UserError

__all__ = [
    "ALPHA",
    "FIRST_SEED",
    "MARGIN",
    "MAX_SEEDS",
    "SKEWED",
    "STAGES",
    "Decision",
    "Look",
    "Reach",
    "Verdict",
    "check_rule",
    "decide_differences",
    "reachable",
    "seeds_for_difference",
    "stage_level",
    "stage_seeds",
    "stage_weight",
    "stages_up_to",
]

Verdict = Literal["higher", "lower", "higher, within the margin", "lower, within the margin", "equivalent", "undecided"]

ALPHA = 0.05
MARGIN = 1.0
MAX_SEEDS = 128
MOST_CASES = 1_000_000  # beyond, levels are too close to 1 for a quantile
FIRST_SEED = 100  # lower seeds are exploratory: settings were chosen with them
SKEWED = 1.5  # skewness beyond which simulated error rates exceed alpha; see docs/concepts/deciding.md
STAGES = (8, 16, 32, 64, 128)
_WEIGHTS = (0.05, 0.10, 0.15, 0.25, 0.35)
_LAST_STAGE = 20  # over 4 million seeds; searches end there


def stage_seeds(k: int) -> int:
    """Number of seeds of stage k, counted from 0.

    Example:
        >>> [stage_seeds(k) for k in range(7)]
        [8, 16, 32, 64, 128, 256, 512]
    """
    return STAGES[0] << k


def stage_weight(k: int) -> float:
    """Share of alpha that stage k spends, counted from 0; the shares of all stages sum up to 0.95.

    Example:
        >>> [stage_weight(k) for k in range(7)]
        [0.05, 0.1, 0.15, 0.25, 0.35, 0.025, 0.0125]
    """
    return _WEIGHTS[k] if k < len(_WEIGHTS) else 0.05 * 2.0 ** (len(_WEIGHTS) - 1 - k)


def stage_level(k: int, cases: int = 1, alpha: float = ALPHA) -> float:
    """Confidence level of the interval of stage k, counted from 0.

    Example:
        >>> round(stage_level(0), 4), round(stage_level(4, cases=10), 5)
        (0.9975, 0.99825)
    """
    return 1 - alpha / cases * stage_weight(k)


def stages_up_to(max_seeds: int) -> tuple[int, ...]:
    """Numbers of seeds of all stages with at most ``max_seeds`` seeds.

    Raises:
        UserError: If not even the first stage is allowed.

    Example:
        >>> stages_up_to(100), stages_up_to(256)
        ((8, 16, 32, 64), (8, 16, 32, 64, 128, 256))
    """
    if max_seeds < STAGES[0]:
        raise UserError(f"max_seeds={max_seeds}: use {STAGES[0]} or more, which is the first stage.")
    return tuple(stage_seeds(k) for k in range(int(max_seeds // STAGES[0]).bit_length()))


@dataclass(frozen=True)
class Look:
    """One stage that was reached.

    Attributes:
        seeds: Number of seeds of the stage.
        pairs: Number of pairs among them; fewer if runs diverged.
        mean: Mean difference; NaN without a pair.
        interval: Student t interval of the mean, at the level of the stage; None for fewer than two pairs.
        level: Confidence level of the interval.

    Example:
        >>> [(look.seeds, look.pairs, round(look.level, 4)) for look in decide_differences([1.0, 2.0] * 8).looks]
        [(8, 8, 0.9975), (16, 16, 0.995)]
    """

    seeds: int
    pairs: int
    mean: float
    interval: Interval | None
    level: float


@dataclass(frozen=True)
class Decision:
    """What the stages reached so far say about a difference, first experiment minus second.

    Attributes:
        verdict: ``"higher"``, ``"lower"``, one of them followed by ``", within the margin"``, ``"equivalent"`` or
            ``"undecided"``.
        seeds: Number of seeds of the last stage reached; 0 before the first.
        pairs: Number of pairs among them; fewer if runs diverged.
        mean: Mean difference over these pairs; NaN before the first stage.
        interval: Intersection of the intervals of all stages; None before the first.
        looks: The stages reached.
        margin: Largest absolute difference that counts as equivalent.
        cases: Number of comparisons among which alpha is divided.
        alpha: Probability of any wrong verdict in all these comparisons.
        conflict: Whether the intervals of two stages do not overlap. Then the later one is left out; the differences
            are far from normal, or one of the rare errors happened.
        skewness: Sample skewness of the differences of the last stage; NaN if it is undefined. Beyond `SKEWED` in
            absolute value, errors are more frequent than alpha.

    Example:
        >>> decision = decide_differences([1.8, 2.4, 2.1, 1.9, 2.6, 2.0, 2.2, 1.7])
        >>> decision.verdict, decision.seeds, str(decision.interval)
        ('higher', 8, '+1.59 to +2.58')
        >>> print(decision)
        higher by 2.09 points (interval +1.59 to +2.58, 8 seeds)
    """

    verdict: Verdict
    seeds: int
    pairs: int
    mean: float
    interval: Interval | None
    looks: tuple[Look, ...]
    margin: float = MARGIN
    cases: int = 1
    alpha: float = ALPHA
    conflict: bool = False
    skewness: float = math.nan

    @property
    def is_decided(self) -> bool:
        """Whether the verdict is another one than undecided."""
        return self.verdict != "undecided"

    @property
    def within_margin(self) -> bool:
        """Whether the difference is known to lie within the margin."""
        return self.interval is not None and _is_within(self.interval, self.margin)

    @property
    def diverged(self) -> int:
        """Number of seeds of the last stage that have no pair, since a run diverged."""
        return self.seeds - self.pairs

    def __str__(self) -> str:
        if self.interval is None:
            return f"undecided ({_seeds_text(self)})"
        direction, _, within = self.verdict.partition(", ")
        points = f"{self.margin:g} point{'' if self.margin == 1 else 's'}"
        if within:
            direction += f" by {abs(self.mean):.2f} points, within the margin of {points}"
        elif direction == "equivalent":
            direction += f" within the margin of {points}, mean difference {self.mean:+.2f}"
        elif direction == "undecided":
            direction += f", mean difference {self.mean:+.2f}"
        else:
            direction += f" by {abs(self.mean):.2f} points"
        return f"{direction} (interval {self.interval}, {_seeds_text(self)})"


def decide_differences(
    differences: Mapping[int, float] | Sequence[float],
    *,
    cases: int = 1,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    max_seeds: int | None = None,
    diverged: Collection[int] = (),
    first_seed: int = FIRST_SEED,
) -> Decision:
    """Decide a comparison from its paired differences, by all stages that are complete.

    A stage counts only if each of its seeds has a difference or diverged. Seeds beyond the last complete stage, and
    seeds below ``first_seed``, are ignored.

    Args:
        differences: First minus second in percentage points, by seed; or as a sequence in the order of the seeds from
            ``first_seed`` on. NaN for a seed that diverged.
        cases: Number of comparisons among which alpha is divided.
        margin: Largest absolute difference that counts as equivalent.
        alpha: Probability of any wrong verdict in all these comparisons.
        max_seeds: Limit of the stages; None for all.
        diverged: Seeds of which one run or both diverged. Stages are computed from the other seeds.
        first_seed: First seed of every stage.

    Example:
        >>> decide_differences({100 + i: 0.1 * (-1) ** i for i in range(16)}).verdict
        'equivalent'
        >>> str(decide_differences([2.0] * 7))
        'undecided (0 seeds, a stage needs 8)'
    """
    check_rule(cases=cases, margin=margin, alpha=alpha)
    by_seed = dict(differences) if isinstance(differences, Mapping) else dict(enumerate(differences, first_seed))
    without_pair = {*diverged, *(seed for seed, value in by_seed.items() if math.isnan(value))}
    looks: list[Look] = []
    interval, conflict = None, False
    limit = len(by_seed.keys() | without_pair) if max_seeds is None else max_seeds
    values: list[float] = []
    for k, size in enumerate(stages_up_to(limit) if limit >= STAGES[0] or max_seeds is not None else ()):
        seeds = range(first_seed, first_seed + size)
        if any(seed not in by_seed and seed not in without_pair for seed in seeds):
            break
        values = [by_seed[seed] for seed in seeds if seed not in without_pair]
        look = _look(values, size, stage_level(k, cases, alpha))
        looks.append(look)
        if look.interval is not None:
            common = look.interval if interval is None else _intersect(interval, look.interval)
            interval, conflict = common or interval, conflict or common is None
    last = looks[-1] if looks else Look(0, 0, math.nan, None, math.nan)
    verdict: Verdict = "undecided" if interval is None else _verdict(interval, margin)
    return Decision(
        verdict,
        last.seeds,
        last.pairs,
        last.mean,
        interval,
        tuple(looks),
        margin,
        cases,
        alpha,
        conflict,
        _skewness(values),
    )


def check_rule(*, cases: int = 1, margin: float = MARGIN, alpha: float = ALPHA, max_seeds: int = MAX_SEEDS) -> None:
    """Check the arguments of the rule.

    Raises:
        UserError: If one is out of its range.

    Example:
        >>> check_rule(margin=-1)
        Traceback (most recent call last):
        contnorm.errors.UserError: margin=-1: use a number of points above 0.
    """
    if not (_is_real(margin) and 0 < margin < math.inf):
        raise UserError(f"margin={margin!r}: use a number of points above 0.")
    if not (isinstance(cases, Integral) and 1 <= cases <= MOST_CASES):
        raise UserError(f"cases={cases!r}: use a whole number from 1 to {MOST_CASES:,}.")
    if not (_is_real(alpha) and 0 < alpha < 1):
        raise UserError(f"alpha={alpha!r}: use a number between 0 and 1.")
    if not isinstance(max_seeds, Integral):
        raise UserError(f"max_seeds={max_seeds!r}: use a whole number, {STAGES[0]} or more.")
    stages_up_to(max_seeds)


def _is_real(value: object) -> bool:
    return isinstance(value, Real)


@dataclass(frozen=True)
class Reach:
    """What the last allowed stage can show.

    Attributes:
        seeds: Number of seeds of that stage.
        half_width: Half the width of its interval, in points.
        margin: The margin.
        probability: Probability that this interval lies within the margin, if the true difference is 0.

    Example:
        >>> reachable(3.0, max_seeds=32).is_reachable
        False
    """

    seeds: int
    half_width: float
    margin: float
    probability: float

    @property
    def is_reachable(self) -> bool:
        """Whether an equivalence can be shown: the interval around a difference of 0 lies within the margin."""
        return self.half_width <= self.margin

    def __str__(self) -> str:
        can = "can be shown" if self.is_reachable else "is not to be expected"
        return (
            f"with {self.seeds} seeds the interval is the mean +- {self.half_width:.2f} points, so equivalence within "
            f"{self.margin:g} {can} (probability {self.probability:.2f} if there is no difference)"
        )


def reachable(
    std: float, margin: float = MARGIN, cases: int = 1, max_seeds: int = MAX_SEEDS, alpha: float = ALPHA
) -> Reach:
    """Return the half width of the interval of the last allowed stage, and whether it fits in the margin.

    Args:
        std: Standard deviation of the paired differences, such as that of recorded runs.
        margin: The margin.
        cases: Number of comparisons among which alpha is divided.
        max_seeds: Largest number of seeds allowed.
        alpha: Probability of any wrong verdict in all these comparisons.

    Example:
        >>> reach = reachable(2.0)
        >>> reach.seeds, round(reach.half_width, 2), reach.is_reachable, round(reach.probability, 2)
        (128, 0.43, True, 1.0)
        >>> reachable(2.0, max_seeds=16).is_reachable
        False
    """
    check_rule(cases=cases, margin=margin, alpha=alpha, max_seeds=max_seeds)
    stages = stages_up_to(max_seeds)
    seeds, level = stages[-1], stage_level(len(stages) - 1, cases, alpha)
    half = t_quantile(seeds - 1, level) * std / math.sqrt(seeds)
    return Reach(seeds, half, margin, equivalence_probability(margin / std, seeds, level) if std else 1.0)


def seeds_for_difference(
    std: float, difference: float, cases: int = 1, power: float = POWER, alpha: float = ALPHA
) -> int | None:
    """Smallest stage whose interval excludes zero with a given probability, if the true difference is given.

    The probability is that of this stage alone, so that of all looks together is a little higher.

    Args:
        std: Standard deviation of the paired differences.
        difference: True mean difference, in the same unit.
        cases: Number of comparisons among which alpha is divided.
        power: The probability.
        alpha: Probability of any wrong verdict in all these comparisons.

    Returns:
        The number of seeds of the stage; None if the difference is 0, or smaller than millions of seeds can show.

    Example:
        >>> seeds_for_difference(1.0, 1.0), seeds_for_difference(1.0, 1.0, cases=20), seeds_for_difference(1.0, 0.25)
        (32, 32, 512)
    """
    check_rule(cases=cases, alpha=alpha)
    if not (difference and math.isfinite(difference) and math.isfinite(std)):
        return None
    for k in range(_LAST_STAGE):
        level = stage_level(k, cases, alpha)
        if not std or t_test_power(abs(difference) / std, stage_seeds(k), level=level) >= power:
            return stage_seeds(k)
    return None


def _look(values: list[float], seeds: int, level: float) -> Look:
    mean = fmean(values) if values else math.nan
    return Look(seeds, len(values), mean, t_interval(values, level) if values else None, level)


def _skewness(values: list[float]) -> float:
    """Third central moment over the standard deviation cubed; NaN if all values are equal."""
    if not values:
        return math.nan
    mean = fmean(values)
    std = math.sqrt(fmean((value - mean) ** 2 for value in values))
    return fmean(((value - mean) / std) ** 3 for value in values) if std > 0 else math.nan


def _intersect(a: Interval, b: Interval) -> Interval | None:
    low, high = max(a.low, b.low), min(a.high, b.high)
    return Interval(low, high) if low <= high else None


def _is_within(interval: Interval, margin: float) -> bool:
    return -margin < interval.low and interval.high < margin


def _verdict(interval: Interval, margin: float) -> Verdict:
    within = _is_within(interval, margin)
    if interval.low > 0:
        return "higher, within the margin" if within else "higher"
    if interval.high < 0:
        return "lower, within the margin" if within else "lower"
    return "equivalent" if within else "undecided"


def _seeds_text(decision: Decision) -> str:
    if not decision.looks:
        return f"0 seeds, a stage needs {STAGES[0]}"
    parts = [f"{decision.seeds} seeds"]
    if decision.diverged:
        parts.append(f"{decision.diverged} of them diverged")
    if abs(decision.skewness) > SKEWED:
        parts.append(f"skewed differences ({decision.skewness:+.1f})")
    if decision.conflict:
        parts.append("the intervals of two stages do not overlap")
    return ", ".join(parts)
