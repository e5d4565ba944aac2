"""Cells of a recipe, one for each run of its grids and each view of that run, and the ``--only`` filter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from contnorm.bench.config.defaults import apply_defaults, frozen_label
from contnorm.bench.config.schema import from_dict, merge_settings
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError, unknown
from contnorm.paper.published import PublishedNumber, find
from contnorm.paper.recipe import DIMENSIONS, VIEWS, Recipe, RecipeNorm, RunGrid, View
from contnorm.registry import find_norm, numbered_name

__all__ = [
    "SHARED_DIMENSIONS",
    "RecipeCell",
    "cells_of",
    "comparable",
    "filter_cells",
    "matches",
    "moments_label",
    "source_of",
    "unmatched_entries",
    "unpaired_claims",
]

NORM_DIMENSIONS = ("norm", "groups", "momentum", "schedule", "freeze_after")
# Dimensions that a grid may list, with the setting that each is.
GIVEN_SETTINGS = {
    "buffer": ("memory", "size"),
    "forward": ("strategy", "forward"),
    "batch": ("train", "batch"),
    "replay": ("train", "replay"),
}
# Dimensions in which two cells are equal that are compared: all but those of the norm.
SHARED_DIMENSIONS = tuple(key for key in DIMENSIONS if key not in NORM_DIMENSIONS)


@dataclass(frozen=True, eq=False)
class RecipeCell:
    """One row of a recipe's table: a run, and one view of its record.

    Attributes:
        place: Its coordinates by dimension; None if a dimension does not apply.
        values: Nested settings of its run.
        view: Which matrix of the record is shown.
        published: The paper's numbers by metric; empty if it has none.
    """

    place: Mapping[str, Any]
    values: Mapping[str, Any]
    view: View
    published: Mapping[str, PublishedNumber] = field(default_factory=dict)

    @property
    def norm(self) -> str:
        """Label of the norm in tables.

        Example:
            >>> from contnorm.paper.recipe import find_recipe
            >>> [cell.norm for cell in cells_of(find_recipe("table9"))][:4]
            ['bn', 'bn*', 'gn32', 'cn32']
        """
        moments = moments_label(self.place["moments"], self.place["weights"] or "plain")
        extra = [f" {self.place[key]}" for key in ("momentum", "schedule", "layers") if self.place[key] is not None]
        extra += [frozen_label(self.place["freeze_after"])]
        name, groups = self.place["norm"], self.place["groups"]
        norm = numbered_name(find_norm(name)[0], groups) if groups else name
        star, other = (moments, "") if moments == "*" else ("", moments)
        return f"{norm}{star}{''.join(extra)}{other}"

    @property
    def label(self) -> str:
        """Full description of the cell.

        Example:
            >>> from contnorm.paper.recipe import find_recipe
            >>> cells_of(find_recipe("table4"))[0].label
            'split-cifar10 derpp buffer 500 class-incremental bn'
        """
        place = self.place
        keys = ("buffer", "forward", "batch", "replay", "tasks")
        more = [f"{key} {place[key]}" for key in keys if place[key] is not None]
        more += [f"{place['setting']}-incremental"] if place["setting"] else []
        more += [place["labels"]] if place["labels"] else []
        return " ".join([place["stream"], place["strategy"], *more, self.norm])


def moments_label(moments: str, weights: str = "plain") -> str:
    """Part of a norm's label for the moments that it is evaluated with.

    Example:
        >>> moments_label("running"), moments_label("oracle"), moments_label("memory", "task"), moments_label("task")
        ('', '*', ' memory (task weights)', ' task-wise')
    """
    label = {"running": "", "oracle": "*", "memory": " memory", "task": " task-wise"}[moments]
    return f"{label} ({weights} weights)" if moments == "memory" and weights != "plain" else label


def cells_of(recipe: Recipe) -> list[RecipeCell]:
    """All cells of a recipe, in file order."""
    return [cell for grid in recipe.runs for cell in _cells(recipe, grid)]


def unmatched_entries(recipe: Recipe) -> list[str]:
    """Published numbers, selections and claims of a recipe that match none of its cells.

    These are mistakes in the recipe that would otherwise be ignored silently.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> unmatched_entries(find_recipe("table2"))
        []
    """
    cells = cells_of(recipe)
    selected = [(f"[[selected]] where = {_toml_text(one.where)}", one.where) for one in recipe.selected]
    claims = [
        (f"[[claims]] {claim.says!r}: {_toml_text(wanted)}", wanted)
        for claim in recipe.claims
        for wanted in (claim.cells, *claim.than)
    ]
    unmatched = [text for text, wanted in selected + claims if not any(matches(cell.place, wanted) for cell in cells)]
    used = {id(number) for cell in cells for number in cell.published.values()}
    rows = dict.fromkeys(_row(number) for number in recipe.numbers if id(number) not in used)
    return [*(f"[[published]] {row}" for row in rows), *unmatched]


def unpaired_claims(recipe: Recipe) -> list[str]:
    """Claims of a recipe none of whose cells has a cell to compare with; runs could never decide them.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> unpaired_claims(find_recipe("table2"))
        []
    """
    cells = cells_of(recipe)
    unpaired = []
    for claim in recipe.claims:
        own = [cell for cell in cells if matches(cell.place, claim.cells)]
        for other in claim.than:
            if not any(comparable(cell, partner, other) for cell in own for partner in cells):
                unpaired.append(f"[[claims]] {claim.says!r}: than = {_toml_text(other)}")
    return unpaired


def _toml_text(wanted: Mapping[str, Any]) -> str:
    return f"{{ {', '.join(f'{key} = {value!r}' for key, value in wanted.items())} }}"


def _row(number: PublishedNumber) -> str:
    """Description of a row of published numbers."""
    of = (number.dataset, number.strategy, number.norm, number.groups, number.buffer, number.setting, number.moments)
    return " ".join(str(value) for value in of if value is not None)


def matches(place: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a place has the wanted value, or one of several, in all named dimensions.

    ``"own"`` means the default of the norm (None).

    Example:
        >>> matches({"norm": "cn", "groups": 8}, {"norm": "cn"}), matches({"norm": "cn", "groups": 8}, {"groups": 32})
        (True, False)
        >>> matches({"norm": "cn", "groups": 8}, {"norm": ["bn", "cn"]})
        True
    """
    options = {key: value if isinstance(value, list) else [value] for key, value in wanted.items()}
    return all(place[key] in [None if one == "own" else one for one in values] for key, values in options.items())


