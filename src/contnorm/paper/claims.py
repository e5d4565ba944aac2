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
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from contnorm.bench import sequential
from contnorm.bench.comparison import chance_level
from contnorm.bench.records import spread_over_seeds
from contnorm.bench.stats import Interval, PairedDifference, summarize_differences, variance_ratio_interval
from contnorm.paper.cells import MeasuredCell, RecipeCell, cells_of, comparable, matches
from contnorm.paper.recipe import Claim, PublishedNumber, Recipe, drift_parts

DETERMINISTIC = ("parameters",)  # scores that are equal for all seeds, so that they need no interval
CaseOutcome = Literal["holds", "does not hold", "equivalent", "undecided"]
Outcome = Literal["holds", "holds in part", "equivalent", "does not hold", "undecided"]
Evidence = Literal["staged", "exploratory"]


class CellComparison(NamedTuple):
    """Cells that one case of a claim compares.

    Attributes:
        cell: The cell that the claim is about.
        partner: The cell it is compared with; None if it is compared with a bound or with another score of its own, or
            if the cells have none to compare with.
        than: Selector of the partner; None if it needs none.
    """

    cell: RecipeCell
    partner: RecipeCell | None = None
    than: Mapping[Any, Any] | None = None

    @property
    def cells(self) -> tuple[RecipeCell, ...]:
        """The one or two cells."""
        return (self.cell,) if self.partner is None else (self.cell, self.partner)

    @property
    def stream(self) -> str:
        """Name of the stream, whose comparisons are a family."""
        return str(self.cell.place["stream"])

    @property
    def is_complete(self) -> bool:
        """Whether it lacks no partner."""
        return self.partner is not None or self.than is None

    @property
    def label(self) -> str:
        """Description of the cells: of the partner, the dimensions in which it differs, and its norm."""
        if self.than is None or self.partner is None:
            other = " ".join(map(str, (self.than or {}).values()))
            return f"{self.cell.label} against {other}" if other else self.cell.label
        a, b = self.cell.place, self.partner.place
        keys = ("stream", "strategy", "forward", "buffer", "batch", "replay", "tasks", "labels")
        differing = [str(b[key]) for key in keys if a[key] != b[key]]
        differing += [] if differing and self.cell.norm == self.partner.norm else [self.partner.norm]
        return f"{self.cell.label} against {' '.join(differing)}"


def comparisons_of(claim: Claim, cells: Sequence[RecipeCell]) -> Iterator[CellComparison]:
    """All comparisons of a claim among some cells; one without its partner if no cell matches a selector.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> table9 = find_recipe("table9")
        >>> [one.label for one in comparisons_of(table9.claims[0], cells_of(table9))][0]
        'split-cifar100 er tasks 4 bn* against bn'
    """
    for cell in cells:
        if not matches(cell.place, claim.cells):
            continue
        if claim.kind in ("under", "flat") or claim.than_score:
            yield CellComparison(cell)
        for than in claim.than:
            partners: list[RecipeCell | None] = [partner for partner in cells if comparable(cell, partner, than)]
            yield from (CellComparison(cell, partner, than) for partner in partners or [None])


