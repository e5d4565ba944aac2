"""Prepares the content of the HTML page: tables with verdicts, the summary of claims, figures, and details of runs.

A page with many runs is limited in size: streams are summarized, tables folded and figures left out, with a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.records import spread_over_seeds
from contnorm.paper.claims import ClaimCase, ClaimResult
from contnorm.paper.format import (
    case_numbers,
    claim_criterion,
    claim_outcome,
    claim_title,
    not_run_text,
    paper_number,
    spread,
    verdict_text,
)
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import Recipe
from contnorm.paper.scores import drift_parts, score_title
from contnorm.paper.tables import Line
from contnorm.report import record_figures
from contnorm.report.page import ClaimRow, RowGroup, RunView, SectionView, Table, TableCell
from contnorm.report.paper_tables import GRID_NOTE, case_heads, case_texts, grid_rows
from contnorm.report.record_figures import DISTANCE, MOST_CURVES, multilabel_figures
from contnorm.report.sections import Part, Section, Variant, least_favourable
from contnorm.report.text_tables import TextTable

__all__ = [
    "MOST_OPEN",
    "LimitedViews",
    "claim_rows",
    "limited_views",
    "score_tables",
    "section_view",
]

MOST_OPEN = 100  # rows of scores, or configurations, that are shown unfolded
MOST_ROWS = 2000  # rows of scores on a page
MOST_VIEWS = 1000  # configurations that are described with their command, versions and device
FIGURE_BYTES = 1_000_000  # total size of the figures of single configurations


def claim_rows(section: Section) -> list[ClaimRow]:
    """Rows of the claims of a section."""
    return [_claim_row(section, variant, decided) for variant, decided in section.claims]


def _claim_row(section: Section, variant: Variant, decided: ClaimResult) -> ClaimRow:
    case = least_favourable(decided)
    difference, interval = case_numbers(case)
    counts = Counter(one.outcome for one in decided.cases)
    of = f"{counts['holds']} of {len(decided.cases)} cases hold" if len(decided.cases) > 1 else "1 case"
    of += "" if decided.measured else ", not run"
    _, _, part = claim_outcome(decided, complete=variant.whole).partition(", ")
    basis = ", ".join(filter(None, [claim_criterion(decided.claim), variant.title.lower(), part]))
    return ClaimRow(
        text=decided.claim.says,
        outcome=decided.outcome,
        basis=basis,
        section=section.recipe.name,
        where=section.title.partition(":")[0],
        cases=of,
        numbers=(case.what, difference, interval, _pairs(case)),
        measured=decided.measured,
        evidence=decided.evidence_text,
        ours=section.recipe.ours,
    )


def _pairs(case: ClaimCase) -> str:
    return str(case.seeds) if case.seeds else "none"


def section_view(section: Section) -> SectionView:
    """View of a section: tables of all variants, claims case by case, and figures."""
    tables = [table for variant in section.variants for table in _tables(section, variant)]
    tables += _learning_rate_tables(section)
    drawn = [svg for variant in section.variants for svg in _figures(section.recipe, variant)]
    pairs = [svg for variant in section.variants for svg in _pair_figures(variant)]
    recipe = section.recipe
    return SectionView(recipe.name, section.title, section.notes, tables, drawn, section.command, pairs)


def _figures(recipe: Recipe, variant: Variant) -> Iterator[str]:
    yield from _curves(recipe, variant)
    yield from multilabel_figures(recipe, variant)
    yield from _forgetting_figures(variant)


def _tables(section: Section, variant: Variant) -> Iterator[Table]:
    rows = _curve_rows if section.recipe.kind == "curves" else _score_rows
    heads = _heads(section.recipe, variant)
    with_runs = [RowGroup(part.title, rows(section, part)) for part in variant.parts if part.run]
    missing = [RowGroup(part.title, rows(section, part)) for part in variant.parts if not part.run]
    if with_runs:
        yield Table(variant.title, heads, with_runs, variant.remarks)
    elif variant.title:
        yield Table(variant.title, heads, (), ("No runs yet.",))
    if missing:
        count = sum(len(part.measured) for part in variant.parts if not part.run)
        yield Table(
            f"Not run: {count} rows{f' ({variant.title.lower()})' if variant.title else ''}", heads, missing, (), True
        )
    if variant.decided:
        title = f"Claims, case by case{f' ({variant.title.lower()})' if variant.title else ''}"
        groups = [_cases(decided, variant.whole) for decided in variant.decided]
        notes = [f"{decided.claim.says}: {not_run_text(decided)}" for decided in variant.decided if decided.not_run]
        yield Table(title, case_heads(variant.decided[0]), groups, notes, True)


def _heads(recipe: Recipe, variant: Variant) -> list[str]:
    if recipe.kind == "curves":
        return ["norm", "score", "seeds", *(f"task {i + 1}" for i in range(_tasks(recipe, variant)))]
    return ["norm", "seeds", *map(_head, recipe.scores.values())]


def _head(score: str) -> str:
    return f"forgetting ({score})" if score.startswith("fm") and score in SCORES else score_title(score)


def _tasks(recipe: Recipe, variant: Variant) -> int:
    cells = [one for part in variant.parts for one in part.measured]
    return max(len(c) for one in cells for s in recipe.scores.values() for c in [*one.curves(s).values(), []])


def _score_rows(section: Section, part: Part) -> list[list[TableCell]]:
    """One row per cell; for each score our result, the paper's, and the verdict."""
    rows = []
    published = any(
        one.cell.published for variant in section.variants for some in variant.parts for one in some.measured
    )
    for one in part.measured:
        lines = {line.score: line for line in part.lines if line.measured is one}
        scores = [_score(lines[s], published) if s in lines else TableCell("-") for s in section.recipe.scores.values()]
        seeds = str(len(one.records) or "-")
        rows.append([TableCell(section.row_name(one)), TableCell(seeds), *scores])
    return rows


