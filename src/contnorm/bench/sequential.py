"""The rule that decides paired comparisons: looks at 16, 24, 32, ... 128 seeds, and families of questions. No torch.

A fixed number of seeds is often too few, and adding seeds until an ordinary 95 % interval excludes zero is wrong more
often than 5 %. This rule may be looked at after every eight seeds and be stopped at any look:

1. The seeds 100, 101, ... are used in order. There is a look at 16, 24, 32, ... 128 seeds (`LOOKS`).
2. A comparison has an error rate ``alpha``; by the look at n seeds, ``0.95 * alpha * n / 128`` of it is spent (linear
   spending). The critical values follow from that by the recursion of Lan and DeMets (`nominal_levels`). They are made
   for means of known variance; as usual, each is turned into its nominal p value, and Student's t interval of that
   level is the interval of the look. The twentieth of alpha that is not spent covers this approximation: simulated, the
   rate of any error over all looks is 0.049 to 0.050 for alpha 0.05.
3. The interval in force is the intersection of the intervals of all looks so far (a repeated confidence interval).
4. If it excludes zero, the first experiment is *higher* or *lower*; if it also lies within the margin, the difference
   is *within the margin*. If it contains zero and lies within the margin, the two are *equivalent*. Otherwise the
   comparison is *undecided*.
5. In a family of ``cases`` comparisons each has ``alpha / cases`` at first. The signs are decided by Holm's procedure
   (`decide_family`): once r signs are decided, the others have ``alpha / (cases - r)``. That a difference lies within
   the margin is always decided at ``alpha / cases``.

While no interval of a comparison misses the true mean difference, its verdict is not wrong, at whatever look it is
stopped. Intervals of a larger alpha lie within those of a smaller one, so Holm's procedure may go on from look to look.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from numbers import Integral, Real
from statistics import fmean
from typing import Any, Literal

from contnorm.bench.lazy_numpy import np
from contnorm.bench.stats import POWER, Interval, equivalence_probability, t_interval, t_quantile, t_test_power
from contnorm.errors import UserError

__all__ = [
    "ALPHA",
    "FIRST_SEED",
    "LOOKS",
    "MARGIN",
    "MAX_SEEDS",
    "SKEWED",
    "Decision",
    "Look",
    "Reach",
    "Verdict",
    "check_rule",
    "decide_differences",
    "decide_family",
    "looks_up_to",
    "nominal_levels",
    "reachable",
    "seeds_for_difference",
    "with_chance",
]

Verdict = Literal["higher", "lower", "higher, within the margin", "lower, within the margin", "equivalent", "undecided"]

ALPHA = 0.05
MARGIN = 1.0
MOST_CASES = 1_000_000  # beyond, levels are too close to 1 for a quantile
FIRST_SEED = 100  # lower seeds are exploratory: settings were chosen with them
LOOKS = tuple(range(16, 129, 8))
MAX_SEEDS = LOOKS[-1]
SPENT = 0.95  # of alpha, by the last look; the rest covers that critical values of t statistics are approximate
SKEWED = 1.5  # skewness beyond which simulated error rates exceed alpha; see docs/concepts/deciding.md
_NODES = 128  # of the numerical integration; critical values change by less than 1e-8 with more


@lru_cache(maxsize=1024)
def nominal_levels(sizes: tuple[int, ...], alpha: float = ALPHA) -> tuple[float, ...]:
    """Two-sided nominal p value at which each look rejects zero, so that all looks together reject it at ``alpha``.

    The mean of n values has n units of information, of the 128 of the last look. By a look at n, the share n / 128 of
    `SPENT` times alpha is spent. The density of the sum of the values, among the trials that were not rejected before,
    is carried from look to look by numerical integration (Armitage, McPherson and Rowe 1969; Lan and DeMets 1983).

    Args:
        sizes: Number of values at each look, increasing, at most 128.
        alpha: Probability of rejecting zero at any look, if the mean is zero.

    Example:
        >>> [round(level, 4) for level in nominal_levels((16, 24, 32))]
        [0.0059, 0.0047, 0.0053]
    """
    return crossing_levels(sizes, [SPENT * alpha * size / MAX_SEEDS for size in sizes])


def crossing_levels(sizes: Sequence[float], spent: Sequence[float]) -> tuple[float, ...]:
    """Nominal p values of looks from the probability ``spent`` by each of them, for normal values of known variance.

    Example:
        >>> from statistics import NormalDist  # linear spending, five looks: the table of Lan and DeMets (1983)
        >>> levels = crossing_levels((1, 2, 3, 4, 5), (0.01, 0.02, 0.03, 0.04, 0.05))
        >>> [round(NormalDist().inv_cdf(1 - level / 2), 2) for level in levels]
        [2.58, 2.49, 2.41, 2.34, 2.28]
    """
    normal, find_root = import_module("scipy.stats").norm, import_module("scipy.optimize").brentq
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    sums, density = np.zeros(1), np.ones(1)  # points of the sum, and the integrand there
    levels: list[float] = []
    size_before, spent_before = 0.0, 0.0
    for size, total in zip(sizes, spent, strict=True):
        scale, share = math.sqrt(size - size_before), total - spent_before

        def excess(bound: float, sums: Any = sums, density: Any = density, scale: float = scale) -> float:
            """Probability of crossing +-bound now and not before."""
            return float(density @ (normal.sf((bound - sums) / scale) + normal.sf((bound + sums) / scale)))

        widest = math.sqrt(size) * float(normal.isf(share / 2))  # if no trial had been rejected before
        bound = find_root(lambda bound: math.log(excess(bound) / share), 0.5 * widest, widest + 1e-6)  # noqa: B023
        levels.append(float(2 * normal.sf(bound / math.sqrt(size))))
        here = bound * nodes
        density = normal.pdf((here[:, None] - sums) / scale) @ density * bound * weights / scale
        sums, size_before, spent_before = here, size, total
    return tuple(levels)


def looks_up_to(max_seeds: int) -> tuple[int, ...]:
    """Numbers of seeds of all looks with at most ``max_seeds`` seeds.

    Raises:
        UserError: If not even the first look is allowed.

    Example:
        >>> looks_up_to(40)
        (16, 24, 32, 40)
    """
    if max_seeds < LOOKS[0]:
        raise UserError(f"max_seeds={max_seeds}: use {LOOKS[0]} or more, which is the first look.")
    return tuple(seeds for seeds in LOOKS if seeds <= max_seeds)


@dataclass(frozen=True)
class Look:
    """One look.

    Attributes:
        seeds: Number of seeds.
        pairs: Number of pairs among them; fewer if runs diverged.
        mean: Mean difference; NaN without a pair.
        interval: Student t interval of the mean, at the nominal level of the look; None for fewer than two pairs.
        level: Confidence level of the interval.

    Example:
        >>> [(look.seeds, look.pairs, round(look.level, 4)) for look in decide_differences([1.0, 2.0] * 12).looks]
        [(16, 16, 0.9941), (24, 24, 0.9953)]
    """

    seeds: int
    pairs: int
    mean: float
    interval: Interval | None
    level: float


@dataclass(frozen=True)
class Decision:
    """What the looks so far say about a difference, first experiment minus second.

    Attributes:
        verdict: ``"higher"``, ``"lower"``, one of them followed by ``", within the margin"``, ``"equivalent"`` or
            ``"undecided"``.
        seeds: Number of seeds of the last look; 0 before the first.
        pairs: Number of pairs among them; fewer if runs diverged.
        mean: Mean difference over these pairs; NaN before the first look.
        interval: Intersection of the intervals of all looks; None before the first.
        looks: The looks.
        margin: Largest absolute difference that counts as equivalent.
        cases: Number of comparisons of the family.
        alpha: Probability of any wrong sign in the family, and of any wrong statement on the margin.
        conflict: Whether the intervals of two looks do not overlap. Then the later one is left out; the differences
            are far from normal, or one of the rare errors happened.
        skewness: Sample skewness of the differences of the last look; NaN if it is undefined. Beyond `SKEWED` in
            absolute value, errors are more frequent than alpha.

    Example:
        >>> decision = decide_differences([1.8, 2.4, 2.1, 1.9, 2.6, 2.0, 2.2, 1.7] * 2)
        >>> decision.verdict, decision.seeds, str(decision.interval)
        ('higher', 16, '+1.85 to +2.32')
        >>> print(decision)
        higher by 2.09 points (interval +1.85 to +2.32, 16 seeds)
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
        return self.verdict == "equivalent" or self.verdict.endswith("within the margin")

    @property
    def diverged(self) -> int:
        """Number of seeds of the last look that have no pair, since a run diverged."""
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
    max_seeds: int = MAX_SEEDS,
    diverged: Collection[int] = (),
    first_seed: int = FIRST_SEED,
    sign_alpha: float | None = None,
) -> Decision:
    """Decide a comparison from its paired differences, by all looks that are complete.

    A look counts only if each of its seeds has a difference or diverged. Seeds beyond the last complete look, and
    seeds below ``first_seed``, are ignored.

    Args:
        differences: First minus second in percentage points, by seed; or as a sequence in the order of the seeds from
            ``first_seed`` on. NaN for a seed that diverged.
        cases: Number of comparisons of the family.
        margin: Largest absolute difference that counts as equivalent.
        alpha: Error rate of the family.
        max_seeds: Limit of the looks.
        diverged: Seeds of which one run or both diverged. Looks are computed from the other seeds.
        first_seed: First seed that counts.
        sign_alpha: Error rate at which the sign is decided, if `decide_family` allots this comparison more than
            ``alpha / cases``. The interval is of this error rate too.

    Example:
        >>> decide_differences({100 + i: 0.1 * (-1) ** i for i in range(16)}).verdict
        'equivalent'
        >>> str(decide_differences([2.0] * 7))
        'undecided (0 seeds, the first look needs 16)'
    """
    check_rule(cases=cases, margin=margin, alpha=alpha, max_seeds=max_seeds)
    by_seed = dict(differences) if isinstance(differences, Mapping) else dict(enumerate(differences, first_seed))
    values = {seed: value for seed, value in by_seed.items() if seed not in diverged and not math.isnan(value)}
    known = {*by_seed, *diverged}
    complete = [n for n in looks_up_to(max_seeds) if known.issuperset(range(first_seed, first_seed + n))]
    samples = [[values[seed] for seed in range(first_seed, first_seed + n) if seed in values] for n in complete]
    looks = _looks(complete, samples, alpha / cases)
    interval, conflict = _in_force(looks)
    within = interval is not None and -margin < interval.low and interval.high < margin
    if sign_alpha is not None:
        looks = _looks(complete, samples, sign_alpha)
        interval, conflict = _in_force(looks)
    verdict: Verdict = "equivalent" if within else "undecided"
    if interval is not None and not interval.holds(0):
        sign: Literal["higher", "lower"] = "higher" if interval.low > 0 else "lower"
        verdict = f"{sign}, within the margin" if within else sign  # type: ignore[assignment]
    last = looks[-1] if looks else Look(0, 0, math.nan, None, math.nan)
    skewness = _skewness(samples[-1] if samples else [])
    rule = (margin, cases, alpha, conflict, skewness)
    return Decision(verdict, last.seeds, last.pairs, last.mean, interval, looks, *rule)


