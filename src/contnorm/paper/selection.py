"""Learning rates selected on validation tasks, with the whole grid of candidates.

A selection is stored in a separate file, so that a recipe can be shown both with one learning rate for all cells and
with a selected one for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from contnorm.bench.config.schema import parse_toml, read_toml_text
from contnorm.bench.grid import LEARNING_RATES, best_candidate
from contnorm.bench.records import spread_over_seeds
from contnorm.errors import UserError
from contnorm.paper.cells import RecipeCell, matches
from contnorm.paper.recipe import DIMENSIONS, Recipe, SelectedSettings, check_keys

__all__ = [
    "RATES",
    "RateResult",
    "SelectedRate",
    "Selection",
    "best_rate",
    "covers",
    "find_selection",
    "merge_selections",
    "parse_selection",
    "read_selection",
    "selection_text",
    "with_selection",
]

RATES = LEARNING_RATES
SELECTED_KEYS = ("where", "lr", "precision", "grid")
RATE_KEYS = ("lr", "mean", "sd", "seeds", "lost")  # in files, diverged seeds have the key `lost`


@dataclass(frozen=True)
class RateResult:
    """One learning rate of a grid.

    Attributes:
        lr: The learning rate.
        mean, sd: ACC on the validation tasks over the finished seeds; NaN if there is none.
        seeds: Number of finished seeds.
        diverged: Number of diverged seeds.
    """

    lr: float
    mean: float
    sd: float
    seeds: int
    diverged: int = 0

    @property
    def eligible(self) -> bool:
        """Whether it can be chosen: some seed finished, and none diverged."""
        return self.seeds > 0 and not self.diverged

    @classmethod
    def of(cls, lr: float, accuracies: Sequence[float], diverged: int) -> RateResult:
        """Build from the validation ACC of each finished seed.

        Example:
            >>> RateResult.of(0.1, [60.0, 62.0], diverged=1)
            RateResult(lr=0.1, mean=61.0, sd=1.4142135623730951, seeds=2, diverged=1)
        """
        mean, sd = spread_over_seeds(list(accuracies)) if accuracies else (math.nan, math.nan)
        return cls(lr, mean, sd, len(accuracies), diverged)


@dataclass(frozen=True)
class SelectedRate:
    """Selected learning rate of some cells, and the grid of candidates."""

    where: Mapping[str, Any]
    lr: float
    precision: str
    grid: tuple[RateResult, ...]


@dataclass(frozen=True)
class Selection:
    """Selected learning rates of a recipe, and the file they come from."""

    recipe: str
    rates: tuple[SelectedRate, ...] = ()
    path: str = ""


def best_rate(grid: Sequence[RateResult]) -> RateResult | None:
    """Learning rate with the highest mean; the smallest one on ties. None if a seed diverged at every rate.

    A learning rate with a diverged seed is excluded, since it would diverge in the table too.

    Example:
        >>> grid = [RateResult(0.1, 61.0, 1.0, 3), RateResult(0.03, 61.0, 2.0, 3)]
        >>> grid.append(RateResult(0.3, 70.0, 1.0, 2, diverged=1))
        >>> best_rate(grid).lr
        0.03
    """
    return best_candidate(grid, order=lambda result: result.lr)


def with_selection(recipe: Recipe, selection: Selection) -> Recipe:
    """Recipe with the selected learning rate for each covered cell."""
    settings = tuple(SelectedSettings(rate.where, {"train": {"lr": rate.lr}}) for rate in selection.rates)
    return replace(recipe, selected=(*recipe.selected, *settings))


def covers(selection: Selection, cell: RecipeCell) -> bool:
    """Whether a learning rate was selected for a cell."""
    return any(matches(cell.place, rate.where) for rate in selection.rates)


def merge_selections(old: Selection, new: Selection) -> Selection:
    """Merge two selections; entries of ``new`` replace those of ``old`` for the same cells.

    Example:
        >>> bn, cn = (SelectedRate({"norm": norm}, 0.1, "fp32", ()) for norm in ("bn", "cn"))
        >>> new = Selection("x", (SelectedRate({"norm": "cn"}, 0.3, "fp32", ()),))
        >>> [(rate.where["norm"], rate.lr) for rate in merge_selections(Selection("x", (bn, cn)), new).rates]
        [('bn', 0.1), ('cn', 0.3)]
    """
    unchanged = [rate for rate in old.rates if not any(rate.where == other.where for other in new.rates)]
    return replace(new, rates=(*unchanged, *new.rates))


def find_selection(recipe: str, places: Sequence[Path] = (), *, refined: bool = False) -> Selection | None:
    """Selection from the first existing path, else that of the package; None if there is none.

    Args:
        recipe: Name of the recipe.
        places: Paths to try first.
        refined: Whether to prefer the package's selection from an extended and refined grid, which fresh seeds use.
            Tables of exploratory seeds were made with the coarse grid.

    Example:
        >>> [find_selection("table2", refined=refined).rates[1].lr for refined in (False, True)]
        [0.003, 0.005]
    """
    for path in places:
        if path.is_file():
            return read_selection(path, recipe)
    selected = resources.files("contnorm.paper").joinpath("selected")
    files = [selected.joinpath("refined", f"{recipe}.toml")] if refined else []
    for file in [*files, selected.joinpath(f"{recipe}.toml")]:
        if file.is_file():
            return parse_selection(file.read_text(encoding="utf-8"), recipe, str(file))
    return None


def read_selection(path: Path, recipe: str) -> Selection:
    text = read_toml_text(path, "`contnorm tune` writes such a file.")
    return parse_selection(text, recipe, str(path))


def parse_selection(text: str, recipe: str, where: str) -> Selection:
    """Parse a selection; error messages begin with ``where``."""
    values = parse_toml(text, where)
    keys = ("recipe", "selected")
    check_keys(values, keys, where, needed=keys)
    if values["recipe"] != recipe:
        raise UserError(f"{where}: is the selection of {values['recipe']!r}, not of {recipe!r}. Use another file.")
    rows = values["selected"]
    if not isinstance(rows, list):
        raise UserError(f"{where}: selected={rows!r} must be a list of tables.")
    return Selection(recipe, tuple(_parse_rate(row, f"{where}: selected {i}") for i, row in enumerate(rows, 1)), where)


def _parse_rate(row: Any, where: str) -> SelectedRate:
    check_keys(_table(row, where), SELECTED_KEYS, where, needed=SELECTED_KEYS)
    check_keys(_table(row["where"], f"{where}: where"), DIMENSIONS, f"{where}: where")
    lr = _number(row["lr"], f"{where}: lr")
    if not isinstance(row["grid"], list):
        raise UserError(f"{where}: grid={row['grid']!r} must be a list of tables.")
    grid = tuple(_parse_result(result, f"{where}: grid {i}") for i, result in enumerate(row["grid"], 1))
    rates = [result.lr for result in grid]
    if lr not in rates:
        raise UserError(f"{where}: lr={lr} is not in its grid of {', '.join(map(str, rates))}.")
    return SelectedRate(row["where"], lr, str(row["precision"]), grid)


def _parse_result(row: Any, where: str) -> RateResult:
    check_keys(_table(row, where), RATE_KEYS, where, needed=RATE_KEYS)
    lr, mean, sd, seeds, diverged = (_number(row[key], f"{where}: {key}") for key in RATE_KEYS)
    if not (math.isfinite(seeds) and math.isfinite(diverged)):
        raise UserError(f"{where}: seeds={seeds} and lost={diverged} must be whole numbers.")
    return RateResult(lr, mean, sd, int(seeds), int(diverged))


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: {value!r} must be a table.")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{where}: {value!r} must be a number.")
    return float(value)


def selection_text(selection: Selection) -> str:
    """TOML text of a selection.

    Example:
        >>> grid = (RateResult(0.03, 61.0, 1.5, 3), RateResult(0.1, float("nan"), float("nan"), 0, diverged=3))
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
    lines += [] if selection.rates else ["selected = []"]
    for rate in selection.rates:
        lines += ["", "[[selected]]", f"where = {_inline(rate.where)}", f"lr = {_toml(rate.lr)}"]
        lines += [f"precision = {_toml(rate.precision)}", "grid = ["]
        lines += [f"    {_inline(_result_values(result))}," for result in rate.grid]
        lines.append("]")
    return "\n".join(lines) + "\n"


def _result_values(result: RateResult) -> dict[str, float]:
    values = (result.lr, result.mean, result.sd, result.seeds, result.diverged)
    return dict(zip(RATE_KEYS, values, strict=True))


def _inline(values: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {_toml(value)}" for key, value in values.items()) + " }"


def _toml(value: Any) -> str:
    """TOML text of a name or a number; JSON escapes are sufficient for the names used here."""
    if isinstance(value, float):
        return repr(float(f"{value:.8g}"))
    return json.dumps(value, ensure_ascii=False)
