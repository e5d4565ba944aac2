"""Rows of a table, compared with the published numbers, and the remarks below it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from contnorm.bench.config.schema import TrainConfig
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import SCORES
from contnorm.bench.records import spread_over_seeds
from contnorm.bench.stats import Interval, t_interval, welch_interval
from contnorm.bench.text import LABEL_FORGETTING, data_part, data_remarks, divergence_text, named
from contnorm.paper.cells import MeasuredCell, Numerics, numerics_of
from contnorm.paper.recipe import PublishedNumber, Recipe, column_title, drift_parts

Verdict = Literal["agrees", "above", "below", "none"]


@dataclass(frozen=True)
class PublishedComparison:
    """Comparison of our runs with a published number.

    Attributes:
        mean: Our mean over seeds.
        std: Our sample standard deviation; NaN for one seed.
        difference: Our mean minus the published mean.
        interval: 95 % interval of the difference; None if it is undefined.
        verdict: ``"none"`` if there is no interval.
        how: ``"welch"``, from both standard deviations; ``"ours"``, from ours only, if none is published.
        why: Reason why there is no interval; empty if there is one.
    """

    mean: float
    std: float
    difference: float
    interval: Interval | None
    verdict: Verdict
    how: Literal["welch", "ours"]
    why: str = ""


def compare_published(values: Sequence[float], mean: float, std: float | None, runs: int = 5) -> PublishedComparison:
    """Compare our values, one per seed, with a published mean and standard deviation over ``runs`` runs.

    Example:
        >>> compare_published([10.0, 11.0, 12.0], 11.2, 1.0).verdict
        'agrees'
        >>> compare_published([10.0, 10.1, 9.9], 20.0, 0.1).verdict
        'below'
        >>> compare_published([10.0], 11.2, 1.0).verdict, compare_published([10.0, 11.0, 12.0], 11.2, None).how
        ('none', 'ours')
        >>> compare_published([10.0, 10.0], 11.2, 1.0).why, compare_published([10.0, 11.0], 11.2, 0.0).why
        ('our seeds are all equal', 'the published std is 0')
    """
    ours, spread = spread_over_seeds(list(values))
    how: Literal["welch", "ours"] = "ours" if std is None else "welch"
    why = "the published std is 0" if std == 0 else ""  # without a spread an interval would have no width
    if len(values) < 2 or math.isnan(spread) or spread == 0:
        why = "one seed" if len(values) < 2 else "a seed has no value" if spread else "our seeds are all equal"
    interval: Interval | None = None
    verdict: Verdict = "none"
    if not why:
        interval = t_interval([v - mean for v in values]) if std is None else welch_interval(values, mean, std, runs)
    if interval is not None:
        verdict = "agrees" if interval.holds(0.0) else "above" if interval.low > 0 else "below"
    return PublishedComparison(ours, spread, ours - mean, interval, verdict, how, why)


@dataclass(frozen=True)
class Line:
    """One score of one cell; ``values`` is empty if the cell was not run."""

    measured: MeasuredCell
    score: str
    values: list[float]
    published: PublishedNumber | None
    comparison: PublishedComparison | None


def lines_of(recipe: Recipe, one: MeasuredCell) -> list[Line]:
    """Lines of a cell, one per score; for a cell that was not run, the scores it would have."""
    lines, parts = [], _parts(one)
    others = LABEL_SCORES if one.cell.view.labels is None else SCORES
    for metric, score in recipe.scores.items():
        values = list(one.values(score).values())
        number = one.cell.published.get(metric)
        if not values and (one.records or (number is None and (drift_parts(score) or score in others))):
            continue
        comparison = None
        of_itself = score == "extra_time" and one.baseline is one.records  # the extra time of BN over BN is always 0
        if values and number is not None and number.mean is not None and not (of_itself or parts):
            comparison = compare_published(values, number.mean, number.std, recipe.published_runs)
        lines.append(Line(one, score, values, number, comparison))
    return lines


def _parts(measured: MeasuredCell) -> set[str]:
    """Descriptions of the parts of published data sets that the runs of a cell used."""
    return {part for record in measured.records.values() if (part := data_part(record))}


def table_remarks(recipe: Recipe, measured: Sequence[MeasuredCell], lines: Sequence[Line]) -> list[str]:
    """Remarks below a table: on data, batch renormalization, precision, diverged runs, and verdicts.

    Args:
        recipe: Recipe of the table.
        measured: Its cells.
        lines: Lines whose verdicts are summarized; none for runs that are not comparable with the paper's.
    """
    records = [record for one in measured for record in one.records.values()]
    parts = sorted(set().union(*map(_parts, measured)))
    notes = [f"Our runs used {part}, so their numbers have no verdict." for part in parts] + data_remarks(records)
    for one in measured:
        shares = [record.raw["renorm"]["corrected_share"] for record in one.records.values() if "renorm" in record.raw]
        if shares:
            notes.append(f"{one.cell.norm}: r was free to differ from 1 in {fmean(shares):.0%} of the batches.")
    not_ahead = [
        one.cell.label
        for one in measured
        if one.cell.values.get("evaluate", {}).get("ahead")
        and any(not record.config.evaluate.ahead for record in one.records.values())
    ]
    if not_ahead:
        what = "Measured on learned tasks only, so forgetting from the best row is a lower bound"
        notes.append(f"{what}: {', '.join(not_ahead)}.")
    notes += precision_remarks(measured)
    notes += [
        f"{one.cell.label}: {divergence_text(one.diverged, len(one.records))}" for one in measured if one.diverged
    ]
    return [*dict.fromkeys(notes), *_verdict_remarks(recipe, lines)]


def precision_remarks(measured: Sequence[MeasuredCell]) -> list[str]:
    """Remarks on the precision of a table, and on records in other precisions, which it does not show."""
    remarks, left_out = [], dict[Numerics, dict[str, int]]()
    for one in measured:
        for record in list(one.records.values())[:1]:
            train, shown = one.cell.values.get("train", {}), numerics_of(record.config)
            expected = Numerics(*(train.get(key, getattr(TrainConfig(), key)) for key in Numerics._fields))
            remarks.append(f"Precision: {shown}{'' if shown == expected else f' (the recipe has {expected})'}.")
        for numerics, count in one.left_out.items():
            left_out.setdefault(numerics, {})[one.cell.label] = count
    for numerics, rows in left_out.items():
        names = [f"{label} ({count} seed{'s' if count > 1 else ''})" for label, count in rows.items()]
        typed = f"--precision {numerics.precision}"
        typed += "" if numerics.deterministic else " --set train.deterministic=false"
        show = f"Show them with `contnorm paper RECIPE {typed}`."
        remarks.append(f"Left out, recorded in {numerics}: {named(names, 'rows')}. {show}")
    return list(dict.fromkeys(remarks))


def _verdict_remarks(recipe: Recipe, lines: Sequence[Line]) -> list[str]:
    """Remarks on verdicts: how many numbers agree, by which interval, and which are doubtful."""
    comparisons = [line.comparison for line in lines if line.comparison is not None]
    counts = Counter(comparison.verdict for comparison in comparisons if comparison.verdict != "none")
    notes = []
    if counts:
        agree = "agrees" if counts["agrees"] == 1 else "agree"
        summary = f"{counts['agrees']} {agree}, {counts['above']} above, {counts['below']} below"
        notes.append(f"Of {sum(counts.values())} numbers: {summary}, by the 95 % interval of ours minus the paper's.")
    how = {comparison.how for comparison in comparisons if comparison.interval is not None}
    if "welch" in how:
        notes.append(f"Intervals are Welch's, with the paper's standard deviation over {recipe.published_runs} runs.")
    if "ours" in how:
        notes.append("Ours alone: the paper has no standard deviation, so the interval is Student's t of our runs.")
    for line in lines:
        if line.values and line.published is not None and line.published.flag:
            cell, keys = line.measured.cell, ("stream", "strategy", "buffer", "setting", "labels")
            where = " ".join(str(cell.place[key]) for key in keys if cell.place[key] is not None)
            notes.append(f"? {where} {cell.norm} {column_title(line.score)}: {line.published.flag}")
    return notes


def forgetting_definitions(scores: Sequence[str]) -> list[str]:
    """Definitions of the forgetting scores; multi-label scores share one.

    Example:
        >>> forgetting_definitions(["map", "fm_map", "fm_c_f1"])
        ['FM is normalized: the share of its best score that a task has lost at the end.']
        >>> forgetting_definitions(["acc", "fm_first"])
        ["Forgetting is fm_first. Avalanche's: from the accuracy when the task had just been learned."]
    """
    forgetting = [name for name in scores if name.startswith("fm")]
    texts = {name: (SCORES[name].__doc__ or "").splitlines()[0] for name in forgetting if name in SCORES}
    of_labels = [LABEL_FORGETTING] if any(name in LABEL_SCORES for name in forgetting) else []
    return [*(f"Forgetting is {name}. {text}" for name, text in texts.items()), *of_labels]


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
