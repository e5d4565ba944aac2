"""How many seeds a difference needs, from the spread of recorded runs. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from contnorm.bench.comparison import HasRecords, experiment_names, paired_scores, score_title
from contnorm.bench.escape import escape_html, html_table
from contnorm.bench.records import Record, spread_over_seeds
from contnorm.bench.sequential import (
    ALPHA,
    MARGIN,
    MAX_SEEDS,
    Reach,
    check_rule,
    reachable,
    seeds_for_difference,
)
from contnorm.bench.stats import MOST_SEEDS, POWER, Interval, seeds_for_effect, std_interval
from contnorm.errors import UserError

__all__ = ["DIFFERENCES", "PowerRow", "PowerTable", "format_seeds", "power", "power_of_spread"]

DIFFERENCES = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class PowerRow:
    """Seeds that a true difference needs to be detected.

    Attributes:
        difference: The difference, in percentage points.
        fixed: Number of seeds for one paired t test at the end, without looks before.
        staged: Number of seeds of the look that detects it; None if 128 seeds, the last look, are too few.

    Example:
        >>> PowerRow(1.0, fixed=16, staged=32).staged
        32
    """

    difference: float
    fixed: int | None
    staged: int | None


@dataclass(frozen=True)
class PowerTable:
    """Seeds that differences of several sizes need, if the standard deviation of the differences is as recorded.

    Attributes:
        std: Standard deviation of the paired differences, in percentage points.
        std_interval: Its 95 % interval (chi-squared).
        seeds: Number of paired seeds that it is estimated from.
        rows: One for each difference.
        reach: What the last allowed look can show.
        power: Probability of detection.
        cases: Number of comparisons among which alpha is divided.
        alpha: Probability of any wrong verdict in all these comparisons.
        score: Name of the score.
        names: Names of the two experiments.

    Example:
        >>> table = power_of_spread([1.2, -0.3, 0.8, 2.0, -1.1, 0.4], differences=[1, 2])
        >>> round(table.std, 2), [(row.difference, row.fixed, row.staged) for row in table.rows]
        (1.1, [(1, 12, 32), (2, 5, 16)])
    """

    std: float
    std_interval: Interval
    seeds: int
    rows: tuple[PowerRow, ...]
    reach: Reach
    power: float = POWER
    cases: int = 1
    alpha: float = ALPHA
    score: str = "score"
    names: tuple[str, str] = ("a", "b")

    @property
    def summary(self) -> str:
        """What the numbers are estimated from, in a sentence."""
        low, high = self.std_interval
        return (
            f"{score_title(self.score)}, {self.names[0]} and {self.names[1]}: the paired differences of {self.seeds} "
            f"seeds have a standard deviation of {self.std:.2f} points (95 % interval {low:.2f} to {high:.2f})."
        )

    def __str__(self) -> str:
        lines = [self.summary]
        for row in self.rows:
            fixed, staged = format_seeds(row.fixed), format_seeds(row.staged)
            points = f"{row.difference:g} point{'' if row.difference == 1 else 's'}"
            lines.append(f"a difference of {points}: {fixed} seeds in one test, {staged} in stages")
        lines.append(f"equivalence: {self.reach}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show the numbers of seeds as a table."""
        rows = [(f"{row.difference:g}", format_seeds(row.fixed), format_seeds(row.staged)) for row in self.rows]
        table = html_table(("difference (points)", "seeds in one test", "seeds in stages"), rows)
        return f"<p>{escape_html(self.summary)}</p>{table}<p>{escape_html(f'Equivalence: {self.reach}.')}</p>"


def power(
    a: HasRecords | Iterable[Record],
    b: HasRecords | Iterable[Record],
    score: str | None = None,
    *,
    differences: Sequence[float] = DIFFERENCES,
    margin: float = MARGIN,
    cases: int = 1,
    alpha: float = ALPHA,
    max_seeds: int = MAX_SEEDS,
    power: float = POWER,
) -> PowerTable:
    """Return how many seeds differences of several sizes need, from the spread of recorded runs.

    All shared seeds are used, also those that `bench.decide` calls exploratory: they plan, and decide nothing.

    Args:
        a, b: Results of `bench.run`, selections of `bench.load_runs`, or records; each of one experiment.
        score: Name of the score; by default the first one.
        differences: Differences in percentage points, above 0.
        margin: Largest absolute difference that counts as equivalent.
        cases: Number of comparisons among which alpha is divided.
        alpha: Probability of any wrong verdict in all these comparisons.
        max_seeds: Largest number of seeds allowed.
        power: Probability of detection.

    Raises:
        UserError: As in `bench.compare`; for fewer than two shared seeds, or if all differences are equal.

    Example:
        >>> runs = load_runs("runs")  # doctest: +SKIP
        >>> print(power(runs.where(norm="cn"), runs.where(norm="bn")))  # doctest: +SKIP
    """
    scores = paired_scores(a, b, score, defined=True)
    return power_of_spread(
        [scores.a[seed] - scores.b[seed] for seed in sorted(scores.a)],
        differences=differences,
        margin=margin,
        cases=cases,
        alpha=alpha,
        max_seeds=max_seeds,
        power=power,
        score=scores.name,
        names=experiment_names(*scores.configs),
    )


def power_of_spread(
    recorded: Sequence[float],
    *,
    differences: Sequence[float] = DIFFERENCES,
    margin: float = MARGIN,
    cases: int = 1,
    alpha: float = ALPHA,
    max_seeds: int = MAX_SEEDS,
    power: float = POWER,
    score: str = "score",
    names: tuple[str, str] = ("a", "b"),
) -> PowerTable:
    """Return how many seeds differences of several sizes need, from recorded differences.

    Args:
        recorded: Paired differences, in percentage points; only their standard deviation is used.
        differences, margin, cases, alpha, max_seeds, power: As in `power`.
        score, names: What the table names.

    Example:
        >>> [(row.difference, row.fixed, row.staged) for row in power_of_spread([0.5, -0.5, 1.5], differences=[1]).rows]
        [(1, 10, 32)]
    """
    check_rule(cases=cases, margin=margin, alpha=alpha, max_seeds=max_seeds)
    if not 0 < power < 1:
        raise UserError(f"power={power}: use a number between 0 and 1.")
    for difference in differences:
        if not 0 < difference < math.inf:
            raise UserError(f"difference={difference}: use a number of points above 0.")
    _, std = spread_over_seeds(list(recorded))
    interval = std_interval(recorded)
    if interval is None:
        raise UserError(f"the spread of differences needs two shared seeds or more, got {len(recorded)}.")
    if not std:
        raise UserError("all recorded differences are equal, so their spread tells nothing about the seeds needed.")
    rows = tuple(
        PowerRow(
            difference,
            seeds_for_effect(difference / std, power=power, level=1 - alpha / cases),
            seeds_for_difference(std, difference, cases, power, alpha),
        )
        for difference in differences
    )
    reach = reachable(std, margin, cases, max_seeds, alpha)
    return PowerTable(std, interval, len(recorded), rows, reach, power, cases, alpha, score, names)


def format_seeds(seeds: int | None) -> str:
    """Number of seeds in a table.

    Example:
        >>> format_seeds(4096), format_seeds(None)
        ('4,096', 'over 128')
    """
    if seeds is None:
        return f"over {MAX_SEEDS}"
    return f"over {MOST_SEEDS:,}" if seeds >= MOST_SEEDS else f"{seeds:,}"