def _score(line: Line, published: bool) -> TableCell:
    """``published``: whether any cell of the table has a published number; if not, cells do not mention the paper."""
    number = paper_number(line.published)
    paper = "" if number == "-" else f"paper {number}"
    if not line.values:
        return TableCell(line.measured.empty_text, paper)
    difference, interval, verdict = verdict_text(line.comparison)
    if line.comparison is None:
        return TableCell(spread(line.values), paper or ("not in the paper" if published else ""))
    apart = difference if interval == "-" else f"{difference} ({interval})"
    return TableCell(spread(line.values), paper, apart, verdict)


def _curve_rows(section: Section, part: Part) -> list[list[TableCell]]:
    rows = []
    for one in part.measured:
        for score in section.recipe.scores.values():
            curves = list(one.curves(score).values())
            means = [TableCell(f"{fmean(values):.2f}", _deviation(values)) for values in zip(*curves, strict=False)]
            seeds = str(len(curves)) if curves else one.empty_text
            rows.append([TableCell(section.row_name(one)), TableCell(score_title(score)), TableCell(seeds), *means])
    return rows


def _deviation(values: Sequence[float]) -> str:
    std = spread_over_seeds(list(values))[1]
    return f"+- {std:.2f}" if std == std else ""


def _learning_rate_tables(section: Section) -> list[Table]:
    """Tables of the learning rates tried on the validation tasks, with the chosen ones marked."""
    tables = []
    for title, selection in section.selections.items():
        if selection.rates:
            heads, *rows = grid_rows(selection)
            group = RowGroup("", [list(map(TableCell, r)) for r in rows])
            tables.append(Table(title, heads, [group], (GRID_NOTE,), True))
    return tables


def _cases(decided: ClaimResult, whole: bool) -> RowGroup:
    rows = []
    for case in decided.cases:
        *texts, outcome = case_texts(decided, case)
        rows.append([*map(TableCell, texts), TableCell("", verdict=outcome)])
    return RowGroup(claim_title(decided, complete=whole), rows)


def _curves(recipe: Recipe, variant: Variant) -> Iterator[str]:
    """One figure per part: its scores over the tasks; for tables, ACC."""
    for part in variant.parts:
        title = f"{part.title}{f': {variant.title.lower()}' if variant.title else ''}"
        if recipe.kind == "curves":
            yield from _curve_figures(part.measured, list(recipe.scores.values()), title)
        elif "acc" in recipe.scores.values():
            yield from _curve_figures(part.measured, ["acc_so_far"], title)


def _curve_figures(measured: Iterable[MeasuredCell], scores: Sequence[str], title: str) -> Iterator[str]:
    recorded = [one for one in measured if one.records]
    named = {_curve_name(one, score, scores): list(one.curves(score).values()) for one in recorded for score in scores}
    curves = {name: some for name, some in named.items() if some and len(some[0]) > 1}
    what = DISTANCE if drift_parts(scores[0]) else "accuracy on these tasks (percent)"
    for first in range(0, len(curves), MOST_CURVES):
        yield record_figures.curves_over_tasks(dict(list(curves.items())[first : first + MOST_CURVES]), title, what)


