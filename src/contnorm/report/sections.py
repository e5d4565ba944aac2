"""A table or figure of the paper with what was run of it: its parts, and its claims decided; in no form yet.

Where a recipe chose settings for some cells, such as a learning rate for each norm, there are two ways to look at it:
with the same settings for all, and with those that were chosen, by validation tasks or by the recipe's author.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from contnorm.bench.records import Record
from contnorm.paper.claims import Case, Decided, decide
from contnorm.paper.diverged import lost_remarks
from contnorm.paper.format import forgetting, place_words
from contnorm.paper.precisions import precision_remarks
from contnorm.paper.published import RUNS
from contnorm.paper.recipe import Recipe
from contnorm.paper.recipe_file import find_recipe
from contnorm.paper.rows import Line, apart, corrected, lines_of, remarks
from contnorm.paper.selection import Selection, covers, with_selection
from contnorm.paper.series import Measured
from contnorm.report.record_shelf import Shelf, Shelves, measured_of

__all__ = ["Part", "Section", "Unrun", "Way", "sections_of", "table_title", "weakest"]

OF_ROWS = ("norm", "groups", "momentum", "schedule", "layers", "moments")  # what tells the rows of a part apart
ONE_FOR_ALL, RECIPES_OWN = "The same settings for all norms", "Each norm with the settings the recipe has for it"
CHOSEN = "Each norm with the settings chosen on the validation tasks"


@dataclass(frozen=True)
class Part:
    """The cells that differ in nothing but the norm, or in how they are evaluated."""

    title: str
    measured: tuple[Measured, ...]
    lines: tuple[Line, ...]

    @property
    def run(self) -> bool:
        return any(one.run for one in self.measured)


@dataclass(frozen=True)
class Way:
    """A table with one choice of settings; the title is empty where there is but one."""

    title: str
    parts: tuple[Part, ...]
    decided: tuple[Decided, ...]
    remarks: tuple[str, ...]

    @property
    def run(self) -> bool:
        return any(part.run for part in self.parts)

    @property
    def whole(self) -> bool:
        return all(one.run for part in self.parts for one in part.measured)

    @property
    def records(self) -> list[Record]:
        return [record for part in self.parts for one in part.measured for record in one.records.values()]


@dataclass(frozen=True)
class Section:
    """A recipe of which something was run."""

    recipe: Recipe
    title: str
    notes: tuple[str, ...]
    ways: tuple[Way, ...]
    command: str
    selection: Selection | None = None

    @property
    def records(self) -> list[Record]:
        return [record for way in self.ways for record in way.records]

    @property
    def run(self) -> bool:
        return any(way.run for way in self.ways)

    def row_name(self, one: Measured) -> str:
        """The norm of a row, with its learning rate where its stream has several."""
        rate = _rate(one)
        several = len(self._rates(one.cell.place["stream"])) > 1
        return f"{one.cell.norm}, lr {rate:g}" if rate is not None and several else one.cell.norm

    def _rates(self, stream: str) -> set[float | None]:
        there = (one for way in self.ways for part in way.parts for one in part.measured)
        return {_rate(one) for one in there if one.cell.place["stream"] == stream}


@dataclass(frozen=True)
class Unrun:
    """A recipe of which nothing was run; why, where it can't be yet."""

    name: str
    title: str
    command: str
    why: str = ""


def _rate(one: Measured) -> float | None:
    rate: float | None = one.cell.values.get("train", {}).get("lr")
    return rate


def sections_of(names: Iterable[str], shelves: Shelves) -> tuple[list[Section], list[Unrun]]:
    """The recipes that runs are there of, and the others; recipes that have none to run are left out."""
    sections, unrun = [], []
    for name in names:
        recipe = find_recipe(name)
        if recipe.kind == "waiting":
            unrun.append(Unrun(recipe.name, table_title(recipe), "", recipe.note))
        elif recipe.kind in ("runs", "curves"):
            section = _section(recipe, name, shelves.of(recipe), shelves.selection(recipe))
            if section.run:
                sections.append(section)
            else:
                unrun.append(Unrun(recipe.name, section.title, section.command))
    return sections, unrun


