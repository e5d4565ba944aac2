"""``--only``: some of a recipe's cells, by what they are. Needs no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from contnorm.errors import UserError, unknown
from contnorm.paper.cells import Cell
from contnorm.paper.recipe import DIMENSIONS

__all__ = ["chosen"]


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that are as typed: any of the values of one dimension, in all the dimensions named.

    Example:
        >>> from contnorm.paper.cells import cells_of
        >>> from contnorm.paper.recipe_file import find_recipe
        >>> [c.norm for c in chosen(cells_of(find_recipe("table3")), ["norm=cn", "norm=bn", "layers=stock"])]
        ['bn stock', 'cn32 stock']
    """
    wanted: dict[str, set[str]] = defaultdict(set)
    for text in only:
        key, equals, value = text.partition("=")
        if not equals or not value:
            raise UserError(f"--only {text!r}: expected dimension=value, such as norm=cn. There are: {_all()}.")
        if key not in DIMENSIONS:
            raise UserError(f"--only {text!r}: {unknown('dimension', key, DIMENSIONS)}")
        wanted[key].add(value)
    found = [cell for cell in cells if all(_words(cell, key) & values for key, values in wanted.items())]
    if not found:
        there = {key: sorted(set().union(*(_words(cell, key) for cell in cells))) for key in wanted}
        known = "; ".join(f"{key} is one of {', '.join(words)}" for key, words in there.items())
        raise UserError(f"--only {' '.join(only)}: no cell of the recipe is that; {known}.")
    return found


def _all() -> str:
    return ", ".join(DIMENSIONS)


def _words(cell: Cell, key: str) -> set[str]:
    """What may be typed for a cell's place in a dimension."""
    own = str(cell.place[key]) if cell.place[key] is not None else "none"
    return {own, cell.norm} if key == "norm" else {own}
