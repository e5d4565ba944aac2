"""Collects the results for a table or figure of the paper: its parts and the outcomes of its claims; unformatted.

If settings were chosen for some cells, such as a learning rate for each norm, a section has two variants: one with the
same settings for all norms, and one with the chosen settings, from validation tasks or from the recipe's author. Both
are of exploratory seeds. Fresh seeds, from 100 on, are a further variant, which decides claims in stages.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from contnorm.bench.records import Record
from contnorm.bench.sequential import FIRST_SEED
from contnorm.paper.claims import FRESH, ClaimCase, ClaimResult, StagedRule, decide_claims
from contnorm.paper.format import place_title
from contnorm.paper.measured import MeasuredCell
from contnorm.paper.published import RUNS
from contnorm.paper.recipe import Recipe, find_recipe
from contnorm.paper.selection import Selection, covers, with_selection
from contnorm.paper.tables import (
    Line,
    ahead_remarks,
    data_part_remarks,
    divergence_remarks,
    forgetting_definitions,
    lines_of,
    precision_remarks,
    renorm_remarks,
    verdict_remarks,
)
from contnorm.report.recipe_records import RecordFolders, RecordIndex, cells_with_records

__all__ = ["Part", "Section", "UnrunRecipe", "Variant", "least_favourable", "sections_of", "table_title"]

OF_ROWS = (
    "norm",
    "groups",
    "momentum",
    "schedule",
    "freeze_after",
    "layers",
    "moments",
    "weights",
)  # dimensions in which the rows of a part differ
ONE_FOR_ALL, RECIPES_OWN = "The same settings for all norms", "Each norm with the settings the recipe has for it"
CHOSEN = "Each norm with the settings chosen on the validation tasks"
RATES_TITLE = "Learning rates tried on the validation tasks"


@dataclass(frozen=True)
class Part:
    """Cells that differ only in the norm or in how they are evaluated."""

    title: str
    measured: tuple[MeasuredCell, ...]
    lines: tuple[Line, ...]

    @property
    def run(self) -> bool:
        return any(one.run for one in self.measured)


@dataclass(frozen=True)
class Variant:
    """Variant of a table with one choice of settings; the title is empty if there is only one variant.

    Attributes:
        title: Which settings and seeds it has.
        parts: The cells.
        decided: The claims, decided by the records of the cells.
        remarks: Remarks on the table.
        replaces: Title of the variant with exploratory seeds whose claims this one decides anew with fresh seeds; None
            for a variant with exploratory seeds.
    """

    title: str
    parts: tuple[Part, ...]
    decided: tuple[ClaimResult, ...]
    remarks: tuple[str, ...]
    replaces: str | None = None

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
    """Results of a recipe with at least one run.

    Attributes:
        recipe: The recipe.
        title: Name and title of the table.
        notes: Notes of the recipe.
        variants: The table for each choice of settings and seeds.
        command: Commands that make the runs.
        selections: Learning rates chosen on validation tasks, by the title of their grid.
    """

    recipe: Recipe
    title: str
    notes: tuple[str, ...]
    variants: tuple[Variant, ...]
    command: str
    selections: Mapping[str, Selection] = field(default_factory=dict)

    @property
    def claims(self) -> list[tuple[Variant, ClaimResult]]:
        """Each claim once: with the settings that each norm chose, if there are any, and by fresh seeds if they decide.

        The same claims with one choice for all norms are in the variant of the table alone.
        """
        chosen = any(variant.title == CHOSEN for variant in self.variants)
        staged = {
            (variant.replaces, id(result.claim)): (variant, result)
            for variant in self.variants
            if variant.replaces is not None
            for result in variant.decided
        }
        claims = []
        for variant in self.variants:
            if chosen and variant.title == ONE_FOR_ALL:
                continue
            for result in variant.decided if variant.replaces is None else ():
                other = staged.pop((variant.title, id(result.claim)), None)
                claims.append(other if other is not None and other[1].has_interval else (variant, result))
        rest = [one for (title, _), one in staged.items() if not (chosen and title == ONE_FOR_ALL)]
        return [*claims, *rest]

    @property
    def records(self) -> list[Record]:
        return [record for variant in self.variants for record in variant.records]

    @property
    def run(self) -> bool:
        return any(variant.run for variant in self.variants)

    def row_name(self, one: MeasuredCell) -> str:
        """Name of a row: its norm, and its learning rate if its stream has several."""
        rate = _rate(one)
        several = len(self._rates(one.cell.place["stream"])) > 1
        return f"{one.cell.norm}, lr {rate:g}" if rate is not None and several else one.cell.norm

    def _rates(self, stream: str) -> set[float | None]:
        cells = (one for variant in self.variants for part in variant.parts for one in part.measured)
        return {_rate(one) for one in cells if one.cell.place["stream"] == stream}


@dataclass(frozen=True)
class UnrunRecipe:
    """A recipe without any run; ``why`` is the reason if it can't be run yet."""

    name: str
    title: str
    command: str
    why: str = ""