def table_title(recipe: Recipe) -> str:
    """Its name in words, and what it is.

    Example:
        >>> table_title(find_recipe("table3"))
        'Table 3: Running time of ER, over that with batch norm'
    """
    name = f"Table {recipe.table}" if recipe.table else recipe.name.replace("figure", "Figure ")
    return f"{name}: {recipe.title}"


def weakest(decided: Decided) -> Case:
    """The case that speaks least for a claim: the worst outcome there is, and of those the worst numbers."""
    order = ("does not hold", "undecided", "holds")
    return min(decided.cases, key=lambda case: (order.index(case.outcome), _support(decided, case)))


def _support(decided: Decided, case: Case) -> float:
    """The larger, the more a case speaks for its claim; most where nothing was measured, which speaks for nothing."""
    if case.interval is None:
        return math.inf
    if case.paired is None:
        return -case.interval.high
    mean = case.paired.mean
    return {"above": mean, "under": -mean}.get(decided.claim.kind, -abs(mean))


def _section(recipe: Recipe, name: str, shelf: Shelf, selection: Selection | None) -> Section:
    made = tuple(_ways(recipe, shelf, selection))
    notes = (*((recipe.note,) if recipe.note else ()), *forgetting(list(recipe.scores.values())))
    command = _command(name, [r for way in made for r in way.records])
    return Section(recipe, table_title(recipe), notes, made, command, selection)


def _ways(recipe: Recipe, shelf: Shelf, selection: Selection | None) -> list[Way]:
    """Both where settings were chosen; one alone where of the other nothing is run that is not the same."""
    if selection is not None:
        same, chosen = recipe, with_selection(recipe, selection)
        titles = RECIPES_OWN if recipe.selected else ONE_FOR_ALL, CHOSEN
    elif recipe.selected:
        same, chosen = replace(recipe, selected=()), recipe
        titles = ONE_FOR_ALL, RECIPES_OWN
    else:
        return [_way("", recipe, measured_of(recipe, shelf))]
    cells = [measured_of(one, shelf) for one in (same, chosen)]
    apart = [(a, b) for a, b in zip(*cells, strict=True) if a.cell.values != b.cell.values]
    own = [one for one in cells[1] if selection is None or covers(selection, one.cell)]
    ways = (_way(titles[0], same, cells[0]), _way(titles[1], chosen, own, len(cells[1]) - len(own)))
    there = [way for side, way in enumerate(ways) if any(pair[side].run for pair in apart)]
    return there or [ways[selection is None]]


def _way(title: str, recipe: Recipe, measured: Sequence[Measured], unchosen: int = 0) -> Way:
    """``unchosen`` cells are not in it, since nothing was chosen for them."""
    parts = tuple(_parts(recipe, measured))
    there = [one for one in measured if one.records]
    decided = tuple(found for claim in recipe.claims if (found := decide(claim, there)).cases)
    judged = remarks(recipe, [line for part in parts for line in part.lines])
    said = [*apart(measured), *corrected(measured), *precision_remarks(measured), *lost_remarks(measured), *judged]
    said += [f"Left out: the {unchosen} cells for which no learning rate was chosen."] if unchosen else []
    return Way(title, parts, decided, tuple(said))


def _parts(recipe: Recipe, measured: Sequence[Measured]) -> Iterable[Part]:
    together: dict[str, list[Measured]] = {}
    for one in measured:
        shared = {key: value for key, value in one.cell.place.items() if key not in OF_ROWS}
        together.setdefault(place_words(shared), []).append(one)
    for title, some in together.items():
        lines = tuple(line for one in some for line in lines_of(recipe, one)) if recipe.kind == "runs" else ()
        yield Part(title, tuple(some), lines)


def _command(name: str, records: Sequence[Record]) -> str:
    """What to type to make the runs of a recipe, as those that are there were made."""
    typed = ["contnorm paper", shlex.quote(name)]
    if any((record.raw.get("device") or {}).get("kind") == "cuda" for record in records):
        typed.append("--device cuda")
    precisions = {record.config.train.precision for record in records}
    if len(precisions) == 1 and precisions != {"fp32"}:
        typed.append(f"--precision {precisions.pop()}")
    seeds = max((record.seed + 1 for record in records), default=0)  # they count from 0, and some may be lost
    return " ".join([*typed, *([f"--seeds {seeds}"] if seeds not in (0, RUNS) else [])])