def decide_family(
    cases: Mapping[Hashable, Mapping[int, float]],
    *,
    size: int | None = None,
    correction: Literal["holm", "benjamini-hochberg"] = "holm",
    margin: float = MARGIN,
    alpha: float = ALPHA,
    max_seeds: int = MAX_SEEDS,
    diverged: Mapping[Hashable, Collection[int]] | None = None,
    first_seed: int = FIRST_SEED,
) -> dict[Hashable, Decision]:
    """Decide a family of comparisons, which has one error rate.

    Holm's procedure: with r signs decided, the other signs are decided at ``alpha / (size - r)``. With the procedure of
    Benjamini and Hochberg, for exploratory families, signs are decided at ``alpha * r / size`` for the largest r with
    which r are decided: alpha then bounds the expected share of wrong signs among those decided.

    Args:
        cases: Differences by seed, by name of the comparison.
        size: Number of comparisons of the family, if more than ``cases`` belong to it.
        correction: The procedure.
        margin, alpha, max_seeds, first_seed: As in `decide_differences`.
        diverged: Diverged seeds by name of the comparison.

    Example:
        >>> clear, close = ({100 + i: mean + (-1) ** i for i in range(16)} for mean in (3.0, 0.87))
        >>> [one.verdict for one in decide_family({"clear": clear, "close": close}).values()]
        ['higher', 'higher']
        >>> decide_differences(close, cases=2).verdict
        'undecided'
    """
    size = len(cases) if size is None else size

    def decide(sign_alpha: float) -> dict[Hashable, Decision]:
        rule: dict[str, Any] = {"cases": size, "margin": margin, "alpha": alpha, "max_seeds": max_seeds}
        rule |= {"first_seed": first_seed, "sign_alpha": sign_alpha}
        return {
            name: decide_differences(d, diverged=(diverged or {}).get(name, ()), **rule) for name, d in cases.items()
        }

    def signs(decisions: Mapping[Hashable, Decision]) -> int:
        return sum(one.verdict.startswith(("higher", "lower")) for one in decisions.values())

    if correction == "holm":
        decisions, decided = decide(alpha / size), 0
        while decided < (decided := signs(decisions)) < size:
            decisions = decide(alpha / (size - decided))
        return decisions
    wanted = next((r for r in range(len(cases), 1, -1) if signs(decide(alpha * r / size)) >= r), 1)
    return decide(alpha * wanted / size)


