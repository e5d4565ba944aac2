"""Decide the claims of a recipe with runs: by fresh seeds in stages, or by exploratory seeds.

Seeds from 100 on are *fresh*: no setting was chosen with them. `decide_staged` decides by them, with the staged
intervals of `contnorm.bench.sequential`, which are wrong anywhere in a table with a probability of at most 5 %. Lower
seeds are *exploratory*: `decide` uses the ordinary 95 % interval of each case.

A claim holds if all its cases hold and does not hold if any case is refuted. Otherwise it is undecided if some case is.
A claim that one score is above another may also turn out to be *equivalent*, within the margin, in all cases, or to
*hold in part*: in some cases, with the others equivalent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from contnorm.bench.records import spread_over_seeds
from contnorm.bench.sequential import (
    FIRST_SEED,
    LOOKS,
    MARGIN,
    Decision,
    decide_differences,
    reachable,
)
from contnorm.bench.spread import Spread, spread_ratio
from contnorm.bench.stats import (
    RESAMPLES,
    Interval,
    PairedDifference,
    summarize_differences,
    variance_ratio_interval,
)
from contnorm.errors import UserError
from contnorm.paper.cells import RecipeCell, cells_of
from contnorm.paper.comparisons import DETERMINISTIC, CellComparison, comparisons_of, count_comparisons
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import Claim, Recipe
from contnorm.paper.scores import drift_parts

__all__ = [
    "FRESH",
    "OUTCOMES",
    "CaseOutcome",
    "ClaimCase",
    "ClaimResult",
    "Evidence",
    "Outcome",
    "StagedRule",
    "decide",
    "decide_claims",
    "decide_staged",
    "decided_comparisons",
    "differences_of",
    "has_margin",
]

CaseOutcome = Literal["holds", "does not hold", "equivalent", "undecided"]
Outcome = Literal["holds", "holds in part", "equivalent", "does not hold", "undecided"]
FRESH = f"Fresh seeds, from {FIRST_SEED} on"  # title of tables
OUTCOMES: tuple[Outcome, ...] = ("holds", "holds in part", "equivalent", "does not hold", "undecided")
Evidence = Literal["staged", "exploratory"]
TAIL_RESAMPLES = 10  # bootstrap samples beyond either end of an interval, so that its ends are known
MOST_RESAMPLES = 100_000


@dataclass(frozen=True)
class ClaimCase:
    """A claim for one cell or one pair of cells.

    Attributes:
        what: Description of the cells.
        seeds: Number of shared seeds behind the outcome.
        outcome: Decision by the interval.
        paired: Paired differences; None if variances are compared or if there are no records.
        interval: Interval that decides the claim; None if there is none.
        verdict: Verdict of the staged rule on the difference, such as ``"higher, within the margin"``; empty if the
            outcome says all.
        note: What an undecided case lacks, and which seeds are not counted; empty if there is nothing to say.
        ratio: Of which measures of spread ``interval`` is the ratio; empty if it is of a difference.
    """

    what: str
    seeds: int
    outcome: CaseOutcome
    paired: PairedDifference | None
    interval: Interval | None
    verdict: str = ""
    note: str = ""
    ratio: Literal["", "variances", "mean absolute deviations"] = ""


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its cases; without any, none of its cells was measured, and it is undecided.

    Attributes:
        claim: The claim.
        outcome: Decision by the cases.
        cases: The claim for each cell or pair of cells.
        evidence: Whether it is decided by fresh seeds in stages, or by exploratory seeds.
        not_run: Descriptions of the cases that were left out because none of their cells was run.
    """

    claim: Claim
    outcome: Outcome
    cases: tuple[ClaimCase, ...]
    evidence: Evidence = "exploratory"
    not_run: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether any case has a seed."""
        return any(case.seeds for case in self.cases)

    @property
    def has_interval(self) -> bool:
        """Whether any case has an interval."""
        return any(case.interval is not None for case in self.cases)

    @property
    def evidence_text(self) -> str:
        """Kind of evidence with the number of seeds, such as ``"staged: 8 to 32 seeds"``.

        Example:
            >>> cases = [ClaimCase("cn against bn", seeds, "undecided", None, None) for seeds in (5, 5, 0)]
            >>> ClaimResult(Claim("", "above", "acc"), "undecided", tuple(cases)).evidence_text
            'exploratory: 0 to 5 seeds'
        """
        counts = sorted({case.seeds for case in self.cases}) or [0]
        seeds = f"{counts[0]} seed{'' if counts == [1] else 's'}"
        return f"{self.evidence}: {seeds if len(counts) == 1 else f'{counts[0]} to {counts[-1]} seeds'}"


@dataclass(frozen=True)
class StagedRule:
    """The staged rule for the claims of one table.

    Attributes:
        comparisons: Number of comparisons among which the error rate of 5 % is divided.
        margin: Largest difference in points that counts as equivalent.
        max_seeds: Largest number of seeds that undecided cases may get; None for no limit.
    """

    comparisons: int
    margin: float = MARGIN
    max_seeds: int | None = None

    @classmethod
    def of(cls, recipe: Recipe, margin: float = MARGIN, max_seeds: int | None = None) -> StagedRule:
        """The rule for a recipe.

        Example:
            >>> from contnorm.paper.recipe import find_recipe
            >>> StagedRule.of(find_recipe("table12")).comparisons
            5
        """
        return cls(max(1, count_comparisons(recipe)), margin, max_seeds)

    def decide(self, differences: Mapping[int, float], diverged: Collection[int] = ()) -> Decision:
        """Decide one comparison from its differences by seed."""
        return decide_differences(differences, cases=self.comparisons, margin=self.margin, diverged=diverged)

    def half_width(self, std: float, seeds: int) -> float:
        """Half the width of the interval of the look at so many seeds, for a standard deviation of differences."""
        return reachable(std, self.margin, self.comparisons, seeds).half_width


def decide_claims(
    recipe: Recipe, measured: Sequence[MeasuredCell], rule: StagedRule | None = None
) -> tuple[ClaimResult, ...]:
    """Decide all claims of a recipe: by the staged rule, or by exploratory seeds without one.

    Args:
        recipe: The recipe.
        measured: Its cells with their records. For the staged rule, cells that are not among them count as not run.
        rule: The staged rule of the table, for fresh seeds; None for exploratory seeds.
    """
    if rule is None:
        recorded = [one for one in measured if one.records]
        return tuple(decide(claim, recorded) for claim in recipe.claims)
    places = {tuple(one.cell.place.items()) for one in measured}
    absent = [MeasuredCell(cell, {}) for cell in cells_of(recipe) if tuple(cell.place.items()) not in places]
    return tuple(decide_staged(claim, [*measured, *absent], rule) for claim in recipe.claims)


def decide(claim: Claim, measured: Sequence[MeasuredCell]) -> ClaimResult:
    """Decide a claim by exploratory seeds: the 95 % interval of the paired differences of each case."""
    by_cell = {one.cell: one for one in measured}
    comparisons = comparisons_of(claim, list(by_cell))
    cases = tuple(_exploratory_case(claim, one, _Values(claim, one, by_cell)) for one in comparisons)
    return ClaimResult(claim, _overall(cases), cases)


def decide_staged(claim: Claim, measured: Sequence[MeasuredCell], rule: StagedRule) -> ClaimResult:
    """Decide a claim by fresh seeds, in stages.

    Args:
        claim: The claim.
        measured: All cells of the table, with the records of fresh seeds. Cases none of whose cells was run are listed
            in `ClaimResult.not_run` and do not count.
        rule: The staged rule of the table.
    """
    by_cell = {one.cell: one for one in measured}
    cases, not_run = [], []
    for one in comparisons_of(claim, list(by_cell)):
        if any(by_cell[cell].run for cell in one.cells):
            cases.append(_staged_case(claim, one, _Values(claim, one, by_cell), rule))
        else:
            not_run.append(one.label)
    return ClaimResult(claim, _overall(cases), tuple(cases), "staged", tuple(not_run))


def decided_comparisons(
    recipe: Recipe, measured: Sequence[MeasuredCell], rule: StagedRule
) -> list[tuple[CellComparison, bool]]:
    """Comparisons of a recipe's claims that seeds can decide, those not run included, and whether each is decided."""
    by_cell = {one.cell: one for one in measured}
    return [
        (one, _staged_case(claim, one, values, rule).outcome != "undecided")
        for claim in recipe.claims
        for one in comparisons_of(claim, list(by_cell))
        if one.is_complete and (values := _Values(claim, one, by_cell)).has_score
    ]