def _rate(one: MeasuredCell) -> float | None:
    rate: float | None = one.cell.values.get("train", {}).get("lr")
    return rate


def sections_of(names: Iterable[str], folders: RecordFolders) -> tuple[list[Section], list[UnrunRecipe]]:
    """Sections of the recipes with runs, and the recipes without; recipes that have nothing to run are left out."""
    sections, unrun = [], []
    for name in names:
        recipe = find_recipe(name)
        if recipe.kind == "waiting":
            unrun.append(UnrunRecipe(recipe.name, table_title(recipe), "", recipe.note))
        elif recipe.kind in ("runs", "curves"):
            section = _section(recipe, name, folders)
            if section.run:
                sections.append(section)
            else:
                unrun.append(UnrunRecipe(recipe.name, section.title, section.command))
    return sections, unrun


def table_title(recipe: Recipe) -> str:
    """Name of a table or figure, and its title.

    Example:
        >>> table_title(find_recipe("table3"))
        'Table 3: Running time of ER, over that with batch norm'
    """
    own = recipe.name.replace("-", " ").capitalize() if recipe.ours else recipe.name.replace("figure", "Figure ")
    return f"{f'Table {recipe.table}' if recipe.table else own}: {recipe.title}"


def least_favourable(decided: ClaimResult) -> ClaimCase:
    """Least favourable case of a claim: the one with the worst outcome and, among those, the worst numbers."""
    order = ("does not hold", "undecided", "equivalent", "holds")
    return min(decided.cases, key=lambda case: (order.index(case.outcome), _support(decided, case)))


def _support(decided: ClaimResult, case: ClaimCase) -> float:
    """How strongly a case supports its claim; infinite without a measurement, so that such cases come last."""
    if case.interval is None:
        return math.inf
    if case.paired is None:
        return -case.interval.high
    mean = case.paired.mean
    return {"above": mean, "under": -mean}.get(decided.claim.kind, -abs(mean))


def _section(recipe: Recipe, name: str, folders: RecordFolders) -> Section:
    index = folders.of(recipe)
    selection, refined = folders.selection(recipe), folders.selection(recipe, refined=True)
    variants = _variants(recipe, index, selection)
    fresh = _fresh_variant(recipe, index, refined)
    if fresh.run:
        variants = [*(variant for variant in variants if variant.run), fresh]
    notes = (*((recipe.note,) if recipe.note else ()), *forgetting_definitions(list(recipe.scores.values())))
    selections = {RATES_TITLE: selection} if selection is not None else {}
    if refined is not None and refined != selection and fresh.run:
        selections[f"{RATES_TITLE}, in a refined grid, for the fresh seeds"] = refined
    command = _command(name, [record for variant in variants for record in variant.records])
    return Section(recipe, table_title(recipe), notes, tuple(variants), command, selections)


