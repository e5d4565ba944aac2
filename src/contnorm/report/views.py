"""Prepares sections for the HTML page: tables of cells with verdicts, the summary of claims, and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.records import spread_over_seeds
from contnorm.paper.claims import ClaimCase, ClaimResult
from contnorm.paper.format import case_numbers, claim_criterion, paper_number, spread, verdict_text
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import Recipe
from contnorm.paper.scores import drift_parts, score_title
from contnorm.paper.tables import Line
from contnorm.report import figures
from contnorm.report.lr_grid import GRID_NOTE, grid_rows
from contnorm.report.multilabel_views import label_figures
from contnorm.report.page import Cell, ClaimRow, Rows, SectionView, Table
from contnorm.report.sections import Part, Section, Way, weakest

__all__ = ["claim_rows", "section_view"]

MOST_CURVES = 9  # maximum in one figure; more can't be distinguished


def claim_rows(section: Section) -> list[ClaimRow]:
    """Rows of the claims of a section, once for each of its variants."""
    return [_claim_row(section, variant, decided) for variant in section.ways for decided in variant.decided]


def _claim_row(section: Section, variant: Way, decided: ClaimResult) -> ClaimRow:
    case = weakest(decided)
    difference, interval, _, effect = case_numbers(case)
    counts = Counter(one.outcome for one in decided.cases)
    of = f"{counts['holds']} of {len(decided.cases)} cases hold" if len(decided.cases) > 1 else "1 case"
    measured = any(one.seeds for one in decided.cases)
    of += "" if measured else ", not run"
    basis = ", ".join(
        filter(None, [claim_criterion(decided.claim), variant.title.lower(), "" if variant.whole else "of what is run"])
    )
    return ClaimRow(
        says=decided.claim.says,
        outcome=decided.outcome,
        beside=basis,
        section=section.recipe.name,
        where=section.title.partition(":")[0],
        cases=of,
        numbers=(case.what, difference, interval, effect, _pairs(case)),
        measured=measured,
    )


def _pairs(case: ClaimCase) -> str:
    return str(case.seeds) if case.seeds else "none"


def section_view(section: Section) -> SectionView:
    """View of a section: tables of all variants, claims case by case, and figures."""
    tables = [table for variant in section.ways for table in _tables(section, variant)]
    tables += _tried(section)
    drawn = [svg for variant in section.ways for svg in _pictures(section.recipe, variant)]
    pairs = [svg for variant in section.ways for svg in _pair_figures(variant)]
    recipe = section.recipe
    return SectionView(recipe.name, section.title, section.notes, tables, drawn, section.command, pairs)


def _pictures(recipe: Recipe, variant: Way) -> Iterator[str]:
    yield from _curves(recipe, variant)
    yield from label_figures(recipe, variant)
    yield from _splits(variant)


def _tables(section: Section, variant: Way) -> Iterator[Table]:
    rows = _curve_rows if section.recipe.kind == "curves" else _score_rows
    heads = _heads(section.recipe, variant)
    with_runs = [Rows(part.title, rows(section, part)) for part in variant.parts if part.run]
    missing = [Rows(part.title, rows(section, part)) for part in variant.parts if not part.run]
    if with_runs:
        yield Table(variant.title, heads, with_runs, variant.remarks)
    elif variant.title:
        yield Table(variant.title, heads, (), ("Nothing of it is run.",))
    if missing:
        count = sum(len(part.measured) for part in variant.parts if not part.run)
        yield Table(
            f"Not run: {count} rows{f' ({variant.title.lower()})' if variant.title else ''}", heads, missing, (), True
        )
    if variant.decided:
        title = f"Claims, case by case{f' ({variant.title.lower()})' if variant.title else ''}"
        yield Table(title, CASE_HEADS, [_cases(decided) for decided in variant.decided], (), True)


def _heads(recipe: Recipe, variant: Way) -> list[str]:
    if recipe.kind == "curves":
        return ["norm", "score", "seeds", *(f"task {i + 1}" for i in range(_tasks(recipe, variant)))]
    return ["norm", "seeds", *map(_head, recipe.scores.values())]


def _head(score: str) -> str:
    return f"forgetting ({score})" if score.startswith("fm") and score in SCORES else score_title(score)


def _tasks(recipe: Recipe, variant: Way) -> int:
    cells = [one for part in variant.parts for one in part.measured]
    return max(len(c) for one in cells for s in recipe.scores.values() for c in [*one.curves(s).values(), []])


def _score_rows(section: Section, part: Part) -> list[list[Cell]]:
    """One row per cell; for each score our result, the paper's, and the verdict."""
    rows = []
    published = any(one.cell.published for variant in section.ways for some in variant.parts for one in some.measured)
    for one in part.measured:
        lines = {line.score: line for line in part.lines if line.measured is one}
        scores = [_score(lines[s], published) if s in lines else Cell("-") for s in section.recipe.scores.values()]
        seeds = str(len(one.records) or "-")
        rows.append([Cell(section.row_name(one)), Cell(seeds), *scores])
    return rows


