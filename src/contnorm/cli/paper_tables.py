"""Prints results next to the published numbers: cells with verdicts, curves and claims. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich.console import Console

from contnorm.bench.metrics.accuracy_matrix import SCORES
from contnorm.bench.metrics.multilabel import LABEL_SCORES
from contnorm.cli.tables import safe_text, say, show_rows
from contnorm.paper.claims import Case, decide
from contnorm.paper.format import (
    FM_OF_LABELS,
    data_remarks,
    measure,
    no_interval,
    numbers,
    paper_number,
    spread,
    verdict_words,
)
from contnorm.paper.precisions import precision_remarks
from contnorm.paper.recipe import Recipe
from contnorm.paper.rows import Line, apart, corrected, lines_of, remarks
from contnorm.paper.score_names import title_of
from contnorm.paper.series import Measured

__all__ = ["show_claims", "show_curves", "show_table"]

SHOWN = ("stream", "strategy", "buffer", "tasks", "setting", "labels")


def show_table(recipe: Recipe, measured: Sequence[Measured], console: Console, verdicts: bool = True) -> None:
    """Print one row per score of a cell; ``verdicts`` is False for smoke tests, which are not comparable."""
    lines = [line for one in measured for line in lines_of(recipe, one)]
    shown = _dimensions(recipe, measured)
    heads = [*shown, "norm", "score", "seeds", "ours", "paper"]
    heads += ["difference", "95 % interval", "verdict"] if verdicts else []
    rows = []
    for line in lines:
        cells = [*_place(line.measured, shown), title_of(line.score), str(len(line.values)), spread(line.values)]
        cells.append(paper_number(line.published))
        rows.append(cells + (list(verdict_words(line.found)) if verdicts else []))
    show_rows(heads, rows, console, named=len(shown) + 1)
    console.print()
    for text in _footer(recipe, measured, lines, verdicts):
        say(text, console)


def _dimensions(recipe: Recipe, measured: Sequence[Measured]) -> list[str]:
    """Columns that name a cell: stream, strategy, dimensions with values, and the learning rate if it varies."""
    places = [one.cell.place for one in measured]
    shown = [key for key in SHOWN if key in ("stream", "strategy") or any(p[key] is not None for p in places)]
    chosen = any("lr" in selected.settings.get("train", {}) for selected in recipe.selected)
    return [*shown, "lr"] if chosen or len({_rate(one) for one in measured}) > 1 else shown


def _rate(one: Measured) -> float | None:
    return next((record.config.train.lr for record in one.records.values()), None)


def _place(one: Measured, shown: Sequence[str]) -> list[str]:
    place = {**one.cell.place, "lr": _rate(one)}
    return [*("all" if place[key] is None else str(place[key]) for key in shown), one.cell.norm]


def _footer(recipe: Recipe, measured: Sequence[Measured], lines: Sequence[Line], verdicts: bool) -> list[str]:
    notes = [f"Forgetting is {name}." for name in recipe.scores.values() if name in SCORES and name.startswith("fm")]
    notes += [FM_OF_LABELS] if any(n in LABEL_SCORES and n.startswith("fm") for n in recipe.scores.values()) else []
    notes += apart(measured)
    notes += [recipe.note] if recipe.note else []
    notes += corrected(measured)
    notes += precision_remarks(measured)
    if not verdicts:
        notes.append(
            "A try: these numbers are of the first steps alone, or of other settings, so there are no verdicts."
        )
        return notes
    return notes + remarks(recipe, lines)


def _data(measured: Sequence[Measured]) -> list[str]:
    return data_remarks(record for one in measured for record in one.records.values())


def show_curves(recipe: Recipe, measured: Sequence[Measured], console: Console) -> None:
    """Print one row per score of a cell: the mean over seeds after each task."""
    shown = _dimensions(recipe, measured)
    rows = []
    for one in measured:
        for score in recipe.scores.values():
            curves = list(one.curves(score).values())
            if curves:
                means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=False)]
                rows.append([*_place(one, shown), title_of(score), str(len(curves)), *means])
    tasks = max((len(row) for row in rows), default=0) - len(shown) - 3
    heads = [*shown, "norm", "score", "seeds", *(f"task {i + 1}" for i in range(tasks))]
    show_rows(heads, rows, console, named=len(shown) + 2)
    console.print()
    for text in [*([recipe.note] if recipe.note else []), *precision_remarks(measured), *_data(measured)]:
        say(text, console)


def show_claims(recipe: Recipe, measured: Sequence[Measured], console: Console, whole: bool = True) -> None:
    """Print each claim with its outcome, case by case; ``whole`` is False if some cells are not run."""
    for decided in (decide(claim, measured) for claim in recipe.claims):
        if decided.cases:
            outcome = decided.outcome.upper() + ("" if whole else ", of what is run")
            console.print()
            console.print(safe_text(f"{outcome}: {decided.claim.says} ({measure(decided.claim)})"))
        for case in decided.cases:
            say(f"  {case.what}: {_numbers(case)}", console)


def _numbers(case: Case) -> str:
    mean, interval, bootstrap, effect = numbers(case)
    if case.interval is None:
        first = f"{mean}, " if case.paired else ""
        return f"{first}{no_interval(case)}: {case.outcome}"
    if case.paired is None:
        return f"{interval}, {case.seeds} seeds: {case.outcome}"
    effect_text = "" if effect == "-" else f", effect {effect}"
    return f"{mean}, t {interval}, bootstrap {bootstrap}{effect_text}, {case.seeds} seeds: {case.outcome}"
