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

from contnorm.bench.config.sources import parse_toml, read_toml_text
from contnorm.bench.records import spread_over_seeds
from contnorm.errors import UserError, unknown
from contnorm.paper.cells import Cell, matches
from contnorm.paper.recipe import DIMENSIONS, Recipe, Selected

__all__ = [
    "RATES",
    "Chosen",
    "Selection",
    "Tried",
    "covers",
    "find_selection",
    "merged",
    "parse_selection",
    "read_selection",
    "selection_text",
    "winner",
    "with_selection",
]

RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
CHOSEN = ("where", "lr", "precision", "grid")
TRIED = ("lr", "mean", "sd", "seeds", "lost")


@dataclass(frozen=True)
class Tried:
    """One learning rate of a grid.

    Attributes:
        lr: The learning rate.
        mean, sd: ACC on the validation tasks over the finished seeds; NaN if there is none.
        seeds: Number of finished seeds.
        lost: Number of diverged seeds.
    """

    lr: float
    mean: float
    sd: float
    seeds: int
    lost: int = 0

    @classmethod
    def of(cls, lr: float, accuracies: Sequence[float], lost: int) -> Tried:
        """Build from the validation ACC of each finished seed.

        Example:
            >>> Tried.of(0.1, [60.0, 62.0], lost=1)
            Tried(lr=0.1, mean=61.0, sd=1.4142135623730951, seeds=2, lost=1)
        """
        mean, sd = spread_over_seeds(list(accuracies)) if accuracies else (math.nan, math.nan)
        return cls(lr, mean, sd, len(accuracies), lost)


@dataclass(frozen=True)
class Chosen:
    """Selected learning rate of some cells, and the grid of candidates."""

    where: Mapping[str, Any]
    lr: float
    precision: str
    grid: tuple[Tried, ...]


@dataclass(frozen=True)
class Selection:
    """Selected learning rates of a recipe, and the file they come from."""

    recipe: str
    chosen: tuple[Chosen, ...] = ()
    path: str = ""


def winner(grid: Sequence[Tried]) -> Tried | None:
    """Learning rate with the highest mean; the smallest one on ties. None if a seed diverged at every rate.

    A learning rate with a diverged seed is excluded, since it would diverge in the table too.

    Example:
        >>> grid = [Tried(0.1, 61.0, 1.0, 3), Tried(0.03, 61.0, 2.0, 3), Tried(0.3, 70.0, 1.0, 2, lost=1)]
        >>> winner(grid).lr
        0.03
    """
    candidates = [tried for tried in grid if tried.seeds and not tried.lost]
    return min(candidates, key=lambda tried: (-tried.mean, tried.lr), default=None)


def with_selection(recipe: Recipe, selection: Selection) -> Recipe:
    """Recipe with the selected learning rate for each covered cell."""
    selected_rates = tuple(Selected(chosen.where, {"train": {"lr": chosen.lr}}) for chosen in selection.chosen)
    return replace(recipe, selected=(*recipe.selected, *selected_rates))


def covers(selection: Selection, cell: Cell) -> bool:
    """Whether a learning rate was selected for a cell."""
    return any(matches(cell.place, chosen.where) for chosen in selection.chosen)


def merged(old: Selection, new: Selection) -> Selection:
    """Merge two selections; entries of ``new`` replace those of ``old`` for the same cells.

    Example:
        >>> old = Selection("x", (Chosen({"norm": "bn"}, 0.1, "fp32", ()), Chosen({"norm": "cn"}, 0.1, "fp32", ())))
        >>> new = Selection("x", (Chosen({"norm": "cn"}, 0.3, "fp32", ()),))
        >>> [(one.where["norm"], one.lr) for one in merged(old, new).chosen]
        [('bn', 0.1), ('cn', 0.3)]
    """
    unchanged = [entry for entry in old.chosen if not any(entry.where == other.where for other in new.chosen)]
    return replace(new, chosen=(*unchanged, *new.chosen))


