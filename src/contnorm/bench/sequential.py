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

import html
import math
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from numbers import Integral, Real
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from contnorm.bench.metrics import score_title
from contnorm.bench.stats import (
    FEWEST_SEEDS,
    POWER,
    Interval,
    Spread,
    equivalence_probability,
    spread_ratio,
    t_interval,
    t_quantile,
    t_test_power,
)
from contnorm.errors import UserError

Outcome = Literal["higher", "lower", "higher, within the margin", "lower, within the margin", "equivalent", "undecided"]

ALPHA = 0.05
MARGIN = 1.0
MOST_CASES = 1_000_000  # beyond, levels are too close to 1 for a quantile
FIRST_SEED = 100  # lower seeds are exploratory: settings were chosen with them
FRESH_SEEDS = range(FIRST_SEED, sys.maxsize)
LOOKS = tuple(range(16, 129, 8))
LAST_LOOK = LOOKS[-1]
SPENT = 0.95  # share of alpha spent by the last look; the rest covers the approximation of t statistics
SKEWED = 1.5  # skewness beyond which simulated error rates exceed alpha; see docs/concepts/deciding.md
_NODES = 128  # nodes of the integration; with more, critical values change by less than 1e-8


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
    return crossing_levels(sizes, [SPENT * alpha * size / LAST_LOOK for size in sizes])


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


class Look(NamedTuple):
    """One look: the number of seeds, the pairs among them, their mean difference, and its interval."""

    seeds: int
    pairs: int
    mean: float
    interval: Interval | None  # None without a new pair


