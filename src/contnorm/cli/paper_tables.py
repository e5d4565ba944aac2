"""Prints the tables of the `paper` command: scores with verdicts, curves, claims, and the data sets. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console
from rich.table import Column, Table

from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import SCORES
from contnorm.cli.tables import print_text, safe_text, show_rows
from contnorm.paper.claims import ClaimCase, ClaimResult, Evidence
from contnorm.paper.data_table import ComparedData
from contnorm.paper.format import (
    case_numbers,
    case_outcome_text,
    claim_title,
    no_interval_reason,
    not_run_text,
    paper_number,
    spread,
    verdict_text,
)
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.recipe import Recipe
from contnorm.paper.record_remarks import LABEL_FORGETTING, data_remarks
from contnorm.paper.scores import score_title
from contnorm.paper.tables import Line, data_part_remarks, lines_of, precision_remarks, renorm_remarks, verdict_remarks

__all__ = ["show_claims", "show_curves", "show_data_table", "show_table"]

SHOWN = (
    "stream",
    "strategy",
    "buffer",
    "forward",
    "batch",
    "replay",
    "tasks",
    "setting",
    "labels",
)  # dimensions that have a column
COLUMNS = ("tasks", "shape", "train", "test", "classes")  # of the table of data sets


def show_table(recipe: Recipe, measured: Sequence[MeasuredCell], console: Console, verdicts: bool = True) -> None:
    """Print one row per score of a cell with records.

    Args:
        recipe: Recipe of the table.
        measured: All cells of the table.
        console: Terminal to print to.
        verdicts: False for runs that are not comparable with the paper's, such as smoke tests.
    """
    lines = [line for one in measured if one.records for line in lines_of(recipe, one)]
    shown = _dimensions(recipe, measured)
    heads = [*shown, "norm", "score", "seeds", "ours", "paper"]
    heads += ["difference", "95 % interval", "verdict"] if verdicts else []
    rows = []
    for line in lines:
        cells = [*_place(line.measured, shown), score_title(line.score), str(len(line.values)), spread(line.values)]
        cells.append(paper_number(line.published))
        rows.append(cells + (list(verdict_text(line.comparison)) if verdicts else []))
    show_rows(heads, rows, console, named=len(shown) + 1)
    console.print()
    for text in _footer(recipe, measured, lines, verdicts):
        print_text(text, console)


def _dimensions(recipe: Recipe, measured: Sequence[MeasuredCell]) -> list[str]:
    """Columns that name a cell: stream, strategy, dimensions with values, and the learning rate if it varies."""
    recorded = [one for one in measured if one.records]
    places = [one.cell.place for one in recorded]
    shown = [key for key in SHOWN if key in ("stream", "strategy") or any(p[key] is not None for p in places)]
    selected = any("lr" in selected.settings.get("train", {}) for selected in recipe.selected)
    return [*shown, "lr"] if selected or len({_rate(one) for one in recorded}) > 1 else shown


def _rate(one: MeasuredCell) -> float | None:
    return next((record.config.train.lr for record in one.records.values()), None)


def _place(one: MeasuredCell, shown: Sequence[str]) -> list[str]:
    place = {**one.cell.place, "lr": _rate(one)}
    return [*("all" if place[key] is None else str(place[key]) for key in shown), one.cell.norm]


def _footer(recipe: Recipe, measured: Sequence[MeasuredCell], lines: Sequence[Line], verdicts: bool) -> list[str]:
    notes = [f"Forgetting is {name}." for name in recipe.scores.values() if name in SCORES and name.startswith("fm")]
    notes += [LABEL_FORGETTING] if any(n in LABEL_SCORES and n.startswith("fm") for n in recipe.scores.values()) else []
    notes += data_part_remarks(measured)
    notes += [recipe.note] if recipe.note else []
    notes += renorm_remarks(measured)
    notes += precision_remarks(measured)
    if not verdicts:
        notes.append(
            "A smoke test, or changed settings: not comparable with the paper, so there are no verdicts on its numbers."
        )
        return notes
    return notes + verdict_remarks(recipe, lines)


def show_curves(recipe: Recipe, measured: Sequence[MeasuredCell], console: Console) -> None:
    """Print one row per score of a cell: the mean over seeds after each task."""
    shown = _dimensions(recipe, measured)
    rows = []
    for one in measured:
        for score in recipe.scores.values():
            curves = list(one.curves(score).values())
            if curves:
                means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=False)]
                rows.append([*_place(one, shown), score_title(score), str(len(curves)), *means])
    tasks = max((len(row) for row in rows), default=0) - len(shown) - 3
    heads = [*shown, "norm", "score", "seeds", *(f"task {i + 1}" for i in range(tasks))]
    show_rows(heads, rows, console, named=len(shown) + 2)
    console.print()
    data = data_remarks(record for one in measured for record in one.records.values())
    for text in [*([recipe.note] if recipe.note else []), *precision_remarks(measured), *data]:
        print_text(text, console)


def show_claims(results: Sequence[ClaimResult], console: Console, *, complete: bool = True) -> None:
    """Print each claim with its outcome and evidence, case by case; ``complete`` is False if some cells are not run."""
    for result in results:
        console.print()
        print_text(claim_title(result, complete=complete), console)
        for case in result.cases:
            print_text(f"  {case.what}: {_case_text(case, result.evidence)}", console)
        if not result.cases:
            print_text("  none of its cells has a record", console)
        elif result.not_run:
            print_text(f"  {not_run_text(result)}", console)


def _case_text(case: ClaimCase, evidence: Evidence) -> str:
    mean, interval = case_numbers(case)
    first = f"{mean}, " if case.paired else ""
    if case.interval is None:
        return f"{first}{no_interval_reason(case)}: {case_outcome_text(case)}"
    kind = "" if case.is_ratio else "interval " if evidence == "staged" else "95 % interval "
    return f"{first}{kind}{interval}, {case.seeds} seeds: {case_outcome_text(case)}"


def show_data_table(rows: Sequence[ComparedData], console: Console) -> None:
    """Print one row per data set on disk; for the others, what to put where."""
    table = Table(*(Column(head, no_wrap=True) for head in ("stream", *COLUMNS, "verdict")), box=None, pad_edge=False)
    for row in rows:
        if row.measured is not None:
            table.add_row(*map(safe_text, (row.measured.stream, *_cells(row), _verdict(row))))
    console.print(table, "")
    console.print(safe_text("Measured on disk; the paper's value is in brackets where it differs."))
    notes = [row.missing for row in rows if row.missing]
    notes += [f"{row.published.stream}: {row.published.flag}." for row in rows if row.published.flag]
    for line in notes:
        console.print(safe_text(line), soft_wrap=True)


def _cells(row: ComparedData) -> list[str]:
    return [_cell(getattr(row.measured, name), getattr(row.published, name)) for name in COLUMNS]


def _cell(ours: object, theirs: object) -> str:
    return _text(ours) if ours == theirs else f"{_text(ours)} ({_text(theirs)})"


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else f"{value:,}"


def _verdict(row: ComparedData) -> str:
    differing = [name for name in COLUMNS if getattr(row.measured, name) != getattr(row.published, name)]
    return f"differs in {', '.join(differing)}" if differing else "agrees"