def comparable(cell: RecipeCell, partner: RecipeCell, than: Mapping[str, Any]) -> bool:
    """Whether a claim compares a cell with ``partner``.

    The partner matches the selector ``than`` and equals the cell in all dimensions that the selector does not name; if
    the selector names another norm, the dimensions of the norm may differ.
    """
    dimensions = SHARED_DIMENSIONS if "norm" in than else (*SHARED_DIMENSIONS, *NORM_DIMENSIONS)
    shared = [key for key in dimensions if key not in than]
    same = all(cell.place[key] == partner.place[key] for key in shared)
    return same and partner is not cell and matches(partner.place, than)


def _cells(recipe: Recipe, grid: RunGrid) -> Iterator[RecipeCell]:
    sizes = product(grid.buffers, grid.forwards, grid.batches, grid.replays)
    runs = product(grid.streams, grid.strategies, list(sizes), grid.norms, grid.views)
    for stream, strategy, (buffer, forward, batch, replay), norm, view_name in runs:
        view = VIEWS[view_name]
        given = {"buffer": buffer, "forward": forward, "batch": batch, "replay": replay}
        place = _place(recipe, grid, stream, strategy, given, norm, view)
        values = _values(recipe, grid, place, norm)
        yield RecipeCell(place, values, view, _published(recipe, place) if grid.published and not recipe.ours else {})


def _place(
    recipe: Recipe, grid: RunGrid, stream: str, strategy: str, given: dict[str, Any], norm: RecipeNorm, view: View
) -> dict[str, Any]:
    """Place of a cell; ``given`` has the dimensions that the grid lists as they are."""
    spec, groups = find_norm(norm.name)
    settings = merge_settings(recipe.settings, grid.settings)
    evaluate = settings.get("evaluate", {})
    place = {
        "stream": stream,
        "strategy": strategy,
        "norm": spec.name,
        "groups": (groups or norm.settings.get("groups")) if spec.grouped else None,
        "momentum": norm.settings.get("momentum"),
        "schedule": norm.settings.get("schedule"),
        "freeze_after": norm.settings.get("freeze_after"),
        "layers": norm.settings.get("layers"),
        **given,
        "tasks": settings.get("stream", {}).get("tasks"),
        "moments": view.moments or evaluate.get("moments", "running"),
        "weights": evaluate.get("weights"),
        "setting": view.setting,
        "labels": view.labels,
    }
    assert tuple(place) == DIMENSIONS
    return place