def _forgetting_figures(variant: Variant) -> Iterator[str]:
    """For runs that were also evaluated with exact moments: the forgetting that these recover."""
    for part in variant.parts:
        for one in part.measured:
            records = list(one.records.values())
            both = (
                records and not records[0].multi_label and all(record.matrix_of("matrix_running") for record in records)
            )
            if both and one.cell.place["moments"] == "oracle" and min(r.matrix.tasks for r in records) > 1:
                name = one.cell.norm.rstrip("*")
                title = f"{part.title}, {name}: forgotten since each task was learned (fm_first)"
                yield record_figures.forgetting_bars(records, title)


def _curve_name(one: MeasuredCell, score: str, scores: Sequence[str]) -> str:
    return one.cell.norm if len(scores) == 1 else f"{one.cell.norm}, {score_title(score)}"


def _pair_figures(variant: Variant) -> Iterator[str]:
    for decided in variant.decided:
        pairs = {case.what: case.paired.differences for case in decided.cases if case.paired is not None}
        if pairs:
            title = decided.claim.says + (f", {variant.title.lower()}" if variant.title else "")
            yield record_figures.paired_differences(pairs, title, score_title(decided.claim.score))


@dataclass(frozen=True)
class LimitedViews:
    """The configurations that a page describes, and a note on what it leaves out."""

    views: Sequence[RunView]
    note: str = ""


def score_tables(block: TextTable, title: str) -> list[Table]:
    """Tables of the scores of all configurations; with many rows, a summary by stream and folded tables below."""
    if len(block.rows) <= MOST_OPEN:
        return [Table(title, block.heads, [_rows(block.rows)], block.below)]
    shown = block.rows[:MOST_ROWS]
    omitted = len(block.rows) - len(shown)
    notes = [f"The rows of each stream are folded below: {len(shown)} in all."]
    notes += [f"{omitted} more rows are left out of this page: `contnorm report --format csv` has all."] * bool(omitted)
    by_stream: dict[str, list[Sequence[str]]] = {}
    for row in block.rows:
        by_stream.setdefault(row[0], []).append(row)
    first_score = next(name for name in ("ACC", "mAP") if name in block.heads)
    heads = ["stream", "rows", f"highest {first_score}", *block.heads[1:3], "run"]
    best = {
        stream: max(rows, key=lambda row: _leading(row, block.heads.index(first_score)))
        for stream, rows in by_stream.items()
    }
    summary = [
        [stream, str(len(rows)), best[stream][block.heads.index(first_score)], *best[stream][1:3], best[stream][-1]]
        for stream, rows in by_stream.items()
    ]
    return [Table(title, heads, [_rows(summary)], [*block.below, *notes]), *_folded(block.heads, shown)]


def _folded(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Table]:
    by_stream: dict[str, list[Sequence[str]]] = {}
    for row in rows:
        by_stream.setdefault(row[0], []).append(row)
    for stream, some in by_stream.items():
        yield Table(f"{stream}: {len(some)} rows", heads, [_rows(some)], (), folded=True)


def _rows(rows: Iterable[Sequence[str]]) -> RowGroup:
    return RowGroup("", [list(map(TableCell, row)) for row in rows])


def _leading(row: Sequence[str], place: int) -> float:
    """Mean of a cell such as ``64.75 +- 3.44``; minus infinity for a cell without a number."""
    try:
        return float(row[place].split()[0])
    except ValueError:
        return float("-inf")


def limited_views(views: Iterable[tuple[RunView, Iterator[str]]], total: int) -> LimitedViews:
    """Collect the views of configurations; figures are included until their total size reaches the limit.

    Args:
        views: View of each configuration, and an iterator of its figures, which is consumed only if there is room.
        total: Number of configurations.
    """
    made: list[RunView] = []
    drawn, room = 0, FIGURE_BYTES
    for view, figures in views:
        if len(made) == MOST_VIEWS:
            break
        if room > 0:
            svgs = list(figures)
            room -= sum(map(len, svgs))
            drawn += 1
            made.append(RunView(view.name, view.title, view.settings, view.command, view.facts, svgs))
        else:
            made.append(view)
    notes = []
    if drawn < len(made):
        matrix = "`contnorm show HASH --by-task` prints the matrices of the others"
        notes.append(f"Figures are drawn of the first {drawn} of {total} settings, to keep the page small; {matrix}.")
    if len(made) < total:
        notes.append(f"{total - len(made)} settings are left out here: `contnorm show` and --format csv have all.")
    return LimitedViews(made, " ".join(notes))
