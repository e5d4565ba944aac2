"""Rows of a table, each one score of one cell compared with the published number, and the remarks below a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from contnorm.bench.config.schema import TrainConfig
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import SCORES
from contnorm.paper.cells import RecipeCell
from contnorm.paper.measured import MeasuredCell, Numerics, numerics_of
from contnorm.paper.published import PublishedComparison, PublishedNumber, compare_published
from contnorm.paper.recipe import Recipe
from contnorm.paper.record_remarks import LABEL_FORGETTING, data_part, data_remarks, divergence_text
from contnorm.paper.scores import drift_parts, score_title

__all__ = [
    "Line",
    "ahead_remarks",
    "data_part_remarks",
    "divergence_remarks",
    "forgetting_definitions",
    "lines_of",
    "precision_remarks",
    "renorm_remarks",
    "verdict_remarks",
]

MOST_NAMED = 6  # rows to name in one remark


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
    for metric, score in recipe.scores.items():
        values = list(one.values(score).values())
        number = one.cell.published.get(metric)
        if not values and (one.records or (number is None and not _always_available(one, score))):
            continue
        comparison = None
        if values and number is not None and number.mean is not None and not (_by_definition(one, score) or parts):
            comparison = compare_published(values, number.mean, number.std, recipe.published_runs)
        lines.append(Line(one, score, values, number, comparison))
    return lines


def _always_available(measured: MeasuredCell, score: str) -> bool:
    """Whether any run of a cell has a score: drift exists for some layers only, and multi-label scores are separate."""
    others = LABEL_SCORES if measured.cell.view.labels is None else SCORES
    return not drift_parts(score) and score not in others


def _by_definition(measured: MeasuredCell, score: str) -> bool:
    """Whether a number is constant by definition: the extra time of BN over BN is always 0."""
    return score == "extra_time" and measured.baseline is measured.records


def _parts(measured: MeasuredCell) -> set[str]:
    """Descriptions of the parts of published data sets that the runs of a cell used."""
    return {part for record in measured.records.values() if (part := data_part(record))}


def data_part_remarks(measured: Sequence[MeasuredCell]) -> list[str]:
    """Remarks on runs that used a part of a published data set, which get no verdict, and on runs of different data."""
    parts = sorted(set().union(*map(_parts, measured)))
    records = [record for one in measured for record in one.records.values()]
    return [f"Our runs used {part}, so their numbers have no verdict." for part in parts] + data_remarks(records)


def verdict_remarks(recipe: Recipe, lines: Sequence[Line]) -> list[str]:
    """Remarks below a table: how many numbers agree, by which interval, and which are doubtful."""
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
    return notes + [
        f"? {_doubt_remark(line, line.published)}"
        for line in lines
        if line.values and line.published is not None and line.published.flag
    ]


def renorm_remarks(measured: Sequence[MeasuredCell]) -> list[str]:
    """Remarks on batch renormalization: the share of batches in which it could differ from batch norm."""
    lines = []
    for cell in measured:
        shares = [record.raw["renorm"]["corrected_share"] for record in cell.records.values() if "renorm" in record.raw]
        if shares:
            lines.append(f"{cell.cell.norm}: r was free to differ from 1 in {fmean(shares):.0%} of the batches.")
    return list(dict.fromkeys(lines))


def ahead_remarks(measured: Sequence[MeasuredCell]) -> list[str]:
    """Remarks on runs without the accuracies of tasks ahead in a table that measures them."""
    labels = [
        one.cell.label
        for one in measured
        if one.cell.values.get("evaluate", {}).get("ahead")
        and any(not record.config.evaluate.ahead for record in one.records.values())
    ]
    if not labels:
        return []
    return [f"Measured on learned tasks only, so forgetting from the best row is a lower bound: {', '.join(labels)}."]


def _doubt_remark(line: Line, number: PublishedNumber) -> str:
    place = line.measured.cell.place
    where = [str(place[key]) for key in ("stream", "strategy", "buffer", "setting", "labels") if place[key] is not None]
    return f"{' '.join(where)} {line.measured.cell.norm} {score_title(line.score)}: {number.flag}"


def forgetting_definitions(scores: Sequence[str]) -> list[str]:
    """Definitions of the forgetting scores; multi-label scores share one.

    Example:
        >>> forgetting_definitions(["map", "fm_map", "fm_c_f1"])
        ['FM is normalized: the share of its best score that a task has lost at the end.']
        >>> forgetting_definitions(["acc", "fm_first"])
        ["Forgetting is fm_first. Avalanche's: from the accuracy when the task had just been learned."]
    """
    forgetting_scores = [name for name in scores if name.startswith("fm")]
    of_labels = [LABEL_FORGETTING] if any(name in LABEL_SCORES for name in forgetting_scores) else []
    single_label = [name for name in forgetting_scores if name in SCORES]
    return [
        f"Forgetting is {name}. {(SCORES[name].__doc__ or '').splitlines()[0]}" for name in single_label
    ] + of_labels


def precision_remarks(measured: Sequence[MeasuredCell]) -> list[str]:
    """Remarks on the precision of a table, and on records in other precisions, which it does not show."""
    shown = [(one, numerics_of(record.config)) for one in measured for record in list(one.records.values())[:1]]
    remarks = []
    for numerics, expected in dict.fromkeys((numerics, _recipe_numerics(one.cell)) for one, numerics in shown):
        remarks.append(f"Precision: {numerics}{'' if numerics == expected else f' (the recipe has {expected})'}.")
    left_out: dict[Numerics, dict[str, int]] = {}
    for one in measured:
        for numerics, count in one.left_out.items():
            left_out.setdefault(numerics, {})[one.cell.label] = count
    for numerics, rows in left_out.items():
        named = [f"{label} ({count} seed{'s' if count > 1 else ''})" for label, count in rows.items()]
        more = f" and {len(named) - MOST_NAMED} more rows" if len(named) > MOST_NAMED else ""
        remarks.append(
            f"Left out, recorded in {numerics}: {', '.join(named[:MOST_NAMED])}{more}. Show them with `contnorm paper "
            f"RECIPE {numerics.options}`."
        )
    return remarks


def _recipe_numerics(cell: RecipeCell) -> Numerics:
    train, defaults = cell.values.get("train", {}), TrainConfig()
    values = (train.get(key, getattr(defaults, key)) for key in Numerics._fields)
    return Numerics(*values)


def divergence_remarks(measured: Sequence[MeasuredCell]) -> list[str]:
    """One remark per run with diverged seeds: the number of seeds and the reasons.

    Example:
        >>> from contnorm.paper.cells import cells_of
        >>> from contnorm.paper.recipe import find_recipe
        >>> cell = next(iter(cells_of(find_recipe("table10"))))
        >>> divergence_remarks([MeasuredCell(cell, {}, diverged={1: "seed 1: the loss is nan at step 9 of 60."})])
        ['split-cifar100 single bn: its only seed diverged. seed 1: the loss is nan at step 9 of 60.']
    """
    texts = (f"{one.cell.label}: {divergence_text(one.diverged, len(one.records))}" for one in measured if one.diverged)
    return list(dict.fromkeys(texts))