@dataclass(frozen=True, repr=False)
class Verdict:
    """What the looks so far say about a score of two experiments, a minus b.

    Attributes:
        outcome: ``"higher"``, ``"lower"``, one of them followed by ``", within the margin"``, ``"equivalent"`` or
            ``"undecided"``.
        seeds: Number of seeds of the last look; 0 before the first.
        pairs: Number of pairs among them; fewer if runs diverged.
        mean: Mean difference over these pairs, in percentage points; before the first look over all shared seeds.
        interval: Interval in force: the intersection of the intervals of all looks; None before the first.
        looks: The looks.
        differences: The difference of each shared seed, also of those that do not count.
        margin: Largest absolute difference that counts as equivalent.
        cases: Number of comparisons of the family.
        alpha: Probability of any wrong sign in the family, and of any wrong statement on the margin.
        conflict: Whether the intervals of two looks do not overlap. Then the later one is left out; the differences
            are far from normal, or one of the rare errors happened.
        score: Name of the score.
        names: Names of a and b.
        scores: The scores of a and of b by seed, if they are known.
        a, b: The records, if there are some.
        at_chance: The verdict if each diverged run counts as chance accuracy; None if no run diverged.
        without_pair: Seeds of which a run diverged.
        first_seed, max_seeds: First seed that counts, and limit of the looks.
        share: Share of alpha at which the sign is decided.

    Example:
        >>> verdict = decide_differences([1.8, 2.4, 2.1, 1.9, 2.6, 2.0, 2.2, 1.7] * 2, names=("cn", "bn"))
        >>> verdict.outcome, verdict.seeds, str(verdict.interval)
        ('higher', 16, '+1.85 to +2.32')
        >>> print(verdict)
        cn is higher than bn in score by 2.09 points (interval +1.85 to +2.32, 16 seeds).
    """

    outcome: Outcome
    seeds: int
    pairs: int
    mean: float
    interval: Interval | None
    looks: tuple[Look, ...]
    differences: Mapping[int, float]
    margin: float = MARGIN
    cases: int = 1
    alpha: float = ALPHA
    conflict: bool = False
    score: str = "score"
    names: tuple[str, str] = ("a", "b")
    scores: tuple[Mapping[int, float], Mapping[int, float]] | None = None
    a: Sequence[Any] = ()
    b: Sequence[Any] = ()
    at_chance: Verdict | None = None
    without_pair: frozenset[int] = frozenset()
    first_seed: int = FIRST_SEED
    max_seeds: int = LAST_LOOK
    share: float = 1.0

    @property
    def is_decided(self) -> bool:
        """Whether the outcome is another one than undecided."""
        return self.outcome != "undecided"

    @property
    def diverged(self) -> int:
        """Number of seeds of the last look that have no pair, since a run diverged."""
        return self.seeds - self.pairs

    @property
    def uncorrected(self) -> Interval | None:
        """95 % interval of the mean over all shared seeds, for one comparison and one look; it decides nothing."""
        values = list(self.differences.values())
        return t_interval(values) if len(set(values)) > 1 else None  # equal differences tell no spread

    @property
    def skewness(self) -> float:
        """Sample skewness of the differences; NaN if it is undefined. Beyond `SKEWED`, errors exceed alpha."""
        values = list(self.differences.values())
        mean = fmean(values) if values else math.nan
        std = math.sqrt(fmean((value - mean) ** 2 for value in values)) if values else 0.0
        return fmean(((value - mean) / std) ** 3 for value in values) if std > 0 else math.nan

    @property
    def spread(self) -> Spread | None:
        """Spread of a over seeds, divided by that of b; None if scores are unknown, too few or all equal."""
        if self.scores is None or len(self.differences) < FEWEST_SEEDS:
            return None
        with suppress(UserError):  # equal scores
            return spread_ratio(*self.scores)
        return None

    @property
    def seeds_needed(self) -> str:
        """Seeds that true differences need, if the spread of the differences stays as it is; empty if it is unknown."""
        values = list(self.differences.values())
        std = stdev(values) if len(values) > 1 else 0.0
        if not std:
            return ""
        needed = {d: seeds_for_difference(std, d, self.cases, alpha=self.alpha) for d in (0.5, 1.0, 2.0)}
        parts = [
            f"{d:g} {'point' if d == 1 else 'points'} {seeds or f'over {LAST_LOOK}'}" for d, seeds in needed.items()
        ]
        return (
            f"Seeds needed for a true difference of {', '.join(parts)} (probability {POWER:g}; the differences of "
            f"{len(values)} seeds have a standard deviation of {std:.2f} points). Equivalence: "
            f"{reach(std, self.margin, self.cases, alpha=self.alpha)}."
        )

    @property
    def sentence(self) -> str:
        """The verdict in a sentence."""
        (a, b), title = self.names, score_title(self.score)
        word, _, within = self.outcome.partition(", ")
        margin = f"within the margin of {self.margin:g} point{'' if self.margin == 1 else 's'}"
        if word in ("higher", "lower"):
            points = f"by {abs(self.mean):.2f} points{f', {margin}' if within else ''}"
            return f"{a} is {word} than {b} in {title} {points} ({self._details})."
        if word == "equivalent":
            return (
                f"{a} and {b} are equivalent in {title} {margin}, mean difference {self.mean:+.2f} ({self._details})."
            )
        start = f"Undecided whether {a} or {b} is higher in {title}"
        if self.looks:
            mean = "" if math.isnan(self.mean) else f"mean difference {self.mean:+.2f} "
            return f"{start}: {mean}({self._details})."
        if not self.differences:
            return f"{start}: no shared seed; the first look needs {LOOKS[0]}."
        seeds = f"{len(self.differences)} shared seed{'' if len(self.differences) == 1 else 's'}"
        interval = f", 95 % interval without correction {self.uncorrected}" if self.uncorrected else ""
        return f"{start}: mean difference {self.mean:+.2f} ({seeds}{interval}); the first look needs {LOOKS[0]} seeds."

    def __str__(self) -> str:
        return self.sentence

    def __repr__(self) -> str:
        return f"Verdict({self.sentence!r})"

    def _repr_html_(self) -> str:
        lines = [self.sentence, self.seeds_needed]
        return "".join(f"<p>{html.escape(line)}</p>" for line in lines if line)

    @property
    def _details(self) -> str:
        parts = [f"interval {self.interval}"] if self.interval else []
        parts.append(f"{self.seeds} seeds")
        if self.diverged:
            parts.append(f"{self.diverged} of them diverged")
        if abs(self.skewness) > SKEWED:
            parts.append(f"skewed differences ({self.skewness:+.1f})")
        if self.conflict:
            parts.append("the intervals of two looks do not overlap")
        if self.cases > 1:
            parts.append(f"one of {self.cases} questions")
        return ", ".join(parts)