def find_selection(recipe: str, places: Sequence[Path] = ()) -> Selection | None:
    """Selection from the first existing path, else that of the package; None if there is none."""
    for path in places:
        if path.is_file():
            return read_selection(path, recipe)
    file = resources.files("contnorm.paper").joinpath("selected", f"{recipe}.toml")
    return parse_selection(file.read_text(encoding="utf-8"), recipe, str(file)) if file.is_file() else None


def read_selection(path: Path, recipe: str) -> Selection:
    text = read_toml_text(path, "`contnorm tune` writes such a file.")
    return parse_selection(text, recipe, str(path))


def parse_selection(text: str, recipe: str, where: str) -> Selection:
    """Parse a selection; error messages begin with ``where``."""
    values = parse_toml(text, where)
    _check_keys(values, ("recipe", "selected"), where)
    if values["recipe"] != recipe:
        raise UserError(f"{where}: is the selection of {values['recipe']!r}, and {recipe!r} was asked for.")
    rows = values["selected"]
    if not isinstance(rows, list):
        raise UserError(f"{where}: selected={rows!r} must be a list of tables.")
    return Selection(recipe, tuple(_chosen(row, f"{where}: selected {i}") for i, row in enumerate(rows, 1)), where)


def _chosen(row: Any, where: str) -> Chosen:
    _check_keys(row, CHOSEN, where)
    for key in _table(row["where"], f"{where}: where"):
        if key not in DIMENSIONS:
            raise UserError(f"{where}: where: {unknown('key', key, DIMENSIONS)}")
    lr = _number(row["lr"], f"{where}: lr")
    if not isinstance(row["grid"], list):
        raise UserError(f"{where}: grid={row['grid']!r} must be a list of tables.")
    grid = tuple(_tried(tried, f"{where}: grid {i}") for i, tried in enumerate(row["grid"], 1))
    if lr not in [tried.lr for tried in grid]:
        raise UserError(f"{where}: lr={lr} is not in its grid of {', '.join(str(tried.lr) for tried in grid)}.")
    return Chosen(row["where"], lr, str(row["precision"]), grid)


def _tried(row: Any, where: str) -> Tried:
    _check_keys(row, TRIED, where)
    lr, mean, sd, seeds, diverged = (_number(row[key], f"{where}: {key}") for key in TRIED)
    if not (math.isfinite(seeds) and math.isfinite(diverged)):
        raise UserError(f"{where}: seeds={seeds} and lost={diverged} must be whole numbers.")
    return Tried(lr, mean, sd, int(seeds), int(diverged))


def _check_keys(values: Any, known: Sequence[str], where: str) -> None:
    for key in _table(values, where):
        if key not in known:
            raise UserError(f"{where}: {unknown('key', key, known)}")
    for key in known:
        if key not in values:
            raise UserError(f"{where}: the key {key!r} is missing. There are: {', '.join(known)}.")


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
        >>> grid = (Tried(0.03, 61.0, 1.5, 3), Tried(0.1, float("nan"), float("nan"), 0, lost=3))
        >>> print(selection_text(Selection("x", (Chosen({"norm": "cn", "groups": 32}, 0.03, "fp32", grid),))))
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
    lines += [] if selection.chosen else ["selected = []"]
    for chosen in selection.chosen:
        lines += ["", "[[selected]]", f"where = {_inline(chosen.where)}", f"lr = {_toml(chosen.lr)}"]
        lines += [f"precision = {_toml(chosen.precision)}", "grid = ["]
        lines += [f"    {_inline({key: getattr(tried, key) for key in TRIED})}," for tried in chosen.grid]
        lines.append("]")
    return "\n".join(lines) + "\n"


def _inline(values: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {_toml(value)}" for key, value in values.items()) + " }"


def _toml(value: Any) -> str:
    """TOML text of a name or a number; JSON escapes are sufficient for the names used here."""
    if isinstance(value, float):
        return repr(float(f"{value:.8g}"))
    return json.dumps(value, ensure_ascii=False)
