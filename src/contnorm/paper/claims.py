"""Decide the claims of a recipe by its runs.

Seeds from 100 on are *fresh*: no setting was chosen with them. They decide by the rule of `contnorm.bench.sequential`;
the comparisons of a table on one stream, of which both cells were run, are a family. Lower seeds are *exploratory*:
they have ordinary 95 % intervals, which decide nothing.

A claim holds if all its cases hold and does not hold if any case is refuted. Otherwise it is undecided if some case is.
A claim that one score is above another may also turn out to be *equivalent*, within the margin, in all cases, or to
*hold in part*: in some cases, with the others equivalent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from contnorm.bench.comparison import chance_level
from contnorm.bench.records import spread_over_seeds
from contnorm.bench.sequential import (
    FIRST_SEED,
    LOOKS,
    MARGIN,
    MAX_SEEDS,
    Verdict,
    decide_differences,
    decide_family,
    decide_with,
    reach,
    with_chance,
)
from contnorm.bench.stats import Interval, PairedDifference, summarize_differences, variance_ratio_interval
from contnorm.paper.cells import RecipeCell, cells_of
from contnorm.paper.comparisons import DETERMINISTIC, CellComparison, comparison_key, comparisons_of
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
    "decide_claims",
    "decided_comparisons",
    "differences_of",
    "has_margin",
]

CaseOutcome = Literal["holds", "does not hold", "equivalent", "undecided"]
Outcome = Literal["holds", "holds in part", "equivalent", "does not hold", "undecided"]
FRESH = f"Fresh seeds, from {FIRST_SEED} on"  # title of tables
OUTCOMES: tuple[Outcome, ...] = ("holds", "holds in part", "equivalent", "does not hold", "undecided")
Evidence = Literal["staged", "exploratory"]


@dataclass(frozen=True)
class ClaimCase:
    """A claim for one cell or one pair of cells.

    Attributes:
        what: Description of the cells.
        seeds: Number of shared seeds behind the outcome.
        outcome: Decision by the interval.
        paired: Paired differences; None if variances are compared or if there are no records.
        interval: Interval that decides the claim, or of exploratory seeds an ordinary 95 % interval; None if there is
            none.
        verdict: Verdict of the staged rule on the difference, such as ``"higher, within the margin"``; empty if the
            outcome says all.
        note: What an undecided case lacks, and which seeds are not counted; empty if there is nothing to say.
        is_ratio: Whether ``interval`` is of a ratio of variances.
    """

    what: str
    seeds: int
    outcome: CaseOutcome
    paired: PairedDifference | None
    interval: Interval | None
    verdict: str = ""
    note: str = ""
    is_ratio: bool = False


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
    """How fresh seeds decide the claims of a table.

    Attributes:
        margin: Largest difference in points that counts as equivalent.
        max_seeds: Largest number of seeds that undecided cases may get.
        exploratory: Whether signs are decided by the procedure of Benjamini and Hochberg instead of Holm's, as in
            tables of our own.
    """

    margin: float = MARGIN
    max_seeds: int = MAX_SEEDS
    exploratory: bool = False

    @classmethod
    def of(cls, recipe: Recipe, margin: float = MARGIN, max_seeds: int = MAX_SEEDS) -> StagedRule:
        """The rule for a recipe.

        Example:
            >>> from contnorm.paper.recipe import find_recipe
            >>> StagedRule.of(find_recipe("table12")).exploratory, StagedRule.of(find_recipe("panel")).exploratory
            (False, True)
        """
        return cls(margin, max_seeds, exploratory=recipe.ours)


def decide_claims(
    recipe: Recipe, measured: Sequence[MeasuredCell], rule: StagedRule | None = None
) -> tuple[ClaimResult, ...]:
    """Decide all claims of a recipe by fresh seeds; or show their numbers by exploratory seeds, without a rule.

    Args:
        recipe: The recipe.
        measured: Its cells with their records. For fresh seeds, cells that are not among them count as not run.
        rule: The rule for fresh seeds; None for exploratory seeds.
    """
    if rule is not None:
        places = {tuple(one.cell.place.items()) for one in measured}
        absent = [cell for cell in cells_of(recipe) if tuple(cell.place.items()) not in places]
        measured = [*measured, *(MeasuredCell(cell, {}) for cell in absent)]
    else:
        measured = [one for one in measured if one.records]
    return tuple(decide_several(recipe.claims, measured, rule))


def decide_several(
    claims: Sequence[Claim], measured: Sequence[MeasuredCell], rule: StagedRule | None
) -> Iterator[ClaimResult]:
    """Decide some claims together, by the cells of their table; as `decide_claims`.

    Cases of fresh seeds none of whose cells was run are listed in `ClaimResult.not_run` and do not count.
    """
    by_cell = {one.cell: one for one in measured}
    compared = [(claim, list(comparisons_of(claim, list(by_cell)))) for claim in claims]
    families = {} if rule is None else _families(compared, by_cell, rule)
    for claim, comparisons in compared:
        cases, not_run = [], []
        for one in comparisons:
            values = _Values(claim, one, by_cell)
            if rule is not None and not any(by_cell[cell].run for cell in one.cells):
                not_run.append(one.label)
            elif rule is None or claim.score in DETERMINISTIC or claim.kind == "steadier":
                cases.append(_exploratory_case(claim, one, values))
            else:
                cases.append(_staged_case(claim, one, values, families.get(one.stream), rule))
        evidence: Evidence = "exploratory" if rule is None else "staged"
        yield ClaimResult(claim, _overall(cases), tuple(cases), evidence, tuple(not_run))


def decided_comparisons(
    recipe: Recipe, measured: Sequence[MeasuredCell], rule: StagedRule
) -> list[tuple[CellComparison, bool]]:
    """Comparisons of a recipe's claims that seeds can decide, those not run included, and whether each is decided."""
    by_cell = {one.cell: one for one in measured}
    claims = [claim for claim in recipe.claims if claim.kind != "steadier"]
    compared = [(claim, list(comparisons_of(claim, list(by_cell)))) for claim in claims]
    families = _families(compared, by_cell, rule)
    return [
        (one, case.outcome != "undecided")
        for claim, comparisons in compared
        for one in comparisons
        if one.is_complete and (values := _Values(claim, one, by_cell)).has_score
        for case in [_staged_case(claim, one, values, families.get(one.stream), rule)]
    ]


