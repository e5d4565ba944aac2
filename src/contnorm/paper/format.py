"""Text of numbers, verdicts and claims, shared by the terminal, HTML pages and files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from contnorm.bench.records import spread_over_seeds

if TYPE_CHECKING:  # `contnorm show` formats numbers without claims
    from contnorm.paper.claims import ClaimCase, ClaimResult
    from contnorm.paper.published import PublishedComparison, PublishedNumber
    from contnorm.paper.recipe import Claim

__all__ = [
    "case_numbers",
    "case_outcome_text",
    "claim_criterion",
    "claim_outcome",
    "claim_title",
    "no_interval_reason",
    "not_run_text",
    "paper_number",
    "place_title",
    "spread",
    "verdict_text",
]

MOST_CASES = 6  # cases to name in one remark


def spread(values: Sequence[float]) -> str:
    """Format mean and standard deviation.

    Example:
        >>> spread([1.0, 3.0]), spread([2.0]), spread([float("nan")])
        ('2.00 +- 1.41', '2.00', '-')
    """
    mean, std = spread_over_seeds(list(values))
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if math.isnan(std) else f"{mean:.2f} +- {std:.2f}"


def paper_number(number: PublishedNumber | None) -> str:
    """Format a published number; a doubtful one gets a question mark.

    Example:
        >>> from contnorm.paper.published import find
        >>> [cell] = find(table="2", dataset="split-cifar100", strategy="er", norm="cn", metric="acc")
        >>> paper_number(cell), paper_number(None)
        ('67.48 +- 0.81', '-')
    """
    if number is None or number.mean is None:
        return "-" if number is None or number.std is None else f"+- {number.std:.2f}"
    text = f"{number.mean:.2f}" if number.std is None else f"{number.mean:.2f} +- {number.std:.2f}"
    return f"{text} ?" if number.flag else text


def verdict_text(comparison: PublishedComparison | None) -> tuple[str, str, str]:
    """Format difference, interval and verdict.

    Example:
        >>> from contnorm.paper.published import compare_published
        >>> verdict_text(compare_published([10.0, 11.0, 12.0], 11.2, 1.0))
        ('-0.20', '-2.17 to +1.77', 'agrees')
        >>> verdict_text(compare_published([10.0], 11.2, 1.0))[2]
        'no interval: one seed'
    """
    if comparison is None:
        return "-", "-", "-"
    if comparison.interval is None:
        return f"{comparison.difference:+.2f}", "-", f"no interval: {comparison.why}"
    verdict = comparison.verdict if comparison.how == "welch" else f"{comparison.verdict} (ours alone)"
    return f"{comparison.difference:+.2f}", str(comparison.interval), verdict


def place_title(place: Mapping[str, Any]) -> str:
    """Heading of the cells of a table that share a place.

    Example:
        >>> place_title({"stream": "split-mnist", "strategy": "er", "buffer": 50, "tasks": None, "setting": "task"})
        'split-mnist, er, buffer 50, task-incremental'
        >>> place_title({"stream": "cocoseq", "labels": "minority"}), place_title({"labels": "overall"})
        ('cocoseq, minority classes', 'all classes')
    """
    templates = {
        "stream": "{}",
        "strategy": "{}",
        "forward": "{} forward",
        "tasks": "{} tasks",
        "setting": "{}-incremental",
        "labels": "{} classes",
    }
    known = {key: value for key, value in place.items() if value is not None}
    known.update({"labels": "all"} if known.get("labels") == "overall" else {})
    return ", ".join(templates.get(key, f"{key} {{}}").format(value) for key, value in known.items())


def claim_criterion(claim: Claim) -> str:
    """Score and bound that decide a claim."""
    if claim.kind in ("near", "flat"):
        return f"{claim.score}, within {claim.margin:g}"
    return f"{claim.score}, below {claim.limit:g}" if claim.kind == "under" else claim.score


def claim_title(result: ClaimResult, *, complete: bool = True) -> str:
    """Outcome, evidence and text of a claim; ``complete`` is False if some cells of its table are not run.

    Example:
        >>> from contnorm.paper.claims import ClaimResult
        >>> from contnorm.paper.recipe import Claim
        >>> claim_title(ClaimResult(Claim("cn over bn", "above", "acc"), "holds", (), "staged", ("cn against bn",)))
        'HOLDS, of what is run (staged: 0 seeds): cn over bn (acc)'
    """
    outcome = claim_outcome(result, complete=complete).replace(result.outcome, result.outcome.upper(), 1)
    return f"{outcome} ({result.evidence_text}): {result.claim.says} ({claim_criterion(result.claim)})"


def claim_outcome(result: ClaimResult, *, complete: bool = True) -> str:
    """Outcome of a claim, and whether it is of a part of its cells.

    By fresh seeds, that is so if some of its cases were not run; by exploratory ones, if the table is not ``complete``.

    Example:
        >>> from contnorm.paper.claims import ClaimResult
        >>> from contnorm.paper.recipe import Claim
        >>> claim_outcome(ClaimResult(Claim("", "above", "acc"), "holds", ()), complete=False)
        'holds, of what is run'
    """
    whole = not result.not_run if result.evidence == "staged" else complete
    return result.outcome + ("" if whole else ", of what is run")


def not_run_text(result: ClaimResult) -> str:
    """Which cases of a claim were left out because none of their cells was run.

    Example:
        >>> from contnorm.paper.claims import ClaimResult
        >>> from contnorm.paper.recipe import Claim
        >>> not_run_text(ClaimResult(Claim("", "above", "acc"), "holds", (), "staged", ("s er cn against bn",)))
        'No fresh seeds: s er cn against bn.'
    """
    named = result.not_run[:MOST_CASES]
    more = f" and {len(result.not_run) - MOST_CASES} more cases" if len(result.not_run) > MOST_CASES else ""
    return f"No fresh seeds: {', '.join(named)}{more}."


def case_outcome_text(case: ClaimCase) -> str:
    """Outcome of a case with the verdict on its difference, and what it lacks.

    Example:
        >>> from contnorm.paper.claims import ClaimCase
        >>> case_outcome_text(ClaimCase("", 8, "holds", None, None, "higher, within the margin"))
        'holds (higher, within the margin)'
        >>> case_outcome_text(ClaimCase("", 8, "undecided", None, None, "undecided", "would need about 64 seeds"))
        'undecided (would need about 64 seeds)'
    """
    verdict = "" if case.verdict == case.outcome else case.verdict
    more = "; ".join(filter(None, [verdict, case.note]))
    return f"{case.outcome} ({more})" if more else case.outcome


def no_interval_reason(case: ClaimCase) -> str:
    """Reason why a case has no interval.

    Example:
        >>> from contnorm.paper.claims import ClaimCase
        >>> no_interval_reason(ClaimCase("cn against bn", 0, "undecided", None, None))
        'no values in the records'
    """
    if case.note:  # says it
        return f"{case.seeds} seed{'' if case.seeds == 1 else 's'}"
    return {0: "no values in the records", 1: "one seed"}.get(case.seeds, "no variation over seeds")


def case_numbers(case: ClaimCase) -> tuple[str, str]:
    """Format difference and interval; for spreads the interval of their ratio.

    Example:
        >>> from contnorm.bench.stats import summarize_differences
        >>> pair = summarize_differences([1.0, 2.0, 3.0])
        >>> from contnorm.paper.claims import ClaimCase
        >>> case_numbers(ClaimCase("cn against bn", 3, "undecided", pair, pair.t))
        ('+2.00', '-0.48 to +4.48')
    """
    if case.is_ratio and case.interval is not None:
        return "-", f"ratio of variances {case.interval.low:.2f} to {case.interval.high:.2f}"
    return "-" if case.paired is None else f"{case.paired.mean:+.2f}", str(case.interval or "-")