def _variants(recipe: Recipe, index: RecordIndex, selection: Selection | None) -> list[Variant]:
    """Both variants if settings were chosen; a variant is left out if none of its differing cells was run.

    A table of our own has the chosen settings only.
    """
    if selection is not None:
        same, chosen = recipe, with_selection(recipe, selection)
    elif recipe.selected:
        same, chosen = replace(recipe, selected=()), recipe
    else:
        return [_variant("", recipe, cells_with_records(recipe, index))]
    titles = _titles(recipe, selection)
    cells = [cells_with_records(one, index) for one in (same, chosen)]
    differing = [(a, b) for a, b in zip(*cells, strict=True) if a.cell.values != b.cell.values]
    covered = [one for one in cells[1] if selection is None or covers(selection, one.cell)]
    unchosen = len(cells[1]) - len(covered)
    variants = (_variant(titles[0], same, cells[0]), _variant(titles[1], chosen, covered, unchosen))
    if recipe.ours and selection is not None:
        return [variants[1]]
    with_runs = [variant for side, variant in enumerate(variants) if any(pair[side].run for pair in differing)]
    return with_runs or [variants[selection is None]]


def _titles(recipe: Recipe, selection: Selection | None) -> tuple[str, str]:
    """Titles of the variants with the same and with chosen settings; the second is empty if nothing is chosen."""
    if selection is not None:
        return RECIPES_OWN if recipe.selected else ONE_FOR_ALL, CHOSEN
    return (ONE_FOR_ALL, RECIPES_OWN) if recipe.selected else ("", "")


def _fresh_variant(recipe: Recipe, index: RecordIndex, selection: Selection | None) -> Variant:
    """The variant with fresh seeds, at the learning rates chosen on validation tasks if there are some."""
    chosen = recipe if selection is None else with_selection(recipe, selection)
    cells = cells_with_records(chosen, index, fresh=True)
    covered = [one for one in cells if selection is None or covers(selection, one.cell)]
    replaces = _titles(recipe, selection)[1]
    title = ", ".join(filter(None, [FRESH, replaces[:1].lower() + replaces[1:]]))
    return _variant(title, chosen, covered, len(cells) - len(covered), replaces, StagedRule.of(chosen))


def _variant(
    title: str,
    recipe: Recipe,
    measured: Sequence[MeasuredCell],
    unchosen: int = 0,
    replaces: str | None = None,
    rule: StagedRule | None = None,
) -> Variant:
    """``unchosen`` is the number of cells left out because no settings were chosen for them."""
    parts = tuple(_parts(recipe, measured))
    decided = tuple(result for result in decide_claims(recipe, measured, rule) if result.cases)
    judged = verdict_remarks(recipe, [line for part in parts for line in part.lines])
    notes = [
        *data_part_remarks(measured),
        *renorm_remarks(measured),
        *ahead_remarks(measured),
        *precision_remarks(measured),
        *divergence_remarks(measured),
        *judged,
    ]
    notes += [f"Left out: the {unchosen} cells for which no learning rate was chosen."] if unchosen else []
    return Variant(title, parts, decided, tuple(notes), replaces)


def _parts(recipe: Recipe, measured: Sequence[MeasuredCell]) -> Iterable[Part]:
    by_title: dict[str, list[MeasuredCell]] = {}
    for one in measured:
        shared = {key: value for key, value in one.cell.place.items() if key not in OF_ROWS}
        by_title.setdefault(place_title(shared), []).append(one)
    for title, some in by_title.items():
        lines = tuple(line for one in some for line in lines_of(recipe, one)) if recipe.kind == "runs" else ()
        yield Part(title, tuple(some), lines)


def _command(name: str, records: Sequence[Record]) -> str:
    """Commands that make the runs of a recipe, with the device and precision of the existing records."""
    typed = ["contnorm paper", shlex.quote(name)]
    if any((record.raw.get("device") or {}).get("kind") == "cuda" for record in records):
        typed.append("--device cuda")
    precisions = {record.config.train.precision for record in records}
    if len(precisions) == 1 and precisions != {"fp32"}:
        typed.append(f"--precision {precisions.pop()}")
    exploratory = [record.seed for record in records if record.seed < FIRST_SEED]
    seeds = max((seed + 1 for seed in exploratory), default=0)  # seeds count from 0, and some may have diverged
    command = " ".join([*typed, *([f"--seeds {seeds}"] if seeds not in (0, RUNS) else [])])
    if len(exploratory) == len(records):
        return command
    staged = " ".join([*typed, "--until-decided"])
    return f"{command}\n{staged}" if exploratory else staged
