"""Learning rates selected on validation tasks, with the whole grid of candidates; and the variants of a table.

A selection is stored in a separate file, so that a recipe can be shown both with one learning rate for all cells and
with a selected one for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from contnorm.bench.config.schema import parse_toml, read_toml_text
from contnorm.bench.grid import best_candidate
from contnorm.bench.records import spread_over_seeds
from contnorm.bench.sequential import FIRST_SEED
from contnorm.errors import UserError
from contnorm.paper.cells import MeasuredCell, RecipeCell, cells_of, matches
from contnorm.paper.claims import ClaimResult, StagedRule, decide_claims
from contnorm.paper.recipe import Recipe, SelectedSettings, Selector, checked


@dataclass(frozen=True)
class RateResult:
    """One learning rate of a grid.

    Attributes:
        lr: The learning rate.
        mean, sd: ACC on the validation tasks over the finished seeds; NaN if there is none.
        seeds: Number of finished seeds.
        lost: Number of diverged seeds.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    lr: float
    mean: float
    sd: float
    seeds: int
    lost: int = 0

    @property
    def eligible(self) -> bool:
        """Whether it can be chosen: some seed finished, and none diverged."""
        return self.seeds > 0 and not self.lost

    @classmethod
    def of(cls, lr: float, accuracies: Sequence[float], lost: int) -> RateResult:
        """Build from the validation ACC of each finished seed.

        Example:
            >>> RateResult.of(0.1, [60.0, 62.0], lost=1)
            RateResult(lr=0.1, mean=61.0, sd=1.4142135623730951, seeds=2, lost=1)
        """
        mean, sd = spread_over_seeds(list(accuracies)) if accuracies else (math.nan, math.nan)
        return cls(lr, mean, sd, len(accuracies), lost)


@dataclass(frozen=True)
class SelectedRate:
    """Selected learning rate of some cells, and the grid of candidates."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    where: Selector
    lr: float
    precision: str
    grid: tuple[RateResult, ...]


@dataclass(frozen=True)
class Selection:
    """Selected learning rates of a recipe, and the file they come from."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    recipe: str
    selected: tuple[SelectedRate, ...] = ()
    path: str = ""

    def covers(self, cell: RecipeCell) -> bool:
        """Whether a learning rate was selected for a cell."""
        return any(matches(cell.place, rate.where) for rate in self.selected)


def best_rate(grid: Sequence[RateResult]) -> RateResult | None:
    """Learning rate with the highest mean; the smallest one on ties. None if a seed diverged at every rate.

    A learning rate with a diverged seed is excluded, since it would diverge in the table too.

    Example:
        >>> grid = [RateResult(0.1, 61.0, 1.0, 3), RateResult(0.03, 61.0, 2.0, 3)]
        >>> grid.append(RateResult(0.3, 70.0, 1.0, 2, lost=1))
        >>> best_rate(grid).lr
        0.03
    """
    return best_candidate(grid, order=lambda result: result.lr)


def with_selection(recipe: Recipe, selection: Selection) -> Recipe:
    """Recipe with the selected learning rate for each covered cell."""
    settings = tuple(SelectedSettings(rate.where, {"train": {"lr": rate.lr}}) for rate in selection.selected)
    return replace(recipe, selected=(*recipe.selected, *settings))


def find_selection(recipe: str, places: Sequence[Path] = (), *, refined: bool = False) -> Selection | None:
    """Selection from the first existing path, else that of the package; None if there is none.

    Args:
        recipe: Name of the recipe.
        places: Paths to try first.
        refined: Whether to prefer the package's selection from an extended and refined grid, which fresh seeds use.
            Tables of exploratory seeds were made with the coarse grid.

    Example:
        >>> [find_selection("table2", refined=refined).selected[1].lr for refined in (False, True)]
        [0.003, 0.005]
    """
    for path in places:
        if path.is_file():
            return read_selection(path, recipe)
    package = resources.files("contnorm.paper").joinpath("selected")
    files = [package.joinpath("refined", f"{recipe}.toml")] if refined else []
    for file in [*files, package.joinpath(f"{recipe}.toml")]:
        if file.is_file():
            return parse_selection(file.read_text(encoding="utf-8"), recipe, str(file))
    return None


def read_selection(path: Path, recipe: str) -> Selection:
    """Read the file of a selection."""
    return parse_selection(read_toml_text(path, "`contnorm tune` writes such a file."), recipe, str(path))


def parse_selection(text: str, recipe: str, where: str) -> Selection:
    """Parse a selection; error messages begin with ``where``."""
    selection = checked(Selection, parse_toml(text, where), where)
    if selection.recipe != recipe:
        raise UserError(f"{where}: is the selection of {selection.recipe!r}, not of {recipe!r}. Use another file.")
    return replace(selection, path=where)