def _score(line: Line, published: bool) -> Cell:
    """``published``: whether any cell of the table has a published number; if not, cells do not mention the paper."""
    number = paper_number(line.published)
    paper = "" if number == "-" else f"paper {number}"
    if not line.values:
        return Cell(line.measured.empty_text, paper)
    difference, interval, verdict = verdict_text(line.comparison)
    if line.comparison is None:
        return Cell(spread(line.values), paper or ("not in the paper" if published else ""))
    apart = difference if interval == "-" else f"{difference} ({interval})"
    return Cell(spread(line.values), paper, apart, verdict)


def _curve_rows(section: Section, part: Part) -> list[list[Cell]]:
    rows = []
    for one in part.measured:
        for score in section.recipe.scores.values():
            curves = list(one.curves(score).values())
            means = [Cell(f"{fmean(values):.2f}", _deviation(values)) for values in zip(*curves, strict=False)]
            seeds = str(len(curves)) if curves else one.empty_text
            rows.append([Cell(section.row_name(one)), Cell(score_title(score)), Cell(seeds), *means])
    return rows


def _deviation(values: Sequence[float]) -> str:
    std = spread_over_seeds(list(values))[1]
    return f"+- {std:.2f}" if std == std else ""


def _tried(section: Section) -> list[Table]:
    """Table of the learning rates tried on the validation tasks, with the chosen one marked."""
    if section.selection is None or not section.selection.rates:
        return []
    heads, *rows = grid_rows(section.selection)
    return [
        Table(
            "Learning rates tried on the validation tasks",
            heads,
            [Rows("", [list(map(Cell, r)) for r in rows])],
            (GRID_NOTE,),
            True,
        )
    ]


CASE_HEADS = ("case", "difference", "95 % interval (t)", "bootstrap", "effect", "pairs", "outcome")


def _cases(decided: ClaimResult) -> Rows:
    title = f"{decided.outcome.upper()}: {decided.claim.says} ({claim_criterion(decided.claim)})"
    return Rows(
        title, [[*map(Cell, (c.what, *case_numbers(c), _pairs(c))), Cell("", verdict=c.outcome)] for c in decided.cases]
    )


def _curves(recipe: Recipe, variant: Way) -> Iterator[str]:
    """One figure per part: its scores over the tasks; for tables, ACC."""
    for part in variant.parts:
        title = f"{part.title}{f': {variant.title.lower()}' if variant.title else ''}"
        if recipe.kind == "curves":
            yield from _drawn(part.measured, list(recipe.scores.values()), title)
        elif "acc" in recipe.scores.values():
            yield from _drawn(part.measured, ["acc_so_far"], title)


def _drawn(measured: Iterable[MeasuredCell], scores: Sequence[str], title: str) -> Iterator[str]:
    recorded = [one for one in measured if one.records]
    named = {_curve_name(one, score, scores): list(one.curves(score).values()) for one in recorded for score in scores}
    curves = {name: some for name, some in named.items() if some and len(some[0]) > 1}
    what = "L1 distance to exact moments" if drift_parts(scores[0]) else "accuracy on them, percent"
    for first in range(0, len(curves), MOST_CURVES):
        yield figures.curves_over_tasks(dict(list(curves.items())[first : first + MOST_CURVES]), title, what)


def _splits(variant: Way) -> Iterator[str]:
    """For runs that were also evaluated with exact moments: the forgetting that these recover."""
    for part in variant.parts:
        for one in part.measured:
            records = list(one.records.values())
            both = (
                records and not records[0].multi_label and all(record.matrix_of("matrix_running") for record in records)
            )
            if both and one.cell.view.moments == "oracle" and min(r.matrix.tasks for r in records) > 1:
                name = one.cell.norm.rstrip("*")
                title = f"{part.title}, {name}: forgotten since each task was learned (fm_first)"
                yield figures.forgetting_split(records, title)


def _curve_name(one: MeasuredCell, score: str, scores: Sequence[str]) -> str:
    return one.cell.norm if len(scores) == 1 else f"{one.cell.norm}, {score_title(score)}"


def _pair_figures(variant: Way) -> Iterator[str]:
    for decided in variant.decided:
        pairs = {case.what: case.paired.differences for case in decided.cases if case.paired is not None}
        if pairs:
            title = decided.claim.says + (f", {variant.title.lower()}" if variant.title else "")
            yield figures.paired_differences(pairs, title, score_title(decided.claim.score))
