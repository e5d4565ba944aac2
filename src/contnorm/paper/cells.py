"""Cells of a recipe: one for each run of its grids and each view of that run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from contnorm.bench.config.schema import from_dict, merge_settings
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError
from contnorm.paper.published import Published, find
from contnorm.paper.recipe import DIMENSIONS, VIEWS, Block, NormEntry, Recipe, View
from contnorm.registry import find_norm

__all__ = ["Cell", "cells_of", "matches", "source_of", "unreached"]


@dataclass(frozen=True, eq=False)
class Cell:
    """One row of a table.

    Attributes:
        place: Its coordinates by dimension; None if a dimension does not apply.
        values: Nested settings of its run.
        view: Which matrix of the record is shown.
        published: The paper's numbers by metric; empty if it has none.
    """

    place: Mapping[str, Any]
    values: Mapping[str, Any]
    view: View
    published: Mapping[str, Published] = field(default_factory=dict)

    @property
    def norm(self) -> str:
        """Label of the norm in tables.

        Example:
            >>> from contnorm.paper.recipe_file import find_recipe
            >>> [cell.norm for cell in cells_of(find_recipe("table9"))][:4]
            ['bn', 'bn*', 'gn32', 'cn32']
        """
        star = "*" if self.place["moments"] == "oracle" else ""
        extra = [f" {self.place[key]}" for key in ("momentum", "schedule", "layers") if self.place[key] is not None]
        return f"{self.place['norm']}{self.place['groups'] or ''}{star}{''.join(extra)}"

    @property
    def words(self) -> str:
        """Full description of the cell.

        Example:
            >>> from contnorm.paper.recipe_file import find_recipe
            >>> cells_of(find_recipe("table4"))[0].words
            'split-cifar10 derpp buffer 500 class-incremental bn'
        """
        place = self.place
        more = [f"{key} {place[key]}" for key in ("buffer", "tasks") if place[key] is not None]
        more += [f"{place['setting']}-incremental"] if place["setting"] else []
        more += [place["labels"]] if place["labels"] else []
        return " ".join([place["stream"], place["strategy"], *more, self.norm])


def cells_of(recipe: Recipe) -> list[Cell]:
    """All cells of a recipe, in file order."""
    return [cell for block in recipe.runs for cell in _cells(recipe, block)]


def unreached(recipe: Recipe) -> list[str]:
    """Published numbers, selections and claims of a recipe that match none of its cells.

    These are mistakes in the recipe that would otherwise be ignored silently.

    Example:
        >>> from contnorm.paper.recipe_file import find_recipe
        >>> unreached(find_recipe("table2"))
        []
    """
    cells = cells_of(recipe)
    chosen = [(f"[[selected]] where = {_typed(selected.where)}", selected.where) for selected in recipe.selected]
    claimed = [
        (f"[[claims]] {claim.says!r}: {_typed(wanted)}", wanted)
        for claim in recipe.claims
        for wanted in (claim.cells, *claim.than)
    ]
    unmatched = [what for what, wanted in chosen + claimed if not any(matches(cell.place, wanted) for cell in cells)]
    reached = {id(number) for cell in cells for number in cell.published.values()}
    rows = {_row(number): None for number in recipe.numbers if id(number) not in reached}
    return [*(f"[[published]] {row}" for row in rows), *unmatched]


def _typed(wanted: Mapping[str, Any]) -> str:
    return f"{{ {', '.join(f'{key} = {value!r}' for key, value in wanted.items())} }}"


def _row(number: Published) -> str:
    """Description of a row of published numbers."""
    of = (number.dataset, number.strategy, number.norm, number.groups, number.buffer, number.setting, number.moments)
    return " ".join(str(value) for value in of if value is not None)


def matches(place: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a place has the wanted value in all named dimensions; ``"own"`` means the default of the norm (None).

    Example:
        >>> matches({"norm": "cn", "groups": 8}, {"norm": "cn"}), matches({"norm": "cn", "groups": 8}, {"groups": 32})
        (True, False)
    """
    return all(place[key] == (None if value == "own" else value) for key, value in wanted.items())


def _cells(recipe: Recipe, block: Block) -> Iterator[Cell]:
    grid = product(block.streams, block.strategies, block.buffers, block.norms, block.views)
    for stream, strategy, buffer, norm, view_name in grid:
        view = VIEWS[view_name]
        place = _place(recipe, block, stream, strategy, buffer, norm, view)
        values = _values(recipe, block, place, norm)
        yield Cell(place, values, view, _published(recipe, place) if block.published else {})


def _place(
    recipe: Recipe, block: Block, stream: str, strategy: str, buffer: int | None, norm: NormEntry, view: View
) -> dict[str, Any]:
    spec, groups = find_norm(norm.name)
    stream_settings = merge_settings(recipe.settings, block.settings).get("stream", {})
    place = {
        "stream": stream,
        "strategy": strategy,
        "norm": spec.name,
        "groups": (groups or norm.settings.get("groups")) if spec.grouped else None,
        "momentum": norm.settings.get("momentum"),
        "schedule": norm.settings.get("schedule"),
        "layers": norm.settings.get("layers"),
        "buffer": buffer,
        "tasks": stream_settings.get("tasks"),
        "moments": view.moments,
        "setting": view.setting,
        "labels": view.labels,
    }
    assert tuple(place) == DIMENSIONS
    return place


def _values(recipe: Recipe, block: Block, place: Mapping[str, Any], norm: NormEntry) -> dict[str, Any]:
    values = merge_settings(recipe.settings, block.settings)
    cell_values: dict[str, Any] = {
        "stream": {"name": place["stream"]},
        "strategy": {"name": place["strategy"]},
        "norm": {"name": norm.name, **norm.settings},
    }
    if place["buffer"] is not None:
        cell_values["memory"] = {"size": place["buffer"]}
    values = merge_settings(values, cell_values)
    for chosen in recipe.selected:
        if matches(place, chosen.where):
            values = merge_settings(values, chosen.settings)
    from_dict(values, recipe.name)
    return values


def _published(recipe: Recipe, place: Mapping[str, Any]) -> dict[str, Published]:
    """Published numbers of a place; a dimension that is None on either side matches any value."""
    fixed = {name: place[name] for name in ("strategy", "norm", "momentum", "moments")}
    candidates = recipe.numbers or tuple(find(table=recipe.table))
    numbers = {}
    for number in candidates:
        same = number.dataset == place["stream"] and all(
            getattr(number, name) == value for name, value in fixed.items()
        )
        same = same and number.split == place["labels"]
        if same and all(_fits(getattr(number, name), place[name]) for name in ("groups", "buffer", "setting")):
            numbers[number.metric] = number
    return numbers


def _fits(published: Any, value: Any) -> bool:
    return published is None or value is None or published == value


def source_of(cell: Cell) -> str:
    """Data set of a recipe's cell: that of the recipe's settings, else the first data set of its stream.

    Example:
        >>> from contnorm.paper.cells import cells_of
        >>> from contnorm.paper.recipe_file import find_recipe
        >>> source_of(cells_of(find_recipe("table2"))[0])
        'cifar100'
    """
    source, defaults = cell.values["stream"].get("source"), find_stream(cell.place["stream"]).sources
    if not source and not defaults:
        name = cell.place["stream"]
        raise UserError(f"stream {name}: say which data set, with settings = {{ stream = {{ source = NAME }} }}.")
    return str(source or defaults[0])