def selection_text(selection: Selection) -> str:
    """TOML text of a selection.

    Example:
        >>> grid = (RateResult(0.03, 61.0, 1.5, 3), RateResult(0.1, float("nan"), float("nan"), 0, lost=3))
        >>> print(selection_text(Selection("x", (SelectedRate({"norm": "cn", "groups": 32}, 0.03, "fp32", grid),))))
        # Learning rates chosen on the validation tasks alone, by ACC; made by `contnorm tune`.
        recipe = "x"
        <BLANKLINE>
        [[selected]]
        where = { norm = "cn", groups = 32 }
        lr = 0.03
        precision = "fp32"
        grid = [
            { lr = 0.03, mean = 61.0, sd = 1.5, seeds = 3, lost = 0 },
            { lr = 0.1, mean = nan, sd = nan, seeds = 0, lost = 3 },
        ]
        <BLANKLINE>
    """
    lines = ["# Learning rates chosen on the validation tasks alone, by ACC; made by `contnorm tune`."]
    lines.append(f"recipe = {_toml(selection.recipe)}")
    for rate in selection.selected:
        lines += ["", "[[selected]]", f"where = {_toml(rate.where)}", f"lr = {_toml(rate.lr)}"]
        lines += [f"precision = {_toml(rate.precision)}", "grid = ["]
        lines += [*(f"    {_toml(vars(result))}," for result in rate.grid), "]"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """TOML text of a name, a number or a table; JSON escapes are sufficient for the names used here."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{key} = {_toml(inner)}' for key, inner in value.items())} }}"
    return repr(float(f"{value:.8g}")) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


# --- Variants of a table ---------------------------------------------------------------------------------------------

ONE_FOR_ALL, RECIPES_OWN = "The same settings for all norms", "Each norm with the settings the recipe has for it"
CHOSEN = "Each norm with the settings chosen on the validation tasks"
FRESH = f"Fresh seeds, from {FIRST_SEED} on"


@dataclass(frozen=True)
class TableVariant:
    """A recipe's cells with one choice of settings and seeds.

    Attributes:
        title: Which settings and seeds it has; empty if there is only one variant.
        recipe: The recipe, with the chosen settings if there are some.
        cells: The cells, with their records once they are run.
        rule: The staged rule that decides the claims, if the records are of fresh seeds; None for exploratory seeds.
        others: With a rule, the cells that are not selected; they are not shown, but count for the claims.
        unchosen: Number of cells that are left out because no learning rate was chosen for them.
        replaces: Title of the variant with exploratory seeds whose claims this one decides anew with fresh seeds; None
            for a variant with exploratory seeds.
        filtered: Whether cells of the recipe are left out by a filter.
    """

    title: str
    recipe: Recipe
    cells: Sequence[MeasuredCell]
    rule: StagedRule | None = None
    others: Sequence[MeasuredCell] = ()
    unchosen: int = 0
    replaces: str | None = None
    filtered: bool = False

    @cached_property
    def claims(self) -> tuple[ClaimResult, ...]:
        """The claims of the recipe, decided by the records of the cells."""
        return decide_claims(self.recipe, [*self.cells, *self.others], self.rule)

    @property
    def run(self) -> bool:
        """Whether any cell was run."""
        return any(one.run for one in self.cells)

    @property
    def complete(self) -> bool:
        """Whether all its cells were run."""
        return all(one.run for one in self.cells) and not self.filtered


def variants_of(recipe: Recipe, selection: Selection | None) -> list[TableVariant]:
    """Variants of a table for exploratory seeds, without records: with equal settings for all norms, and chosen ones.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> [one.title for one in variants_of(find_recipe("table2"), find_selection("table2"))]
        ['The same settings for all norms', 'Each norm with the settings chosen on the validation tasks']
    """
    if selection is None and not recipe.selected:
        return [_variant("", recipe)]
    if selection is None:
        return [_variant(ONE_FOR_ALL, replace(recipe, selected=())), _variant(RECIPES_OWN, recipe)]
    title = RECIPES_OWN if recipe.selected else ONE_FOR_ALL
    return [_variant(title, recipe), _variant(CHOSEN, recipe, selection)]


def fresh_variant(recipe: Recipe, selection: Selection | None, rule: StagedRule) -> TableVariant:
    """Variant for fresh seeds: with the settings chosen on validation tasks if there are some, else the recipe's."""
    replaces = CHOSEN if selection is not None else RECIPES_OWN if recipe.selected else ""
    title = ", ".join(filter(None, [FRESH, replaces[:1].lower() + replaces[1:]]))
    return replace(_variant(title, recipe, selection), rule=rule, replaces=replaces)


def _variant(title: str, recipe: Recipe, selection: Selection | None = None) -> TableVariant:
    tuned = recipe if selection is None else with_selection(recipe, selection)
    every = cells_of(tuned)
    cells = [MeasuredCell(cell, {}) for cell in every if selection is None or selection.covers(cell)]
    return TableVariant(title, tuned, cells, unchosen=len(every) - len(cells))