def published_values(recipe: Recipe, claim: Claim, comparison: CellComparison) -> tuple[PublishedNumber, ...]:
    """Published numbers that a comparison is about, in the order of its cells; empty if one is not published.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> table9 = find_recipe("table9")
        >>> first = next(comparisons_of(table9.claims[0], cells_of(table9)))
        >>> [number.mean for number in published_values(table9, table9.claims[0], first)]
        [61.38, 60.14]
    """
    metrics = {score: metric for metric, score in recipe.scores.items()}
    of = [(cell, claim.score) for cell in comparison.cells]
    of += [(comparison.cell, claim.than_score)] if claim.than_score else []
    numbers = [cell.published.get(metrics.get(score, "")) for cell, score in of]
    known = tuple(number for number in numbers if number is not None and number.mean is not None)
    return known if len(known) == len(of) and comparison.is_complete else ()


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

    @property
    def outcome_text(self) -> str:
        """Outcome with the verdict on the difference, and what the case lacks.

        Example:
            >>> ClaimCase("", 8, "holds", None, None, "higher, within the margin").outcome_text
            'holds (higher, within the margin)'
            >>> ClaimCase("", 8, "undecided", None, None, "undecided", "would need about 64 seeds").outcome_text
            'undecided (would need about 64 seeds)'
        """
        more = "; ".join(filter(None, ["" if self.verdict == self.outcome else self.verdict, self.note]))
        return f"{self.outcome} ({more})" if more else self.outcome

    @property
    def no_interval_reason(self) -> str:
        """Reason why there is no interval.

        Example:
            >>> ClaimCase("cn against bn", 0, "undecided", None, None).no_interval_reason
            'no values in the records'
        """
        if self.note:  # says it
            return f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"
        return {0: "no values in the records", 1: "one seed"}.get(self.seeds, "no variation over seeds")

    @property
    def numbers(self) -> tuple[str, str]:
        """Text of the difference and the interval; for spreads the interval of their ratio.

        Example:
            >>> pair = summarize_differences([1.0, 2.0, 3.0])
            >>> ClaimCase("cn against bn", 3, "undecided", pair, pair.t).numbers
            ('+2.00', '-0.48 to +4.48')
        """
        if self.is_ratio and self.interval is not None:
            return "-", f"ratio of variances {self.interval.low:.2f} to {self.interval.high:.2f}"
        return "-" if self.paired is None else f"{self.paired.mean:+.2f}", str(self.interval or "-")


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its cases; without any, none of its cells was measured, and it is undecided.

    Attributes:
        claim: The claim.
        outcome: Decision by the cases.
        cases: The claim for each cell or pair of cells.
        evidence: Whether it is decided by fresh seeds in stages, or by exploratory seeds.
        not_run: Descriptions of the cases that were left out because none of their cells was run.
        decidable: Comparisons that fresh seeds can decide, those not run included, and whether each is decided.
    """

    claim: Claim
    outcome: Outcome
    cases: tuple[ClaimCase, ...]
    evidence: Evidence = "exploratory"
    not_run: tuple[str, ...] = ()
    decidable: tuple[tuple[CellComparison, bool], ...] = field(default=(), compare=False)

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

    def outcome_text(self, *, complete: bool = True) -> str:
        """Outcome, and whether it is of a part of the cells.

        By fresh seeds, that is so if some cases were not run; by exploratory ones, if the table is not ``complete``.
        """
        whole = not self.not_run if self.evidence == "staged" else complete
        return self.outcome + ("" if whole else ", of what is run")

    def title(self, *, complete: bool = True) -> str:
        """Outcome, evidence and text of the claim; ``complete`` is False if some cells of its table are not run.

        Example:
            >>> ClaimResult(Claim("cn over bn", "above", "acc"), "holds", (), "staged", ("cn against bn",)).title()
            'HOLDS, of what is run (staged: 0 seeds): cn over bn (acc)'
        """
        outcome = self.outcome_text(complete=complete).replace(self.outcome, self.outcome.upper(), 1)
        return f"{outcome} ({self.evidence_text}): {self.claim.says} ({self.claim.criterion})"


@dataclass(frozen=True)
class StagedRule:
    """How fresh seeds decide the claims of a table.

    Attributes:
        margin: Largest difference in points that counts as equivalent.
        max_seeds: Largest number of seeds that undecided cases may get.
    """

    margin: float = sequential.MARGIN
    max_seeds: int = sequential.LAST_LOOK


def decide_claims(
    recipe: Recipe, measured: Sequence[MeasuredCell], rule: StagedRule | None = None
) -> tuple[ClaimResult, ...]:
    """Decide all claims of a recipe by fresh seeds; or show their numbers by exploratory seeds, without a rule.

    In a table of our own, signs are decided by the procedure of Benjamini and Hochberg instead of Holm's.

    Args:
        recipe: The recipe.
        measured: Its cells with their records. For fresh seeds, cells that are not among them count as not run.
        rule: The rule for fresh seeds; None for exploratory seeds.
    """
    cells = {one.cell: one for one in measured if one.records or rule is not None}
    if rule is not None:
        places = {tuple(cell.place.items()) for cell in cells}
        absent = (cell for cell in cells_of(recipe) if tuple(cell.place.items()) not in places)
        cells |= {cell: MeasuredCell(cell, {}) for cell in absent}
    compared = [
        (
            claim,
            [_Comparison(claim, one, [cells[cell] for cell in one.cells]) for one in comparisons_of(claim, [*cells])],
        )
        for claim in recipe.claims
    ]
    families = {} if rule is None else _families([one for _, some in compared for one in some], rule, recipe.ours)
    return tuple(_result(claim, comparisons, families, rule) for claim, comparisons in compared)


@dataclass(frozen=True)
class _Comparison:
    """A comparison with the records of its cells."""

    claim: Claim
    of: CellComparison
    cells: Sequence[MeasuredCell]

    @property
    def is_staged(self) -> bool:
        """Whether seeds decide it by looks."""
        return self.claim.score not in DETERMINISTIC and self.claim.kind != "steadier"

    @property
    def key(self) -> Hashable:
        """Equal for comparisons of the same cells and scores, which share an interval."""
        statistic = "change" if self.claim.kind == "flat" else "mean"
        return (
            frozenset(self.of.cells),
            statistic,
            frozenset({self.claim.score, self.claim.than_score or self.claim.score}),
        )

    @cached_property
    def scores(self) -> list[dict[int, float]]:
        """Score of the cell, and of its partner, on all their seeds."""
        every = [one.values(self.claim.score) for one in self.cells]
        return [{seed: value for seed, value in some.items() if not math.isnan(value)} for some in every]

    @cached_property
    def differences(self) -> dict[int, float]:
        """Differences on shared seeds: from the partner, the other score, the first task or the limit; without NaN."""
        ours, first = self.scores[0], self.cells[0]
        if not self.of.is_complete:
            return {}
        if len(self.cells) > 1:
            theirs = self.scores[1]
        elif self.claim.than_score:
            theirs = first.values(self.claim.than_score)
        elif self.claim.kind == "flat":
            theirs = {seed: curve[0] for seed, curve in first.curves(self.claim.score).items()}
        else:
            theirs = dict.fromkeys(ours, self.claim.limit)
        differences = {seed: ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())}
        return {seed: value for seed, value in differences.items() if not math.isnan(value)}

    @property
    def has_score(self) -> bool:
        """Whether runs may have the score: not if shared seeds lack it, as that of forgetting after one task."""
        return bool(self.differences) or not set.intersection(*(set(one.records) for one in self.cells))

    def verdict(self, rule: StagedRule) -> sequential.Verdict:
        """Verdict of the rule on this comparison alone."""
        diverged = {seed for one in self.cells for seed in one.diverged}
        return sequential.decide_differences(self.differences, margin=rule.margin, diverged=diverged)


def _families(comparisons: Sequence[_Comparison], rule: StagedRule, ours: bool) -> dict[str, tuple[int, float]]:
    """Of each stream, the number of comparisons that have a look, and the share of alpha at which signs are decided."""
    by_stream: dict[str, dict[Hashable, sequential.Verdict]] = {}
    for one in comparisons:
        if one.is_staged and (verdict := one.verdict(rule)).looks:
            by_stream.setdefault(one.of.stream, {})[one.key] = verdict
    decided = {
        stream: sequential.decide_family(some, correction="benjamini-hochberg" if ours else "holm")
        for stream, some in by_stream.items()
    }
    return {stream: (len(some), next(iter(some.values())).share) for stream, some in decided.items()}


def _result(
    claim: Claim, comparisons: Sequence[_Comparison], families: Mapping[str, tuple[int, float]], rule: StagedRule | None
) -> ClaimResult:
    cases, not_run, decidable = list[ClaimCase](), list[str](), list[tuple[CellComparison, bool]]()
    for one in comparisons:
        run = rule is None or any(cell.run for cell in one.cells)
        if not run:
            not_run.append(one.of.label)
        elif rule is None or not one.is_staged:
            cases.append(_exploratory_case(one))
        else:
            cases.append(_staged_case(one, families.get(one.of.stream), rule))
        if rule is not None and claim.kind != "steadier" and one.of.is_complete and one.has_score:
            decidable.append((one.of, run and cases[-1].outcome != "undecided"))
    outcomes = {case.outcome for case in cases}
    outcome: Outcome = "holds in part"
    if "does not hold" in outcomes:
        outcome = "does not hold"
    elif not outcomes or "undecided" in outcomes:
        outcome = "undecided"
    elif len(outcomes) == 1:
        (outcome,) = outcomes
    evidence: Evidence = "exploratory" if rule is None else "staged"
    return ClaimResult(claim, outcome, tuple(cases), evidence, tuple(not_run), tuple(decidable))


def _exploratory_case(one: _Comparison) -> ClaimCase:
    """An ordinary 95 % interval, which decides nothing; a score that is equal for all seeds needs no rule."""
    if one.claim.kind == "steadier":
        ours, theirs = (list(some.values()) for some in (*one.scores, {})[:2])
        ratio = variance_ratio_interval(ours, theirs) if ours and theirs else None
        return ClaimCase(one.of.label, min(len(ours), len(theirs)), "undecided", None, ratio, is_ratio=True)
    pair = summarize_differences(list(one.differences.values())) if one.differences else None
    interval = pair.t if pair else None
    outcome = _by_interval(one.claim, interval) if one.claim.score in DETERMINISTIC else "undecided"
    return ClaimCase(one.of.label, len(one.differences), outcome, pair, interval)


def _staged_case(one: _Comparison, family: tuple[int, float] | None, rule: StagedRule) -> ClaimCase:
    claim, verdict = one.claim, one.verdict(rule)
    if family is not None:  # whether a difference is within a margin is decided at alpha / size
        size, share = family
        verdict = sequential.decide_with(verdict, size, 1 / size if claim.kind in ("near", "flat") else share)
    last = sequential.FIRST_SEED + (verdict.seeds or sequential.LOOKS[0])
    counted = [value for seed, value in verdict.differences.items() if sequential.FIRST_SEED <= seed < last]
    pair = summarize_differences(counted) if counted else None
    outcome = _outcome(claim, verdict)
    notes = []
    if verdict.diverged:
        notes.append(f"{verdict.diverged} of {verdict.seeds} seeds diverged{_at_chance(one, verdict)}")
    if verdict.conflict:
        notes.append("the intervals of two looks do not overlap, and the later one is left out")
    if outcome == "undecided":
        notes.append(_lacking(one, verdict, pair, rule))
    shown = verdict.outcome if _has_margin(claim) else ""
    return ClaimCase(one.of.label, len(counted), outcome, pair, verdict.interval, shown, "; ".join(notes))


def _has_margin(claim: Claim) -> bool:
    """Whether the margin of the rule applies to a claim: it is in points of a score, and a drift is a distance."""
    return claim.kind == "above" and drift_parts(claim.score) is None


def _outcome(claim: Claim, verdict: sequential.Verdict) -> CaseOutcome:
    if not _has_margin(claim):
        return _by_interval(claim, verdict.interval)
    outcomes: dict[str, CaseOutcome] = {"higher": "holds", "lower": "does not hold", "equivalent": "equivalent"}
    return outcomes.get(verdict.outcome.partition(",")[0], "undecided")


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


def _at_chance(one: _Comparison, verdict: sequential.Verdict) -> str:
    """The outcome if each diverged run counts as chance accuracy; empty if the score has no chance level."""
    records = [record for cell in one.cells for record in cell.records.values()]
    chance = chance_level(records[0], one.claim.score) if records and len(one.cells) == 2 else None
    if chance is None:
        return ""
    ours, theirs = (
        sequential.with_chance(some, cell.diverged, chance) for some, cell in zip(one.scores, one.cells, strict=True)
    )
    differences = {seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()}
    full = replace(verdict, differences=differences, without_pair=frozenset())
    return f" (as chance accuracy: {_outcome(one.claim, sequential.decide_with(full, verdict.cases, verdict.share))})"


def _lacking(one: _Comparison, verdict: sequential.Verdict, pair: PairedDifference | None, rule: StagedRule) -> str:
    """What an undecided case lacks."""
    claim = one.claim
    if not_run := [cell.cell.label for cell in one.cells if not cell.run]:
        return f"no fresh seeds of {' and '.join(not_run)}"
    if not one.has_score:
        return f"{claim.score} has no value in these runs"
    if verdict.interval is None or pair is None:
        return f"{0 if pair is None else len(pair.differences)} of the {sequential.LOOKS[0]} seeds of the first look"
    std = spread_over_seeds(list(pair.differences))[1]
    for seeds in (look for look in sequential.LOOKS if look > verdict.seeds):
        half = sequential.reach(std, rule.margin, verdict.cases, seeds).half_width
        interval = Interval(pair.mean - half, pair.mean + half)
        within = _has_margin(claim) and -rule.margin < interval.low and interval.high < rule.margin
        if within or _by_interval(claim, interval) != "undecided":
            beyond = f", more than the limit of {rule.max_seeds}" if seeds > rule.max_seeds else ""
            return f"would need about {seeds} seeds, with this mean and spread{beyond}"
    return f"would need more than {sequential.LOOKS[-1]} seeds, with this mean and spread"
