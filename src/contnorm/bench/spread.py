"""Compare the spread of two experiments over seeds: ratios with bootstrap intervals, paired by seed. Needs no torch.

Two measures of spread are compared. The variance is the usual one, but a few extreme seeds determine it. The mean
absolute deviation from the median is less sensitive to the tails, and its bootstrap interval misses the true ratio less
often. Both are also shown without the lowest and the highest seeds of each experiment, and a spread is called larger
only if the second measure says so with these seeds and without them. docs/concepts/deciding.md has simulated rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from contnorm.bench.escape import escape_html, html_table
from contnorm.bench.lazy_numpy import NDArray, np
from contnorm.bench.stats import LEVEL, RESAMPLES, Interval
from contnorm.errors import UserError

__all__ = ["FEWEST_SEEDS", "Ratio", "Spread", "spread_ratio"]

FEWEST_SEEDS = 8  # a bootstrap of fewer values has no use
_SHARE = 0.05  # of the seeds that are extreme at either end

_Values: TypeAlias = "NDArray[np.float64]"


class Ratio(NamedTuple):
    """A ratio of two spreads, and its bootstrap interval.

    Example:
        >>> print(Ratio(3.32, Interval(1.45, 5.98)))
        3.32 (1.45 to 5.98)
    """

    value: float
    interval: Interval

    @property
    def is_resolved(self) -> bool:
        """Whether the interval does not contain 1."""
        return not self.interval.holds(1)

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.interval.low:.2f} to {self.interval.high:.2f})"


@dataclass(frozen=True)
class Spread:
    """Spread of a score over seeds of experiment a, divided by that of b, on the seeds that both have.

    Attributes:
        seeds: Number of shared seeds.
        extremes: Number of seeds at either end that are left out in the ratios without extreme seeds.
        variance: Ratio of the sample variances.
        deviation: Ratio of the mean absolute deviations from the median.
        variance_without_extremes, deviation_without_extremes: The same, without the lowest and the highest scores of a
            and those of b.
        variance_without_lowest: Ratio of the variances without the lowest scores of a and those of b only.
        level: Confidence level of the intervals.
        score: Name of the score, in sentences.
        names: Names of a and b in sentences.

    Example:
        >>> narrow = {seed: 60 + (seed % 7) / 10 for seed in range(40)}
        >>> wide = {seed: 60 + 5 * ((3 * seed) % 7) / 10 for seed in range(40)}
        >>> spread = spread_ratio(wide, narrow)
        >>> spread.verdict, spread.extremes, round(spread.variance.value)
        ('larger', 2, 26)
    """

    seeds: int
    extremes: int
    variance: Ratio
    deviation: Ratio
    variance_without_extremes: Ratio
    deviation_without_extremes: Ratio
    variance_without_lowest: Ratio
    level: float = LEVEL
    score: str = "score"
    names: tuple[str, str] = ("a", "b")

    @property
    def verdict(self) -> Literal["larger", "smaller", "undecided"]:
        """Whether a has the larger spread: both intervals of the mean absolute deviations lie on one side of 1."""
        intervals = (self.deviation.interval, self.deviation_without_extremes.interval)
        if all(interval.low > 1 for interval in intervals):
            return "larger"
        return "smaller" if all(interval.high < 1 for interval in intervals) else "undecided"

    @property
    def sentence(self) -> str:
        """The verdict and the ratios, in a sentence."""
        a, b = self.names
        if self.verdict == "undecided":
            return f"Undecided whether the spread of {self.score} over seeds differs between {a} and {b}: {self}."
        return f"{a} has a {self.verdict} spread of {self.score} over seeds than {b}: {self}."

    def __str__(self) -> str:
        return (
            f"ratio of mean absolute deviations {self.deviation}, without the {self.extremes} lowest and highest seeds "
            f"of each {self.deviation_without_extremes}; variance ratio {self.variance}, without these seeds "
            f"{self.variance_without_extremes}; {100 * self.level:g} % bootstrap intervals, {self.seeds} seeds"
        )

    def _repr_html_(self) -> str:
        """Show the verdict and, as a table, the ratios."""
        ratios = (
            ("mean absolute deviations", self.deviation, self.deviation_without_extremes),
            ("variances", self.variance, self.variance_without_extremes),
        )
        without = f"without the {self.extremes} lowest and highest seeds of each"
        table = html_table(("ratio of", f"all {self.seeds} seeds", without), ratios)
        verdict = self.sentence.removesuffix(f": {self}.")
        intervals = f"In brackets: {100 * self.level:g} % bootstrap intervals."
        return f"<p>{escape_html(verdict)}.</p>{table}<p>{intervals}</p>"


def spread_ratio(
    a: Mapping[int, float],
    b: Mapping[int, float],
    *,
    extremes: int | None = None,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> Spread:
    """Compare the spread of two sets of scores on their shared seeds.

    Seeds are resampled as pairs, with fixed random numbers, and the intervals are percentiles of the ratios.

    Args:
        a, b: Scores by seed.
        extremes: Number of seeds at either end to leave out in the ratios without extreme seeds; by default 5 % of the
            seeds, at least one.
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
    dropped = max(1, round(_SHARE * len(seeds))) if extremes is None else extremes
    if not 0 <= dropped <= (len(seeds) - 3) // 2:
        raise UserError(f"extremes={dropped}: use 0 to {(len(seeds) - 3) // 2} of {len(seeds)} seeds.")
    if not 0 < level < 1:
        raise UserError(f"level={level}: use a number between 0 and 1.")
    first, second = (np.array([scores[seed] for seed in seeds], dtype=np.float64) for scores in (a, b))
    middle = _without(first, dropped, dropped), _without(second, dropped, dropped)
    if not all(np.nanmax(values) > np.nanmin(values) for values in (first, second, *middle)):
        raise UserError("all scores of an experiment are equal, so its spread can't be compared.")
    samples = np.random.default_rng(0).integers(0, len(seeds), (resamples, len(seeds)))

    def ratio(values: _Values, others: _Values, scale: Callable[[_Values], _Values]) -> Ratio:
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may have one value only
            ratios = scale(values[samples]) / scale(others[samples])
        low, high = np.nanquantile(ratios, [(1 - level) / 2, (1 + level) / 2])
        return Ratio(float(scale(values) / scale(others)), Interval(float(low), float(high)))

    above = _without(first, dropped, 0), _without(second, dropped, 0)
    return Spread(
        len(seeds),
        dropped,
        ratio(first, second, _variance),
        ratio(first, second, _deviation),
        ratio(*middle, _variance),
        ratio(*middle, _deviation),
        ratio(*above, _variance),
        level,
    )


def _without(values: _Values, lowest: int, highest: int) -> _Values:
    """Replace the lowest and the highest values by NaN, so that every seed keeps its place."""
    remaining = values.copy()
    order = np.argsort(values, kind="stable")
    remaining[order[:lowest]] = math.nan
    remaining[order[len(values) - highest :]] = math.nan
    return remaining


def _variance(values: _Values) -> _Values:
    """Sample variance over the last dimension, without NaN."""
    count = np.count_nonzero(~np.isnan(values), axis=-1)
    centered = values - (np.nansum(values, axis=-1) / np.maximum(count, 1))[..., None]
    variance: _Values = np.nansum(centered**2, axis=-1) / (count - 1)
    return variance


def _deviation(values: _Values) -> _Values:
    """Mean absolute deviation from the median over the last dimension, without NaN."""
    ordered = np.sort(values, axis=-1)  # NaN at the end
    count = np.maximum(np.count_nonzero(~np.isnan(values), axis=-1), 1)
    low, high = ((count - 1) // 2)[..., None], (count // 2)[..., None]
    median = (np.take_along_axis(ordered, low, -1) + np.take_along_axis(ordered, high, -1)) / 2
    deviation: _Values = np.nansum(np.abs(values - median), axis=-1) / count
    return deviation