def decide_differences(
    differences: Mapping[int, float] | Sequence[float],
    *,
    cases: int = 1,
    margin: float = MARGIN,
    alpha: float = ALPHA,
    max_seeds: int = LAST_LOOK,
    diverged: Collection[int] = (),
    first_seed: int = FIRST_SEED,
    score: str = "score",
    names: tuple[str, str] = ("a", "b"),
) -> Verdict:
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
        score, names: Name of the score, and of the two experiments, in sentences.

    Example:
        >>> decide_differences({100 + i: 0.1 * (-1) ** i for i in range(16)}).outcome
        'equivalent'
        >>> print(decide_differences([2.0] * 7))
        Undecided whether a or b is higher in score: mean difference +2.00 (7 shared seeds); the first look needs 16
        seeds.
    """
    check_rule(cases=cases, margin=margin, alpha=alpha, max_seeds=max_seeds)
    by_seed = dict(differences) if isinstance(differences, Mapping) else dict(enumerate(differences, first_seed))
    values = {seed: float(value) for seed, value in by_seed.items() if seed not in diverged and not math.isnan(value)}
    without_pair = frozenset({*diverged, *by_seed} - values.keys())
    mean = fmean(values.values()) if values else math.nan
    start = Verdict(
        "undecided", 0, 0, mean, None, (), values, margin, cases, alpha, score=score, names=names,
        without_pair=without_pair, first_seed=first_seed, max_seeds=max_seeds,
    )  # fmt: skip
    return decide_with(start, cases, 1 / cases)


def decide_with(verdict: Verdict, cases: int, share: float) -> Verdict:
    """Decide anew in a family of ``cases``, and the sign at another share of alpha than ``1 / cases``."""
    values, margin, first = verdict.differences, verdict.margin, verdict.first_seed
    known = values.keys() | verdict.without_pair
    complete = [n for n in looks_up_to(verdict.max_seeds) if known >= set(range(first, first + n))]
    samples = [[values[seed] for seed in range(first, first + n) if seed in values] for n in complete]
    looks = _looks(complete, samples, verdict.alpha / cases)
    interval, conflict = _in_force(looks)
    within = interval is not None and -margin < interval.low and interval.high < margin
    if share != 1 / cases:
        looks = _looks(complete, samples, verdict.alpha * share)
        interval, conflict = _in_force(looks)
    outcome: Outcome = "equivalent" if within else "undecided"
    if interval is not None and not interval.holds(0):
        if interval.low > 0:
            outcome = "higher, within the margin" if within else "higher"
        else:
            outcome = "lower, within the margin" if within else "lower"
    last = looks[-1] if looks else Look(0, 0, verdict.mean, None)
    return replace(
        verdict, outcome=outcome, seeds=last.seeds, pairs=last.pairs, mean=last.mean, interval=interval, looks=looks,
        cases=cases, share=share, conflict=conflict,
    )  # fmt: skip


Key = TypeVar("Key", bound=Hashable)


def decide_family(
    verdicts: Mapping[Key, Verdict],
    *,
    size: int | None = None,
    correction: Literal["holm", "benjamini-hochberg"] = "holm",
) -> dict[Key, Verdict]:
    """Decide comparisons together, as a family with one error rate.

    Holm's procedure: with r signs decided, the other signs are decided at ``alpha / (size - r)``. With the procedure of
    Benjamini and Hochberg, for exploratory families, signs are decided at ``alpha * r / size`` for the largest r with
    which r are decided: alpha then bounds the expected share of wrong signs among those decided.

    Args:
        verdicts: The comparisons, each decided alone, by a name of yours.
        size: Number of comparisons of the family, if more than these belong to it.
        correction: The procedure.

    Example:
        >>> clear, close = (decide_differences([mean + (-1) ** i for i in range(16)]) for mean in (3.0, 0.87))
        >>> [one.outcome for one in decide_family({"clear": clear, "close": close}).values()]
        ['higher', 'higher']
        >>> [one.outcome for one in decide_family({"close": close}, size=2).values()]
        ['undecided']
    """
    size = size or max(1, len(verdicts))

    def decided(share: float) -> dict[Key, Verdict]:
        return {name: decide_with(one, size, share) for name, one in verdicts.items()}

    def signs(family: Mapping[Key, Verdict]) -> int:
        return sum(one.outcome.startswith(("higher", "lower")) for one in family.values())

    if correction == "benjamini-hochberg":
        count = next((r for r in range(len(verdicts), 1, -1) if signs(decided(r / size)) >= r), 1)
        return decided(count / size)
    family, count = decided(1 / size), 0
    while count < (count := signs(family)) < size:
        family = decided(1 / (size - count))
    return family


def with_chance(scores: Mapping[int, float], diverged: Collection[int], chance: float) -> dict[int, float]:
    """Scores by seed in which a diverged seed counts as chance accuracy, for a line on how sensitive a verdict is.

    Example:
        >>> with_chance({100: 71.5}, [101], chance=20.0)
        {100: 71.5, 101: 20.0}
    """
    return {**scores, **dict.fromkeys(diverged, chance)}


def check_rule(*, cases: int = 1, margin: float = MARGIN, alpha: float = ALPHA, max_seeds: int = LAST_LOOK) -> None:
    """Check the arguments of the rule.

    Raises:
        UserError: If one is out of its range.

    Example:
        >>> check_rule(margin=-1)
        Traceback (most recent call last):
        contnorm.errors.UserError: margin=-1: use a number of points above 0.
    """
    if not (isinstance(margin, Real) and 0 < margin < math.inf):
        raise UserError(f"margin={margin!r}: use a number of points above 0.")
    if not (isinstance(cases, Integral) and 1 <= cases <= MOST_CASES):
        raise UserError(f"cases={cases!r}: use a whole number from 1 to {MOST_CASES:,}.")
    if not (isinstance(alpha, Real) and 0 < alpha < 1):
        raise UserError(f"alpha={alpha!r}: use a number between 0 and 1.")
    if not isinstance(max_seeds, Integral):
        raise UserError(f"max_seeds={max_seeds!r}: use a whole number, {LOOKS[0]} or more.")
    looks_up_to(max_seeds)


class Reach(NamedTuple):
    """What the last allowed look can show of an equivalence.

    Attributes:
        seeds: Number of seeds of that look.
        half_width: Half the width of its interval, in points.
        margin: The margin.
        probability: Probability that this interval lies within the margin, if the true difference is 0.
    """

    seeds: int
    half_width: float
    margin: float
    probability: float

    @property
    def is_possible(self) -> bool:
        """Whether the interval around a difference of 0 lies within the margin."""
        return self.half_width <= self.margin

    def __str__(self) -> str:
        can = "can be shown" if self.is_possible else "is not to be expected"
        return (
            f"with {self.seeds} seeds the interval is the mean +- {self.half_width:.2f} points, so equivalence within "
            f"{self.margin:g} {can} (probability {self.probability:.2f} if there is no difference)"
        )


def reach(
    std: float, margin: float = MARGIN, cases: int = 1, max_seeds: int = LAST_LOOK, alpha: float = ALPHA
) -> Reach:
    """Return the half width of the interval of the last allowed look, and whether it fits in the margin.

    Args:
        std: Standard deviation of the paired differences, such as that of recorded runs.
        margin, cases, max_seeds, alpha: As in `decide_differences`.

    Example:
        >>> last = reach(2.0)
        >>> last.seeds, round(last.half_width, 2), last.is_possible, round(last.probability, 2)
        (128, 0.43, True, 1.0)
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
        looks.append(Look(seeds, len(sample), fmean(sample) if sample else math.nan, interval))
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
