"""The lines of a table: one score of one cell, ours beside the published."""

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
    """One score of one cell; no values where it was not run."""

    measured: Measured
    score: str
    values: list[float]
    published: Published | None
    found: Beside | None


def lines_of(recipe: Recipe, one: Measured) -> list[Line]:
    """The scores of a cell; of one that was not run those it would have."""
    lines, parts = [], _parts(one)
    for metric, score in recipe.scores.items():
        values = list(one.values(score).values())
        number = one.cell.published.get(metric)
        if not values and (one.records or (number is None and not _usual(one, score))):
            continue
        found = None
        if values and number is not None and number.mean is not None and not (_by_definition(one, score) or parts):
            found = beside(values, number.mean, number.std, recipe.published_runs)
        lines.append(Line(one, score, values, number, found))
    return lines


def _usual(one: Measured, score: str) -> bool:
    """Whether a cell has a score once it is run: drift is of some layers alone, and labels have scores of their own."""
    others = LABEL_SCORES if one.cell.view.labels is None else SCORES
    return not drift_parts(score) and score not in others


def _by_definition(one: Measured, score: str) -> bool:
    """Whether a number could be no other: the time of BN over that of BN agrees with nothing."""
    return score == "extra_time" and one.baseline is one.records


def _parts(one: Measured) -> set[str]:
    """Of which published streams the runs of a cell had only a part."""
    return {words for record in one.records.values() if (words := part_of(record))}


def apart(measured: Sequence[Measured]) -> list[str]:
    """Why there is no verdict on runs of a part of a published data set, and where runs are of different data."""
    parts = sorted(set().union(*map(_parts, measured)))
    records = [record for one in measured for record in one.records.values()]
    said = [f"Ours is {words}, which is another stream: no verdict on its numbers." for words in parts]
    return said + data_remarks(records)


def remarks(recipe: Recipe, lines: Sequence[Line]) -> list[str]:
    """What is to be said below a table: how many numbers agree, by what interval, and which are doubtful."""
    found = [line.found for line in lines if line.found is not None]
    counts = Counter(one.verdict for one in found if one.verdict != "none")
    said = []
    if counts:
        agree = "agrees" if counts["agrees"] == 1 else "agree"
        words = f"{counts['agrees']} {agree}, {counts['above']} above, {counts['below']} below"
        said.append(f"Of {sum(counts.values())} numbers: {words}; by the 95 % interval of ours less the paper's.")
    how = {one.how for one in found if one.interval is not None}
    if "welch" in how:
        said.append(f"Welch's interval, with the paper's deviation over {recipe.published_runs} runs.")
    if "ours" in how:
        said.append("Ours alone: the paper gives no deviation, so the interval is Student's of our runs.")
    return said + [
        f"? {_doubt(line, line.published)}"
        for line in lines
        if line.values and line.published is not None and line.published.flag
    ]


def corrected(measured: Sequence[Measured]) -> list[str]:
    """Of batch renormalization, in how much of the run it was more than batch norm; each said once."""
    said = []
    for one in measured:
        found = [record.raw["renorm"]["corrected_share"] for record in one.records.values() if "renorm" in record.raw]
        if found:
            said.append(f"{one.cell.norm}: r was free to differ from 1 in {fmean(found):.0%} of the batches.")
    return list(dict.fromkeys(said))


def _doubt(line: Line, number: Published) -> str:
    place = line.measured.cell.place
    where = [str(place[key]) for key in ("stream", "strategy", "buffer", "setting", "labels") if place[key] is not None]
    return f"{' '.join(where)} {line.measured.cell.norm} {title_of(line.score)}: {number.flag}"
