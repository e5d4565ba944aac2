"""Lines of a table: one score of one cell, compared with the published number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.paper.format import data_remarks, part_of
from contnorm.paper.published import Published
from contnorm.paper.recipe import Recipe
from contnorm.paper.score_names import drift_parts, title_of
from contnorm.paper.series import Measured
from contnorm.paper.verdicts import Beside, beside

__all__ = ["Line", "apart", "corrected", "lines_of", "remarks"]


@dataclass(frozen=True)
class Line:
    """One score of one cell; ``values`` is empty if the cell was not run."""

    measured: Measured
    score: str
    values: list[float]
    published: Published | None
    found: Beside | None


def lines_of(recipe: Recipe, one: Measured) -> list[Line]:
    """Lines of a cell, one per score; for a cell that was not run, the scores it would have."""
    lines, parts = [], _parts(one)
    for metric, score in recipe.scores.items():
        values = list(one.values(score).values())
        number = one.cell.published.get(metric)
        if not values and (one.records or (number is None and not _always_available(one, score))):
            continue
        comparison = None
        if values and number is not None and number.mean is not None and not (_by_definition(one, score) or parts):
            comparison = beside(values, number.mean, number.std, recipe.published_runs)
        lines.append(Line(one, score, values, number, comparison))
    return lines


def _always_available(measured: Measured, score: str) -> bool:
    """Whether any run of a cell has a score: drift exists for some layers only, and multi-label scores are separate."""
    others = LABEL_SCORES if measured.cell.view.labels is None else SCORES
    return not drift_parts(score) and score not in others


def _by_definition(measured: Measured, score: str) -> bool:
    """Whether a number is constant by definition: the extra time of BN over BN is always 0."""
    return score == "extra_time" and measured.baseline is measured.records


def _parts(measured: Measured) -> set[str]:
    """Descriptions of the parts of published streams that the runs of a cell used."""
    return {words for record in measured.records.values() if (words := part_of(record))}


def apart(measured: Sequence[Measured]) -> list[str]:
    """Remarks on runs that used a part of a published data set, which get no verdict, and on runs of different data."""
    parts = sorted(set().union(*map(_parts, measured)))
    records = [record for one in measured for record in one.records.values()]
    lines = [f"Ours is {words}, which is another stream: no verdict on its numbers." for words in parts]
    return lines + data_remarks(records)


def remarks(recipe: Recipe, lines: Sequence[Line]) -> list[str]:
    """Remarks below a table: how many numbers agree, by which interval, and which are doubtful."""
    comparisons = [line.found for line in lines if line.found is not None]
    counts = Counter(comparison.verdict for comparison in comparisons if comparison.verdict != "none")
    notes = []
    if counts:
        agree = "agrees" if counts["agrees"] == 1 else "agree"
        words = f"{counts['agrees']} {agree}, {counts['above']} above, {counts['below']} below"
        notes.append(f"Of {sum(counts.values())} numbers: {words}; by the 95 % interval of ours less the paper's.")
    how = {comparison.how for comparison in comparisons if comparison.interval is not None}
    if "welch" in how:
        notes.append(f"Welch's interval, with the paper's deviation over {recipe.published_runs} runs.")
    if "ours" in how:
        notes.append("Ours alone: the paper gives no deviation, so the interval is Student's of our runs.")
    return notes + [
        f"? {_doubt_remark(line, line.published)}"
        for line in lines
        if line.values and line.published is not None and line.published.flag
    ]


def corrected(measured: Sequence[Measured]) -> list[str]:
    """Remarks on batch renormalization: the share of batches in which it could differ from batch norm."""
    lines = []
    for cell in measured:
        shares = [record.raw["renorm"]["corrected_share"] for record in cell.records.values() if "renorm" in record.raw]
        if shares:
            lines.append(f"{cell.cell.norm}: r was free to differ from 1 in {fmean(shares):.0%} of the batches.")
    return list(dict.fromkeys(lines))


def _doubt_remark(line: Line, number: Published) -> str:
    place = line.measured.cell.place
    where = [str(place[key]) for key in ("stream", "strategy", "buffer", "setting", "labels") if place[key] is not None]
    return f"{' '.join(where)} {line.measured.cell.norm} {title_of(line.score)}: {number.flag}"
