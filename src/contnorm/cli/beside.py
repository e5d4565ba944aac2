"""Ours beside the published, at a terminal: cells with their verdicts, curves, and claims. Needs no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from contnorm.cli.showing import part_of, spread
from contnorm.comparison.claims import Case, Decided, decide
from contnorm.comparison.measured import Measured
from contnorm.comparison.verdicts import Beside, beside
from contnorm.metrics.matrix import SCORES
from contnorm.metrics.multilabel import LABEL_SCORES
from contnorm.recipes.published import Published
from contnorm.recipes.recipe import Recipe
from contnorm.recipes.scores import title_of

__all__ = ["show_claims", "show_curves", "show_table"]

SHOWN = ("stream", "strategy", "buffer", "tasks", "setting", "labels")


@dataclass(frozen=True)
class Line:
    """One score of one cell."""

    measured: Measured
    score: str
    values: list[float]
    published: Published | None
    found: Beside | None


def show_table(recipe: Recipe, measured: Sequence[Measured], console: Console, verdicts: bool = True) -> None:
    """A line a score of a cell; ``verdicts`` is off for a try, whose numbers mean nothing."""
    lines = [line for one in measured for line in _lines(recipe, one)]
    shown = _dimensions(recipe, measured)
    heads = [*shown, "norm", "score", "seeds", "ours", "paper"]
    heads += ["difference", "95 % interval", "verdict"] if verdicts else []
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
    for line in lines:
        cells = [*_place(line.measured, shown), title_of(line.score), str(len(line.values)), spread(line.values)]
        cells.append(_paper(line.published))
        table.add_row(*map(Text, cells + (_verdict(line) if verdicts else [])))
    console.print(table, "")
    for text in _footer(recipe, lines, verdicts):
        console.print(Text(text), soft_wrap=True)


def _lines(recipe: Recipe, one: Measured) -> list[Line]:
    lines = []
    for metric, score in recipe.scores.items():
        values = list(one.values(score).values())
        if not values:
            continue
        number = one.cell.published.get(metric)
        found = None
        if number is not None and number.mean is not None and not _parts(one):
            found = beside(values, number.mean, number.std, recipe.published_runs)
        lines.append(Line(one, score, values, number, found))
    return lines


def _parts(one: Measured) -> set[str]:
    """Of which published streams the runs of a cell had only a part."""
    return {words for record in one.records.values() if (words := part_of(record))}


def _dimensions(recipe: Recipe, measured: Sequence[Measured]) -> list[str]:
    """Those in which the cells are something; stream and strategy always, the learning rate where it was chosen."""
    places = [one.cell.place for one in measured]
    shown = [key for key in SHOWN if key in ("stream", "strategy") or any(p[key] is not None for p in places)]
    chosen = any("lr" in selected.settings.get("train", {}) for selected in recipe.selected)
    return [*shown, "lr"] if chosen or len({_rate(one) for one in measured}) > 1 else shown


def _rate(one: Measured) -> float | None:
    return next((record.config.train.lr for record in one.records.values()), None)


def _place(one: Measured, shown: Sequence[str]) -> list[str]:
    place = {**one.cell.place, "lr": _rate(one)}
    return [*("all" if place[key] is None else str(place[key]) for key in shown), one.cell.norm]


def _paper(number: Published | None) -> str:
    if number is None or number.mean is None:
        return "-" if number is None or number.std is None else f"+- {number.std:.2f}"
    said = f"{number.mean:.2f}" if number.std is None else f"{number.mean:.2f} +- {number.std:.2f}"
    return f"{said} ?" if number.flag else said


def _verdict(line: Line) -> list[str]:
    found = line.found
    if found is None:
        return ["-", "-", "-"]
    if found.interval is None:
        return [f"{found.difference:+.2f}", "-", "one seed: none"]
    words = found.verdict if found.how == "welch" else f"{found.verdict} (ours alone)"
    return [f"{found.difference:+.2f}", str(found.interval), words]


def _footer(recipe: Recipe, lines: Sequence[Line], verdicts: bool) -> list[str]:
    said = [f"Forgetting is {name}." for name in recipe.scores.values() if name in SCORES and name.startswith("fm")]
    if any(name in LABEL_SCORES and name.startswith("fm") for name in recipe.scores.values()):
        said.append("FM is normalized: which part of its best score a task had lost at the end.")
    parts = set().union(*(_parts(line.measured) for line in lines))
    said += [f"Ours is {words}, which is another stream: no verdict on its numbers." for words in sorted(parts)]
    said += [recipe.note] if recipe.note else []
    said += dict.fromkeys(text for line in lines for text in _corrected(line.measured))
    if not verdicts:
        return [
            *said,
            "A try: these numbers are of the first steps alone, or of other settings, so there are no verdicts.",
        ]
    found = [line.found for line in lines if line.found is not None]
    counts = Counter(one.verdict for one in found if one.verdict != "none")
    if counts:
        words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("agrees", "above", "below"))
        said.append(f"Of {sum(counts.values())} numbers: {words}; by the 95 % interval of ours less the paper's.")
    how = {one.how for one in found if one.interval is not None}
    if "welch" in how:
        said.append(f"Welch's interval, with the paper's deviation over {recipe.published_runs} runs.")
    if "ours" in how:
        said.append("Ours alone: the paper gives no deviation, so the interval is Student's of our runs.")
    said += [f"? {_doubt(line)}" for line in lines if line.published is not None and line.published.flag]
    return said


def _corrected(one: Measured) -> list[str]:
    """Of batch renormalization, in how much of the run it was more than batch norm."""
    found = [record.raw["renorm"]["corrected_share"] for record in one.records.values() if "renorm" in record.raw]
    return [f"{one.cell.norm}: r was free to differ from 1 in {fmean(found):.0%} of the batches."] if found else []


def _doubt(line: Line) -> str:
    place, number = line.measured.cell.place, line.published
    assert number is not None
    where = [str(place[key]) for key in ("stream", "strategy", "buffer", "setting", "labels") if place[key] is not None]
    return f"{' '.join(where)} {line.measured.cell.norm} {title_of(line.score)}: {number.flag}"


def show_curves(recipe: Recipe, measured: Sequence[Measured], console: Console) -> None:
    """A line a score of a cell, its mean over seeds after each task."""
    shown = _dimensions(recipe, measured)
    rows = []
    for one in measured:
        for score in recipe.scores.values():
            curves = list(one.curves(score).values())
            if curves:
                means = [f"{fmean(values):.2f}" for values in zip(*curves, strict=True)]
                rows.append([*_place(one, shown), title_of(score), str(len(curves)), *means])
    tasks = max((len(row) for row in rows), default=0) - len(shown) - 3
    heads = [*shown, "norm", "score", "seeds", *(f"task {i + 1}" for i in range(tasks))]
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, "")
    if recipe.note:
        console.print(Text(recipe.note), soft_wrap=True)


def show_claims(recipe: Recipe, measured: Sequence[Measured], console: Console, whole: bool = True) -> None:
    """Each claim with what the runs say of it, case by case; ``whole`` is off where not all cells are run."""
    for decided in (decide(claim, measured) for claim in recipe.claims):
        if decided.cases:
            outcome = decided.outcome.upper() + ("" if whole else ", of what is run")
            console.print(Text(f"\n{outcome}: {decided.claim.says} ({_measure(decided)})"))
        for case in decided.cases:
            console.print(Text(f"  {case.what}: {_numbers(decided, case)}"), soft_wrap=True)


def _measure(decided: Decided) -> str:
    claim = decided.claim
    if claim.kind in ("near", "flat"):
        return f"{claim.score}, within {claim.margin:g}"
    return f"{claim.score}, less {claim.limit:g}" if claim.kind == "under" else claim.score


def _numbers(decided: Decided, case: Case) -> str:
    if case.interval is None:
        why = "not in the records" if case.seeds == 0 else "one seed" if case.seeds == 1 else "no spread"
        first = f"{case.paired.mean:+.2f}, " if case.paired else ""
        return f"{first}{why}: {case.outcome}"
    if case.paired is None:
        low, high = case.interval
        return f"ratio of variances {low:.2f} to {high:.2f}, {case.seeds} seeds: {case.outcome}"
    pair = case.paired
    effect = "" if math.isnan(pair.effect) else f", effect {pair.effect:+.2f}"
    intervals = f"t {pair.t}, bootstrap {pair.bootstrap}"
    return f"{pair.mean:+.2f}, {intervals}{effect}, {case.seeds} seeds: {case.outcome}"
