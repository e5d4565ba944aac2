"""``--only``: filter the cells of a recipe by dimension. It does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from contnorm.errors import UserError, unknown
from contnorm.paper.cells import Cell
from contnorm.paper.recipe import DIMENSIONS

__all__ = ["chosen"]


def chosen(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Filter cells: values of one dimension are alternatives, and all named dimensions must match.

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
            raise UserError(f"--only {text!r}: expected dimension=value, such as norm=cn. There are: {_dimensions()}.")
        if key not in DIMENSIONS:
            raise UserError(f"--only {text!r}: {unknown('dimension', key, DIMENSIONS)}")
        wanted[key].add(value)
    matching = [cell for cell in cells if all(_accepted(cell, key) & values for key, values in wanted.items())]
    if not matching:
        available = {key: sorted(set().union(*(_accepted(cell, key) for cell in cells))) for key in wanted}
        known = "; ".join(f"{key} is one of {', '.join(words)}" for key, words in available.items())
        raise UserError(f"--only {' '.join(only)}: no cell of the recipe is that; {known}.")
    return matching


def _dimensions() -> str:
    return ", ".join(DIMENSIONS)


def _accepted(cell: Cell, key: str) -> set[str]:
    """Accepted texts for the value of a cell in a dimension."""
    value = str(cell.place[key]) if cell.place[key] is not None else "none"
    return {value, cell.norm} if key == "norm" else {value}