def differences_of(
    claim: Claim, comparison: CellComparison, measured: Mapping[RecipeCell, MeasuredCell]
) -> dict[int, float]:
    """The differences by seed that decide one case of a claim."""
    return _Values(claim, comparison, measured).differences


@dataclass(frozen=True)
class _Family:
    """Comparisons of a table on one stream: their number, and the share of alpha at which signs are decided."""

    size: int
    share: float


def _families(
    compared: Sequence[tuple[Claim, Sequence[CellComparison]]],
    cells: Mapping[RecipeCell, MeasuredCell],
    rule: StagedRule,
) -> dict[str, _Family]:
    """Families by stream, of the comparisons that have a look."""
    by_stream: dict[str, dict[Hashable, Verdict]] = {}
    for claim, comparisons in compared:
        if claim.score in DETERMINISTIC or claim.kind == "steadier":
            continue
        for one in comparisons:
            verdict = _alone(claim, _Values(claim, one, cells), rule)
            if verdict.looks:
                by_stream.setdefault(one.stream, {})[comparison_key(claim, one)] = verdict
    correction: Literal["holm", "benjamini-hochberg"] = "benjamini-hochberg" if rule.exploratory else "holm"
    families = {stream: decide_family(some, correction=correction) for stream, some in by_stream.items()}
    return {stream: _Family(len(some), next(iter(some.values())).share) for stream, some in families.items()}


def _alone(claim: Claim, values: _Values, rule: StagedRule) -> Verdict:
    return decide_differences(values.differences, margin=rule.margin, diverged=values.diverged)


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
    """An ordinary 95 % interval, which decides nothing; a score that is equal for all seeds needs no rule."""
    what = comparison.label
    if claim.kind == "steadier":
        ours, theirs = values.pair
        ratio = variance_ratio_interval(list(ours.values()), list(theirs.values())) if ours and theirs else None
        return ClaimCase(what, min(len(ours), len(theirs)), "undecided", None, ratio, is_ratio=True)
    differences = list(values.differences.values())
    pair = summarize_differences(differences) if differences else None
    interval = pair.t if pair else None
    outcome = _by_interval(claim, interval) if claim.score in DETERMINISTIC else "undecided"
    return ClaimCase(what, len(differences), outcome, pair, interval)


