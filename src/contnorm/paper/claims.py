"""What a paper claims, decided by runs: holds, does not hold, or undecided, with the numbers.

A claim is decided for each of its cells by the 95 % interval of paired differences, and holds as a whole where it holds
for every cell. One that is refuted for any cell does not hold; all else is undecided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contnorm.bench.stats.intervals import Interval, variance_ratio_interval
from contnorm.bench.stats.paired import Paired, paired, summed_up
from contnorm.paper.cells import matches
from contnorm.paper.recipe import Claim
from contnorm.paper.series import Measured

__all__ = ["Case", "Decided", "decide"]

Outcome = Literal["holds", "does not hold", "undecided"]
SHARED = ("stream", "strategy", "layers", "buffer", "tasks", "moments", "setting", "labels")
OF_NORM = ("norm", "groups", "momentum", "schedule")  # shared too where no other norm is named


@dataclass(frozen=True)
class Case:
    """A claim for one cell, or one pair of cells.

    Attributes:
        what: The cells, in words.
        seeds: How many both have.
        outcome: What the interval says.
        paired: The differences; None where the spread is compared, or nothing is there.
        interval: By which it was decided; None where there is none.
    """

    what: str
    seeds: int
    outcome: Outcome
    paired: Paired | None
    interval: Interval | None


@dataclass(frozen=True)
class Decided:
    """A claim with its cases."""

    claim: Claim
    outcome: Outcome
    cases: tuple[Case, ...]


def decide(claim: Claim, measured: Sequence[Measured]) -> Decided:
    """What the records say of a claim."""
    cases = tuple(_cases(claim, measured))
    outcomes = {case.outcome for case in cases}
    whole: Outcome = "undecided"
    if "does not hold" in outcomes:
        whole = "does not hold"
    elif outcomes == {"holds"}:
        whole = "holds"
    return Decided(claim, whole, cases)


def _cases(claim: Claim, measured: Sequence[Measured]) -> Iterator[Case]:
    for cell in measured:
        if not matches(cell.cell.place, claim.cells):
            continue
        if claim.kind in ("under", "flat") or claim.than_score:
            yield _alone(claim, cell)
        for other in claim.than:
            found = [one for one in measured if one is not cell and _comparable(cell, one, other)]
            yield from (_together(claim, cell, one) for one in found)
            if not found:
                words = " ".join(map(str, other.values()))
                yield Case(f"{cell.cell.words} against {words}", 0, "undecided", None, None)


def _comparable(cell: Measured, beside: Measured, other: Mapping[str, Any]) -> bool:
    """Whether a cell is one of the others, and the same in all that they do not name."""
    dimensions = SHARED if "norm" in other else (*SHARED, *OF_NORM)
    shared = [key for key in dimensions if key not in other]
    a, b = cell.cell.place, beside.cell.place
    return matches(b, other) and all(a[key] == b[key] for key in shared)


def _alone(claim: Claim, cell: Measured) -> Case:
    what = cell.cell.words
    values = cell.values(claim.score)
    if claim.than_score:
        return _case(claim, what, paired(values, cell.values(claim.than_score)))
    if claim.kind == "flat":
        ends = [curve[-1] - curve[0] for curve in cell.curves(claim.score).values()]
        return _case(claim, what, summed_up(ends) if ends else None)
    under = [value - claim.limit for value in values.values()]
    return _case(claim, what, summed_up(under) if under else None)


def _together(claim: Claim, cell: Measured, beside: Measured) -> Case:
    what = f"{cell.cell.words} against {_other(cell, beside)}"
    ours, theirs = cell.values(claim.score), beside.values(claim.score)
    if claim.kind == "steadier":
        ratio = variance_ratio_interval(list(ours.values()), list(theirs.values()))
        return Case(what, min(len(ours), len(theirs)), _below(ratio, 1.0), None, ratio)
    return _case(claim, what, paired(ours, theirs))


def _other(cell: Measured, beside: Measured) -> str:
    """The norm of another cell, and in what else it is another."""
    a, b = cell.cell.place, beside.cell.place
    apart = [str(b[key]) for key in ("stream", "strategy", "buffer", "tasks", "labels") if a[key] != b[key]]
    return " ".join([*apart, *([] if apart and cell.cell.norm == beside.cell.norm else [beside.cell.norm])])


def _case(claim: Claim, what: str, found: Paired | None) -> Case:
    interval = found.t if found else None
    outcome = {
        "above": _above(interval),
        "near": _within(interval, claim.margin),
        "flat": _within(interval, claim.margin),
        "under": _below(interval, 0.0),
    }[claim.kind]
    return Case(what, len(found.differences) if found else 0, outcome, found, interval)


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