def with_chance(scores: Mapping[int, float], diverged: Collection[int], chance: float) -> dict[int, float]:
    """Scores by seed in which a diverged seed counts as chance accuracy, for a line on how sensitive a verdict is.

    Example:
        >>> with_chance({100: 71.5}, [101], chance=20.0)
        {100: 71.5, 101: 20.0}
    """
    return {**scores, **dict.fromkeys(diverged, chance)}


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
        raise UserError(f"max_seeds={max_seeds!r}: use a whole number, {LOOKS[0]} or more.")
    looks_up_to(max_seeds)


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
    looks = looks_up_to(max_seeds)
    seeds, level = looks[-1], 1 - nominal_levels(looks, alpha / cases)[-1]
    half = t_quantile(seeds - 1, level) * std / math.sqrt(seeds)
    return Reach(seeds, half, margin, equivalence_probability(margin / std, seeds, level) if std else 1.0)


def seeds_for_difference(
    std: float, difference: float, cases: int = 1, power: float = POWER, alpha: float = ALPHA
) -> int | None:
    """Number of seeds of the first look whose interval excludes zero with a given probability.

    The probability is that of this look alone, so that of all looks together is a little higher.

    Args:
        std: Standard deviation of the paired differences.
        difference: True mean difference, in the same unit.
        cases: Number of comparisons of the family.
        power: The probability.
        alpha: Error rate of the family.

    Returns:
        The number of seeds of the look; None if no look has the probability.

    Example:
        >>> seeds_for_difference(1.0, 1.0), seeds_for_difference(1.0, 1.0, cases=20), seeds_for_difference(1.0, 0.2)
        (24, 32, None)
    """
    check_rule(cases=cases, alpha=alpha)
    if not (difference and math.isfinite(difference) and math.isfinite(std)):
        return None
    for seeds, level in zip(LOOKS, nominal_levels(LOOKS, alpha / cases), strict=True):
        if not std or t_test_power(abs(difference) / std, seeds, level=1 - level) >= power:
            return seeds
    return None


