"""Sections as they stand on the page: tables of cells with their verdicts, the summary of claims, and pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.records import spread_over_seeds
from contnorm.paper.claims import Case, Decided
from contnorm.paper.format import measure, numbers, paper_number, spread, verdict_words
from contnorm.paper.recipe import Recipe
from contnorm.paper.rows import Line
from contnorm.paper.score_names import drift_parts, title_of
from contnorm.paper.series import Measured
from contnorm.report import figures
from contnorm.report.lr_grid import GRID_NOTE, grid_rows
from contnorm.report.multilabel_views import label_figures
from contnorm.report.page import Cell, ClaimRow, Rows, SectionView, Table
from contnorm.report.sections import Part, Section, Way, weakest

__all__ = ["claim_rows", "section_view"]

MOST_CURVES = 9  # in one picture; more can't be told apart


def claim_rows(section: Section) -> list[ClaimRow]:
    """The claims of a section, once for each way to look at it."""
    return [_claim_row(section, way, decided) for way in section.ways for decided in way.decided]


def _claim_row(section: Section, way: Way, decided: Decided) -> ClaimRow:
    case = weakest(decided)
    difference, interval, _, effect = numbers(case)
    counts = Counter(one.outcome for one in decided.cases)
    of = f"{counts['holds']} of {len(decided.cases)} cases hold" if len(decided.cases) > 1 else "1 case"
    measured = any(one.seeds for one in decided.cases)
    of += "" if measured else ", not run"
    beside = ", ".join(filter(None, [measure(decided.claim), way.title.lower(), "" if way.whole else "of what is run"]))
    return ClaimRow(
        says=decided.claim.says,
        outcome=decided.outcome,
        beside=beside,
        section=section.recipe.name,
        where=section.title.partition(":")[0],
        cases=of,
        numbers=(case.what, difference, interval, effect, _pairs(case)),
        measured=measured,
    )


def _pairs(case: Case) -> str:
    return str(case.seeds) if case.seeds else "none"


def section_view(section: Section) -> SectionView:
    """A section whole: its tables both ways where there are two, its claims case by case, and its pictures."""
    tables = [table for way in section.ways for table in _tables(section, way)]
    tables += _tried(section)
    drawn = [svg for way in section.ways for svg in _pictures(section.recipe, way)]
    pairs = [svg for way in section.ways for svg in _pair_figures(way)]
    recipe = section.recipe
    return SectionView(recipe.name, section.title, section.notes, tables, drawn, section.command, pairs)


def _pictures(recipe: Recipe, way: Way) -> Iterator[str]:
    yield from _curves(recipe, way)
    yield from label_figures(recipe, way)
    yield from _splits(way)


def _tables(section: Section, way: Way) -> Iterator[Table]:
    rows = _curve_rows if section.recipe.kind == "curves" else _score_rows
    heads = _heads(section.recipe, way)
    there = [Rows(part.title, rows(section, part)) for part in way.parts if part.run]
    missing = [Rows(part.title, rows(section, part)) for part in way.parts if not part.run]
    if there:
        yield Table(way.title, heads, there, way.remarks)
    elif way.title:
        yield Table(way.title, heads, (), ("Nothing of it is run.",))
    if missing:
        count = sum(len(part.measured) for part in way.parts if not part.run)
        yield Table(f"Not run: {count} rows{f' ({way.title.lower()})' if way.title else ''}", heads, missing, (), True)
    if way.decided:
        title = f"Claims, case by case{f' ({way.title.lower()})' if way.title else ''}"
        yield Table(title, CASE_HEADS, [_cases(decided) for decided in way.decided], (), True)


def _heads(recipe: Recipe, way: Way) -> list[str]:
    if recipe.kind == "curves":
        return ["norm", "score", "seeds", *(f"task {i + 1}" for i in range(_tasks(recipe, way)))]
    return ["norm", "seeds", *map(_head, recipe.scores.values())]


def _head(score: str) -> str:
    return f"forgetting ({score})" if score.startswith("fm") and score in SCORES else title_of(score)


def _tasks(recipe: Recipe, way: Way) -> int:
    cells = [one for part in way.parts for one in part.measured]
    return max(len(c) for one in cells for s in recipe.scores.values() for c in [*one.curves(s).values(), []])


def _score_rows(section: Section, part: Part) -> list[list[Cell]]:
    """A row a cell: ours, what the paper has, and the verdict, for each score."""
    rows = []
    published = any(one.cell.published for way in section.ways for some in way.parts for one in some.measured)
    for one in part.measured:
        lines = {line.score: line for line in part.lines if line.measured is one}
        scores = [_score(lines[s], published) if s in lines else Cell("-") for s in section.recipe.scores.values()]
        seeds = str(len(one.records) or "-")
        rows.append([Cell(section.row_name(one)), Cell(seeds), *scores])
    return rows


def _score(line: Line, published: bool) -> Cell:
    """``published`` is off where no cell of the table has a number of a paper, which need not be said of each."""
    number = paper_number(line.published)
    paper = "" if number == "-" else f"paper {number}"
    if not line.values:
        return Cell(line.measured.why_empty, paper)
    difference, interval, verdict = verdict_words(line.found)
    if line.found is None:
        return Cell(spread(line.values), paper or ("not in the paper" if published else ""))
    apart = difference if interval == "-" else f"{difference} ({interval})"
    return Cell(spread(line.values), paper, apart, verdict)


def _curve_rows(section: Section, part: Part) -> list[list[Cell]]:
    rows = []
    for one in part.measured:
        for score in section.recipe.scores.values():
            curves = list(one.curves(score).values())
            means = [Cell(f"{fmean(values):.2f}", _deviation(values)) for values in zip(*curves, strict=False)]
            seeds = str(len(curves)) if curves else one.why_empty
            rows.append([Cell(section.row_name(one)), Cell(title_of(score)), Cell(seeds), *means])
    return rows


def _deviation(values: Sequence[float]) -> str:
    std = spread_over_seeds(list(values))[1]
    return f"+- {std:.2f}" if std == std else ""


def _tried(section: Section) -> list[Table]:
    """Every learning rate that was tried on the validation tasks, the chosen one marked."""
    if section.selection is None or not section.selection.chosen:
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


def _cases(decided: Decided) -> Rows:
    title = f"{decided.outcome.upper()}: {decided.claim.says} ({measure(decided.claim)})"
    return Rows(
        title, [[*map(Cell, (c.what, *numbers(c), _pairs(c))), Cell("", verdict=c.outcome)] for c in decided.cases]
    )


def _curves(recipe: Recipe, way: Way) -> Iterator[str]:
    """For each part a picture of its scores over the tasks; of a table that of ACC."""
    for part in way.parts:
        title = f"{part.title}{f': {way.title.lower()}' if way.title else ''}"
        if recipe.kind == "curves":
            yield from _drawn(part.measured, list(recipe.scores.values()), title)
        elif "acc" in recipe.scores.values():
            yield from _drawn(part.measured, ["acc_so_far"], title)


def _drawn(measured: Iterable[Measured], scores: Sequence[str], title: str) -> Iterator[str]:
    there = [one for one in measured if one.records]
    named = {_curve_name(one, score, scores): list(one.curves(score).values()) for one in there for score in scores}
    curves = {name: some for name, some in named.items() if some and len(some[0]) > 1}
    what = "L1 distance to exact moments" if drift_parts(scores[0]) else "accuracy on them, percent"
    for first in range(0, len(curves), MOST_CURVES):
        yield figures.curves_over_tasks(dict(list(curves.items())[first : first + MOST_CURVES]), title, what)


def _splits(way: Way) -> Iterator[str]:
    """Where a run was evaluated with exact moments too: how much of what was forgotten they give back."""
    for part in way.parts:
        for one in part.measured:
            records = list(one.records.values())
            both = (
                records
                and not records[0].several_labels
                and all(record.matrix_of("matrix_running") for record in records)
            )
            if both and one.cell.view.moments == "oracle" and min(r.matrix.tasks for r in records) > 1:
                name = one.cell.norm.rstrip("*")
                title = f"{part.title}, {name}: forgotten since each task was learned (fm_first)"
                yield figures.forgetting_split(records, title)


def _curve_name(one: Measured, score: str, scores: Sequence[str]) -> str:
    return one.cell.norm if len(scores) == 1 else f"{one.cell.norm}, {title_of(score)}"


def _pair_figures(way: Way) -> Iterator[str]:
    for decided in way.decided:
        pairs = {case.what: case.paired.differences for case in decided.cases if case.paired is not None}
        if pairs:
            title = decided.claim.says + (f", {way.title.lower()}" if way.title else "")
            yield figures.paired_differences(pairs, title, title_of(decided.claim.score))
