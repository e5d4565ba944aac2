"""Test the claims of a paper with runs; a claim holds, does not hold, or is undecided.

A claim is decided for each of its cells by the 95 % interval of paired differences. It holds if it holds for every
cell, and does not hold if it is refuted for any cell; otherwise it is undecided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from contnorm.bench.stats import (
    Interval,
    PairedDifference,
    paired_difference,
    summarize_differences,
    variance_ratio_interval,
)
from contnorm.paper.cells import comparable, matches
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import Claim

__all__ = ["ClaimCase", "ClaimResult", "decide"]

Outcome = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True)
class ClaimCase:
    """A claim for one cell or one pair of cells.

    Attributes:
        what: Description of the cells.
        seeds: Number of shared seeds.
        outcome: Decision by the interval.
        paired: Paired differences; None if variances are compared or if there are no records.
        interval: Interval that decides the claim; None if there is none.
    """

    what: str
    seeds: int
    outcome: Outcome
    paired: PairedDifference | None
    interval: Interval | None


@dataclass(frozen=True)
class ClaimResult:
    """A claim with its cases; without any, none of its cells was measured, and it is undecided."""

    claim: Claim
    outcome: Outcome
    cases: tuple[ClaimCase, ...]


def decide(claim: Claim, measured: Sequence[MeasuredCell]) -> ClaimResult:
    """Decide a claim from records."""
    cases = tuple(_cases(claim, measured))
    outcomes = {case.outcome for case in cases}
    overall: Outcome = "undecided"
    if "does not hold" in outcomes:
        overall = "does not hold"
    elif outcomes == {"holds"}:
        overall = "holds"
    return ClaimResult(claim, overall, cases)


def _cases(claim: Claim, measured: Sequence[MeasuredCell]) -> Iterator[ClaimCase]:
    for cell in measured:
        if not matches(cell.cell.place, claim.cells):
            continue
        if claim.kind in ("under", "flat") or claim.than_score:
            yield _single_case(claim, cell)
        for other in claim.than:
            partners = [partner for partner in measured if comparable(cell.cell, partner.cell, other)]
            yield from (_pair_case(claim, cell, partner) for partner in partners)
            if not partners:
                label = " ".join(map(str, other.values()))
                yield ClaimCase(f"{cell.cell.label} against {label}", 0, "undecided", None, None)


def _single_case(claim: Claim, cell: MeasuredCell) -> ClaimCase:
    what = cell.cell.label
    values = cell.values(claim.score)
    if claim.than_score:
        return _case(claim, what, paired_difference(values, cell.values(claim.than_score)))
    if claim.kind == "flat":
        changes = [curve[-1] - curve[0] for curve in cell.curves(claim.score).values()]
        return _case(claim, what, summarize_differences(changes) if changes else None)
    margins = [value - claim.limit for value in values.values()]
    return _case(claim, what, summarize_differences(margins) if margins else None)


def _pair_case(claim: Claim, cell: MeasuredCell, partner: MeasuredCell) -> ClaimCase:
    what = f"{cell.cell.label} against {_partner_label(cell, partner)}"
    ours, theirs = cell.values(claim.score), partner.values(claim.score)
    if claim.kind == "steadier":
        ratio = variance_ratio_interval(list(ours.values()), list(theirs.values()))
        return ClaimCase(what, min(len(ours), len(theirs)), _below(ratio, 1.0), None, ratio)
    return _case(claim, what, paired_difference(ours, theirs))


def _partner_label(cell: MeasuredCell, partner: MeasuredCell) -> str:
    """Label of another cell: the dimensions in which it differs, and its norm."""
    a, b = cell.cell.place, partner.cell.place
    differing = [str(b[key]) for key in ("stream", "strategy", "buffer", "tasks", "labels") if a[key] != b[key]]
    return " ".join([*differing, *([] if differing and cell.cell.norm == partner.cell.norm else [partner.cell.norm])])


def _case(claim: Claim, what: str, pair: PairedDifference | None) -> ClaimCase:
    interval = pair.t if pair else None
    outcome = {
        "above": _above(interval),
        "near": _within(interval, claim.margin),
        "flat": _within(interval, claim.margin),
        "under": _below(interval, 0.0),
    }[claim.kind]
    return ClaimCase(what, len(pair.differences) if pair else 0, outcome, pair, interval)


def _above(interval: Interval | None) -> Outcome:
    if interval is None or interval.holds(0.0):
        return "undecided"
    return "holds" if interval.low > 0 else "does not hold"


def _below(interval: Interval | None, limit: float) -> Outcome:
    if interval is None or interval.holds(limit):
        return "undecided"
    return "holds" if interval.high < limit else "does not hold"


def _within(interval: Interval | None, margin: float) -> Outcome:
    if interval is None:
        return "undecided"
    if -margin <= interval.low and interval.high <= margin:
        return "holds"
    return "does not hold" if interval.low > margin or interval.high < -margin else "undecided"