def _looks(sizes: Sequence[int], samples: Sequence[Sequence[float]], alpha: float) -> tuple[Look, ...]:
    """The looks; one that has no more pairs than the look before, as all new seeds diverged, has no interval."""
    counts = [len(sample) for sample in samples]
    informative = [count > max([1, *counts[:k]]) for k, count in enumerate(counts)]
    levels = iter(nominal_levels(tuple(count for count, use in zip(counts, informative, strict=True) if use), alpha))
    looks = []
    for seeds, sample, use in zip(sizes, samples, informative, strict=True):
        level = 1 - next(levels) if use else math.nan
        interval = t_interval(sample, level) if use else None
        looks.append(Look(seeds, len(sample), fmean(sample) if sample else math.nan, interval, level))
    return tuple(looks)


def _in_force(looks: Sequence[Look]) -> tuple[Interval | None, bool]:
    """Intersection of the intervals, and whether one of them did not overlap the earlier ones and is left out."""
    interval, conflict = None, False
    for look in looks:
        if look.interval is not None:
            low, high = (
                look.interval
                if interval is None
                else (max(interval.low, look.interval.low), min(interval.high, look.interval.high))
            )
            conflict = conflict or low > high
            interval = Interval(low, high) if low <= high else interval
    return interval, conflict


def _skewness(values: Sequence[float]) -> float:
    """Third central moment over the standard deviation cubed; NaN if all values are equal."""
    if not values:
        return math.nan
    mean = fmean(values)
    std = math.sqrt(fmean((value - mean) ** 2 for value in values))
    return fmean(((value - mean) / std) ** 3 for value in values) if std > 0 else math.nan


def _seeds_text(decision: Decision) -> str:
    if not decision.looks:
        return f"0 seeds, the first look needs {LOOKS[0]}"
    parts = [f"{decision.seeds} seeds"]
    if decision.diverged:
        parts.append(f"{decision.diverged} of them diverged")
    if abs(decision.skewness) > SKEWED:
        parts.append(f"skewed differences ({decision.skewness:+.1f})")
    if decision.conflict:
        parts.append("the intervals of two looks do not overlap")
    return ", ".join(parts)