def differences_of(
    claim: Claim, comparison: CellComparison, measured: Mapping[RecipeCell, MeasuredCell]
) -> dict[int, float]:
    """The differences by seed that decide one case of a claim."""
    return _Values(claim, comparison, measured).differences


def _overall(cases: Sequence[ClaimCase]) -> Outcome:
    outcomes = {case.outcome for case in cases}
    if "does not hold" in outcomes:
        return "does not hold"
    if not outcomes or "undecided" in outcomes:
        return "undecided"
    if len(outcomes) > 1:
        return "holds in part"
    return "holds" if outcomes == {"holds"} else "equivalent"


class _Values:
    """The values of a comparison by seed."""

    def __init__(self, claim: Claim, comparison: CellComparison, measured: Mapping[RecipeCell, MeasuredCell]) -> None:
        self._claim = claim
        self.cells = [measured[cell] for cell in comparison.cells]
        self._lacks_partner = comparison.than is not None and comparison.partner is None

    @property
    def pair(self) -> tuple[dict[int, float], dict[int, float]]:
        """Score of the cell and of its partner, on all their seeds."""
        ours = _defined(self.cells[0].values(self._claim.score))
        return ours, _defined(self.cells[1].values(self._claim.score)) if len(self.cells) > 1 else {}

    @property
    def differences(self) -> dict[int, float]:
        """Differences on shared seeds: from the partner, the other score, the first task or the limit; without NaN."""
        claim = self._claim
        if self._lacks_partner:
            return {}
        if len(self.cells) == 1 and not claim.than_score and claim.kind == "flat":
            return {seed: curve[-1] - curve[0] for seed, curve in self.cells[0].curves(claim.score).items()}
        ours, theirs = self.pair
        if len(self.cells) == 1:
            limit = dict.fromkeys(ours, claim.limit)
            theirs = self.cells[0].values(claim.than_score) if claim.than_score else limit
        differences = {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
        return {seed: value for seed, value in differences.items() if not math.isnan(value)}

    @property
    def diverged(self) -> set[int]:
        """Seeds that have no pair because a run diverged."""
        return {seed for one in self.cells for seed in one.diverged}

    @property
    def has_score(self) -> bool:
        """Whether runs may have the score: not if shared seeds lack it, as that of forgetting after one task."""
        return bool(self.differences) or not set.intersection(*(set(one.records) for one in self.cells))

    @property
    def not_run(self) -> list[str]:
        """Labels of the cells without a run."""
        return [one.cell.label for one in self.cells if not one.run]


def _defined(scores: Mapping[int, float]) -> dict[int, float]:
    return {seed: value for seed, value in scores.items() if not math.isnan(value)}


def _exploratory_case(claim: Claim, comparison: CellComparison, values: _Values) -> ClaimCase:
    what = comparison.label
    if claim.kind == "steadier":
        ours, theirs = values.pair
        ratio = variance_ratio_interval(list(ours.values()), list(theirs.values())) if ours and theirs else None
        return ClaimCase(what, min(len(ours), len(theirs)), _by_interval(claim, ratio), None, ratio, ratio="variances")
    differences = list(values.differences.values())
    pair = summarize_differences(differences) if differences else None
    interval = pair.t if pair else None
    return ClaimCase(what, len(differences), _by_interval(claim, interval), pair, interval)


def _by_interval(claim: Claim, interval: Interval | None) -> CaseOutcome:
    """Outcome of a case: on which side of its bound, or of its margins, the interval lies."""
    if interval is None:
        return "undecided"
    if claim.kind in ("near", "flat"):
        if -claim.margin <= interval.low and interval.high <= claim.margin:
            return "holds"
        return "does not hold" if interval.low > claim.margin or interval.high < -claim.margin else "undecided"
    return _side(interval, 1.0 if claim.kind == "steadier" else 0.0, above=claim.kind == "above")


def _side(interval: Interval, bound: float, *, above: bool) -> CaseOutcome:
    """Whether an interval lies above a bound, or below it, as claimed."""
    if interval.holds(bound):
        return "undecided"
    return "holds" if (interval.low > bound) == above else "does not hold"


def _staged_case(claim: Claim, comparison: CellComparison, values: _Values, rule: StagedRule) -> ClaimCase:
    what = comparison.label
    if claim.score in DETERMINISTIC:
        return _exploratory_case(claim, comparison, values)  # any seed says all
    differences = values.differences
    decision = rule.decide(differences, values.diverged)
    counted = {seed: value for seed, value in differences.items() if _is_counted(seed, decision)}
    if claim.kind == "steadier":
        return _staged_spread_case(what, decision, values, counted, rule)
    pair = summarize_differences(list(counted.values())) if counted else None
    outcome, verdict = _staged_outcome(claim, decision)
    note = "; ".join(_staged_notes(claim, decision, values, pair, rule))
    return ClaimCase(what, len(counted), outcome, pair, decision.interval, verdict, note)


def _staged_spread_case(
    what: str, decision: Decision, values: _Values, counted: Collection[int], rule: StagedRule
) -> ClaimCase:
    """Case of a claim on the spread over seeds: with and without the extreme seeds, at every complete look."""
    looks = [(look.level, FIRST_SEED + look.seeds) for look in decision.looks]
    spreads = [spread for level, end in looks if (spread := _spread(values, end, level)) is not None]
    notes = [f"{decision.diverged} of {decision.seeds} seeds diverged"] if decision.diverged else []
    if not spreads:
        none = f"no fresh seeds of {' and '.join(values.not_run)}"
        first = f"{len(counted)} of the {LOOKS[0]} seeds of the first look"
        notes.append(none if values.not_run else "no spread over seeds" if decision.looks else first)
        return ClaimCase(what, len(counted), "undecided", None, None, note="; ".join(notes))
    interval = _intersection([spread.deviation.interval for spread in spreads])
    without = _intersection([spread.deviation_without_extremes.interval for spread in spreads])
    sides: set[CaseOutcome] = {_side(interval, 1.0, above=False), _side(without, 1.0, above=False)}
    notes.append(
        f"{_ratio_text(without)} without the {spreads[-1].extremes} lowest and highest seeds of each; ratio of "
        f"variances {spreads[-1].variance.value:.2f}, {spreads[-1].variance_without_extremes.value:.2f} without them"
    )
    outcome = sides.pop() if len(sides) == 1 else "undecided"
    if outcome == "undecided":
        notes.append(_needed_text(_needed_ratio_seeds(interval, decision.seeds), rule.max_seeds))
    note = "; ".join(notes)
    return ClaimCase(what, len(counted), outcome, None, interval, note=note, ratio="mean absolute deviations")


def _spread(values: _Values, end: int, level: float) -> Spread | None:
    """Ratio of the spreads on the fresh seeds below ``end``; None if there are too few or they are all equal."""
    ours, theirs = (tuple((seed, v) for seed, v in one.items() if FIRST_SEED <= seed < end) for one in values.pair)
    return _resampled_spread(ours, theirs, level)


@lru_cache(maxsize=256)  # at every look, all cases are decided anew, and a bootstrap takes a second
def _resampled_spread(
    ours: tuple[tuple[int, float], ...], theirs: tuple[tuple[int, float], ...], level: float
) -> Spread | None:
    resamples = min(MOST_RESAMPLES, max(RESAMPLES, round(TAIL_RESAMPLES / (1 - level))))
    try:
        with np.errstate(invalid="ignore"):  # resamples of few seeds may have no spread, and infinite ratios
            return spread_ratio(dict(ours), dict(theirs), level=level, resamples=resamples)
    except UserError:
        return None


def _intersection(intervals: Sequence[Interval]) -> Interval:
    """Intersection of the intervals of ratios of all looks; one that does not overlap the earlier ones is left out."""
    low, high = 0.0, math.inf
    for one in intervals:
        new = (
            max(low, 0.0 if math.isnan(one.low) else one.low),
            min(high, math.inf if math.isnan(one.high) else one.high),
        )
        if new[0] <= new[1]:
            low, high = new
    return Interval(low, high)


def _ratio_text(interval: Interval) -> str:
    return f"{interval.low:.2f} to {interval.high:.2f}"


def _needed_ratio_seeds(interval: Interval, seeds: int) -> int | None:
    """Seeds at which the interval of a ratio would exclude 1: its width on the log scale goes with 1 / sqrt(seeds)."""
    if not 0 < interval.low <= interval.high < math.inf:
        return None
    center = (math.log(interval.low) + math.log(interval.high)) / 2
    if center == 0:
        return None
    half = (math.log(interval.high) - math.log(interval.low)) / 2
    wanted = max(seeds + 1, seeds * (half / abs(center)) ** 2)
    return next((look for look in LOOKS if look >= wanted), None)


def _is_counted(seed: int, decision: Decision) -> bool:
    """Whether a fresh seed belongs to the last complete look or, before the first one, to the look that is begun."""
    return FIRST_SEED <= seed < FIRST_SEED + (decision.seeds or LOOKS[0])


def _staged_outcome(claim: Claim, decision: Decision) -> tuple[CaseOutcome, str]:
    """Outcome of a case and, for a claim that a score is above another, the verdict on the difference."""
    if not has_margin(claim):
        return _by_interval(claim, decision.interval), ""
    sides: dict[str, CaseOutcome] = {"higher": "holds", "lower": "does not hold", "equivalent": "equivalent"}
    return sides.get(decision.verdict.partition(",")[0], "undecided"), decision.verdict


def has_margin(claim: Claim) -> bool:
    """Whether the margin of the rule applies to a claim: it is in points of a score, and a drift is a distance.

    Example:
        >>> has_margin(Claim("", "above", "acc")), has_margin(Claim("", "above", "drift_var_2"))
        (True, False)
    """
    return claim.kind == "above" and drift_parts(claim.score) is None


def _staged_notes(
    claim: Claim, decision: Decision, values: _Values, pair: PairedDifference | None, rule: StagedRule
) -> Iterator[str]:
    if decision.diverged:
        yield f"{decision.diverged} of {decision.seeds} seeds diverged"
    if decision.conflict:
        yield "the intervals of two looks do not overlap, and the later one is left out"
    if _staged_outcome(claim, decision)[0] != "undecided":
        return
    if values.not_run:
        yield f"no fresh seeds of {' and '.join(values.not_run)}"
    elif not values.has_score:
        yield f"{claim.score} has no value in these runs"
    elif decision.interval is None or pair is None:
        yield f"{0 if pair is None else len(pair.differences)} of the {LOOKS[0]} seeds of the first look"
    else:
        yield _needed_text(_needed_seeds(claim, decision, pair, rule), rule.max_seeds)


def _needed_seeds(claim: Claim, decision: Decision, pair: PairedDifference, rule: StagedRule) -> int | None:
    """Seeds of the first later look that decides a case if mean and spread stay as they are; None if none does."""
    std = spread_over_seeds(list(pair.differences))[1]
    for seeds in LOOKS:
        half = rule.half_width(std, seeds)
        interval = Interval(pair.mean - half, pair.mean + half)
        if seeds > decision.seeds and _is_decisive(claim, interval, rule):
            return seeds
    return None


def _is_decisive(claim: Claim, interval: Interval, rule: StagedRule) -> bool:
    within = -rule.margin < interval.low and interval.high < rule.margin
    return _by_interval(claim, interval) != "undecided" or (has_margin(claim) and within)


def _needed_text(seeds: int | None, limit: int | None) -> str:
    if seeds is None:
        return f"would need more than {LOOKS[-1]} seeds, with this mean and spread"
    beyond = f", more than the limit of {limit}" if limit is not None and seeds > limit else ""
    return f"would need about {seeds:,} seeds, with this mean and spread{beyond}"