def _values(recipe: Recipe, grid: RunGrid, place: Mapping[str, Any], norm: RecipeNorm) -> dict[str, Any]:
    values = merge_settings(recipe.settings, grid.settings)
    cell_values: dict[str, Any] = {
        "stream": {"name": place["stream"]},
        "strategy": {"name": place["strategy"]},
        "norm": {"name": norm.name, **norm.settings},
    }
    values = merge_settings(values, cell_values)
    for key, (group, setting) in GIVEN_SETTINGS.items():
        if place[key] is not None:
            values = merge_settings(values, {group: {setting: place[key]}})
    for selected in recipe.selected:
        if matches(place, selected.where):
            values = merge_settings(values, selected.settings)
    from_dict(values, recipe.name)
    try:
        apply_defaults(values)  # rejects settings that the strategy, the memory or the norm does not have
    except UserError as error:
        raise UserError(f"{recipe.name}: {error}") from None
    return values


def _published(recipe: Recipe, place: Mapping[str, Any]) -> dict[str, PublishedNumber]:
    """Published numbers of a place; a dimension that is None on either side matches any value."""
    fixed = {name: place[name] for name in ("strategy", "norm", "momentum", "moments")}
    candidates = recipe.numbers or tuple(find(table=recipe.table))
    numbers = {}
    for number in candidates:
        same = number.dataset == place["stream"] and number.split == place["labels"]
        same = same and all(getattr(number, name) == value for name, value in fixed.items())
        if same and all(_fits(getattr(number, name), place[name]) for name in ("groups", "buffer", "setting")):
            numbers[number.metric] = number
    return numbers


def _fits(published: Any, value: Any) -> bool:
    return published is None or value is None or published == value


def source_of(cell: RecipeCell) -> str:
    """Data set of a recipe's cell: that of the recipe's settings, else the first data set of its stream.

    Example:
        >>> from contnorm.paper.cells import cells_of
        >>> from contnorm.paper.recipe import find_recipe
        >>> source_of(cells_of(find_recipe("table2"))[0])
        'cifar100'
    """
    source, defaults = cell.values["stream"].get("source"), find_stream(cell.place["stream"]).sources
    if not source and not defaults:
        name = cell.place["stream"]
        raise UserError(f"stream {name}: no data set is set. Add settings = {{ stream = {{ source = NAME }} }}.")
    return str(source or defaults[0])


def filter_cells(cells: Sequence[RecipeCell], only: Sequence[str]) -> list[RecipeCell]:
    """Filter cells: values of one dimension are alternatives, and all named dimensions must match.

    Example:
        >>> from contnorm.paper.cells import cells_of
        >>> from contnorm.paper.recipe import find_recipe
        >>> [c.norm for c in filter_cells(cells_of(find_recipe("table3")), ["norm=cn", "norm=bn", "layers=stock"])]
        ['bn stock', 'cn32 stock']
    """
    wanted: dict[str, set[str]] = defaultdict(set)
    for text in only:
        key, equals, value = text.partition("=")
        if not equals or not value:
            names = ", ".join(DIMENSIONS)
            raise UserError(f"--only {text!r}: expected dimension=value, such as norm=cn. Dimensions: {names}.")
        if key not in DIMENSIONS:
            raise UserError(f"--only {text!r}: {unknown('dimension', key, DIMENSIONS)}")
        wanted[key].add(value)
    matching = [cell for cell in cells if all(_accepted(cell, key) & values for key, values in wanted.items())]
    if not matching:
        available = {key: sorted(set().union(*(_accepted(cell, key) for cell in cells))) for key in wanted}
        known = "; ".join(f"{key} is one of {', '.join(values)}" for key, values in available.items())
        raise UserError(f"--only {' '.join(only)}: matches no cell of the recipe. In it, {known}.")
    return matching


def _accepted(cell: RecipeCell, key: str) -> set[str]:
    """Accepted texts for the value of a cell in a dimension."""
    value = str(cell.place[key]) if cell.place[key] is not None else "none"
    return {value, cell.norm} if key == "norm" else {value}
