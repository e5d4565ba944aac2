"""Prints the tables of the `paper` command: scores with verdicts, curves, claims, and the data sets. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console

from contnorm.cli.tables import print_text, show_rows
from contnorm.paper.cells import MeasuredCell
from contnorm.paper.claims import ClaimCase, ClaimResult, Evidence
from contnorm.paper.recipe import Recipe, score_title
from contnorm.paper.tables import (
    case_numbers,
    case_outcome_text,
    claim_title,
    forgetting_definitions,
    lines_of,
    no_interval_reason,
    not_run_text,
    paper_number,
    spread,
    table_remarks,
    verdict_text,
)

__all__ = ["show_claims", "show_curves", "show_table"]

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
    notes = [*forgetting_definitions(list(recipe.scores.values())), *([recipe.note] if recipe.note else [])]
    notes += table_remarks(recipe, measured, lines if verdicts else [])
    if not verdicts:
        notes.append("A smoke test or changed settings: there are no verdicts on the paper's numbers.")
    for text in notes:
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
    for text in [*([recipe.note] if recipe.note else []), *table_remarks(recipe, measured, [])]:
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