def _by_interval(claim: Claim, interval: Interval | None) -> CaseOutcome:
    """Outcome of a case: on which side of its bound, or of its margins, the interval lies."""
    if interval is None:
        return "undecided"
    if claim.kind in ("near", "flat"):
        if -claim.margin <= interval.low and interval.high <= claim.margin:
            return "holds"
        return "does not hold" if interval.low > claim.margin or interval.high < -claim.margin else "undecided"
    if interval.holds(0):
        return "undecided"
    return "holds" if (interval.low > 0) == (claim.kind == "above") else "does not hold"


def _staged_case(
    claim: Claim, comparison: CellComparison, values: _Values, family: _Family | None, rule: StagedRule
) -> ClaimCase:
    verdict = _alone(claim, values, rule)
    if family is not None:  # whether a difference is within a margin is decided at alpha / size
        share = 1 / family.size if claim.kind in ("near", "flat") else family.share
        verdict = decide_with(verdict, family.size, share)
    last = FIRST_SEED + (verdict.seeds or LOOKS[0])
    counted = [value for seed, value in verdict.differences.items() if FIRST_SEED <= seed < last]
    pair = summarize_differences(counted) if counted else None
    outcome = _outcome(claim, verdict)
    notes = []
    if verdict.diverged:
        notes.append(f"{verdict.diverged} of {verdict.seeds} seeds diverged{_at_chance(claim, values, verdict)}")
    if verdict.conflict:
        notes.append("the intervals of two looks do not overlap, and the later one is left out")
    if outcome == "undecided":
        notes.append(_lacking(claim, values, verdict, pair, rule))
    shown = verdict.outcome if has_margin(claim) else ""
    return ClaimCase(comparison.label, len(counted), outcome, pair, verdict.interval, shown, "; ".join(notes))


def _outcome(claim: Claim, verdict: Verdict) -> CaseOutcome:
    if not has_margin(claim):
        return _by_interval(claim, verdict.interval)
    outcomes: dict[str, CaseOutcome] = {"higher": "holds", "lower": "does not hold", "equivalent": "equivalent"}
    return outcomes.get(verdict.outcome.partition(",")[0], "undecided")


def _at_chance(claim: Claim, values: _Values, verdict: Verdict) -> str:
    """The outcome if each diverged run counts as chance accuracy; empty if the score has no chance level."""
    records = [record for one in values.cells for record in one.records.values()]
    chance = chance_level(records[0], claim.score) if records and len(values.cells) == 2 else None
    if chance is None:
        return ""
    ours, theirs = (
        with_chance(scores, one.diverged, chance) for scores, one in zip(values.pair, values.cells, strict=True)
    )
    differences = {seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()}
    full = replace(verdict, differences=differences, without_pair=frozenset())
    return f" (as chance accuracy: {_outcome(claim, decide_with(full, verdict.cases, verdict.share))})"


def _lacking(claim: Claim, values: _Values, verdict: Verdict, pair: PairedDifference | None, rule: StagedRule) -> str:
    """What an undecided case lacks."""
    if values.not_run:
        return f"no fresh seeds of {' and '.join(values.not_run)}"
    if not values.has_score:
        return f"{claim.score} has no value in these runs"
    if verdict.interval is None or pair is None:
        return f"{0 if pair is None else len(pair.differences)} of the {LOOKS[0]} seeds of the first look"
    std = spread_over_seeds(list(pair.differences))[1]
    for seeds in (look for look in LOOKS if look > verdict.seeds):
        half = reach(std, rule.margin, verdict.cases, seeds).half_width
        interval = Interval(pair.mean - half, pair.mean + half)
        within = has_margin(claim) and -rule.margin < interval.low and interval.high < rule.margin
        if within or _by_interval(claim, interval) != "undecided":
            beyond = f", more than the limit of {rule.max_seeds}" if seeds > rule.max_seeds else ""
            return f"would need about {seeds} seeds, with this mean and spread{beyond}"
    return f"would need more than {LOOKS[-1]} seeds, with this mean and spread"


def has_margin(claim: Claim) -> bool:
    """Whether the margin of the rule applies to a claim: it is in points of a score, and a drift is a distance.

    Example:
        >>> has_margin(Claim("", "above", "acc")), has_margin(Claim("", "above", "drift_var_2"))
        (True, False)
    """
    return claim.kind == "above" and drift_parts(claim.score) is None
