"""Recipes: tables and figures of a paper as data, read from TOML files.

A recipe defines runs as grids of streams, strategies, norms and memory sizes, their shared settings, the scores to
compare with published numbers, and the claims of the paper. Every key and name of a file is checked, and errors are
one-line messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast, get_args

from contnorm.bench.components import is_user_code
from contnorm.bench.config.defaults import apply_defaults
from contnorm.bench.config.schema import from_dict, merge_settings, show_value
from contnorm.bench.config.sources import parse_toml, read_toml_text, refuse_code
from contnorm.bench.strategies import STRATEGIES
from contnorm.errors import UserError, unknown
from contnorm.paper.published import RUNS, PublishedNumber, numbers_of_row
from contnorm.paper.scores import check_curve, check_score
from contnorm.registry import find_norm

__all__ = [
    "DIMENSIONS",
    "KINDS",
    "VIEWS",
    "Claim",
    "ClaimKind",
    "Recipe",
    "RecipeNorm",
    "RunGrid",
    "SelectedSettings",
    "View",
    "check_keys",
    "find_recipe",
    "parse_recipe",
    "recipe_names",
]


Kind = Literal["runs", "curves", "data", "drawing", "waiting"]

KINDS: tuple[str, ...] = get_args(Kind)

FORWARDS = ("joint", "separate")

ClaimKind = Literal["above", "near", "under", "flat", "steadier"]

DIMENSIONS = (
    "stream", "strategy", "norm", "groups", "momentum", "schedule", "freeze_after", "layers", "buffer", "forward",
    "batch", "replay", "tasks", "moments", "weights", "setting", "labels",
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """One of the matrices of a record and its meaning.

    Attributes:
        matrix: Its key in the record.
        moments: Moments that the network was evaluated with; None for those of the run's settings.
        setting: ``"task"`` if the task was known in evaluation, ``"class"`` if not; None for the stream's scenario.
        labels: Group of labels, or ``"overall"``; None for single-label data.
    """

    matrix: str
    moments: str | None = None
    setting: str | None = None
    labels: str | None = None


VIEWS: dict[str, View] = {
    "plain": View("matrix"),
    "running": View("matrix_running", moments="running"),
    "oracle": View("matrix", moments="oracle"),
    "class": View("matrix", setting="class"),
    "task": View("matrix_task", setting="task"),
    **{labels: View("labels", labels=labels) for labels in ("overall", "majority", "moderate", "minority")},
}


@dataclass(frozen=True)
class RecipeNorm:
    """A norm of a grid: its name and the settings that differ from the defaults."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunGrid:
    """A grid of runs: every stream with every strategy, norm, memory size, forward pass, batch size and replay size.

    Forward passes, batch sizes and replay sizes that a grid does not list are those of its settings.
    """

    streams: tuple[str, ...]
    strategies: tuple[str, ...]
    norms: tuple[RecipeNorm, ...]
    buffers: tuple[int | None, ...] = (None,)
    forwards: tuple[str | None, ...] = (None,)
    batches: tuple[int | None, ...] = (None,)
    replays: tuple[int | None, ...] = (None,)
    views: tuple[str, ...] = ("plain",)
    published: bool = True  # whether the paper reports these cells
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SelectedSettings:
    """Settings selected for some cells, such as a learning rate: by `contnorm tune` or by hand."""

    where: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper about a table, in a form that runs can test.

    Attributes:
        says: The claim as text.
        kind: ``above``: ``score`` of the cells is above that of the cells ``than``, or above the score ``than_score``
            of the same cells; ``near``: within ``margin`` of it; ``under``: the score is below ``limit``; ``flat``: the
            final score is within ``margin`` of the score after the first task; ``steadier``: its variance over seeds is
            smaller than that of the cells ``than``.
        score: Name of a score; forgetting scores are named by their definition.
        cells: Selects the cells by some of their dimensions.
        than: Selects the cells to compare with; all other dimensions are equal.
        than_score: Score of the same cells to compare with.
        margin: Bound of ``near`` and ``flat``.
        limit: Bound of ``under``.
    """

    says: str
    kind: ClaimKind
    score: str
    cells: Mapping[str, Any] = field(default_factory=dict)
    than: tuple[Mapping[str, Any], ...] = ()
    than_score: str | None = None
    margin: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """A table or figure.

    Attributes:
        name: Name of the file.
        title: One-line title.
        kind: ``runs``: scores and published numbers; ``curves``: scores after each task; ``data``: a summary of data
            sets; ``drawing``: nothing is run; ``waiting``: not available yet, ``note`` gives the reason.
        table: Number of the published table.
        scores: Names of our scores by published metric.
        runs: Grids of runs.
        settings: Settings of every run.
        selected: Settings of some cells, which override all others.
        claims: Claims of the paper.
        numbers: Published numbers in the recipe itself.
        published_runs: Number of runs behind the published standard deviations.
        alone: Whether runs must not run in parallel, as for time measurements.
        note: One-line note for the reader.
        streams: Streams of a ``data`` recipe.
        ours: Whether it is a table of our own, beside the paper's: it has no published numbers, and its claims are
            questions.
    """

    name: str
    title: str
    kind: Kind
    table: str = ""
    scores: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[RunGrid, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    selected: tuple[SelectedSettings, ...] = ()
    claims: tuple[Claim, ...] = ()
    numbers: tuple[PublishedNumber, ...] = ()
    published_runs: int = RUNS
    alone: bool = False
    note: str = ""
    streams: tuple[str, ...] = ()
    ours: bool = False


RUNS_KEYS = (
    "streams", "strategies", "norms", "buffers", "forwards", "batches", "replays", "views", "published", "settings",
)  # fmt: skip

CLAIM_KEYS = ("says", "kind", "score", "cells", "each_norm_but", "than", "than_score", "margin", "limit")

RECIPE_KEYS = (
    "title", "kind", "table", "scores", "runs", "settings", "selected", "claims", "published", "published_runs",
    "alone", "note", "streams", "ours",
)  # fmt: skip

Values = Mapping[str, Any]


def recipe_names() -> list[str]:
    """Names of the recipes of the package: tables of the paper, figures, then tables of our own.

    Example:
        >>> recipe_names()[:2], recipe_names()[-1]
        (['table1', 'table2'], 'panel-forward')
    """
    names = [file.name[:-5] for file in resources.files("contnorm.paper").iterdir() if file.name.endswith(".toml")]

    def sort_key(name: str) -> tuple[int, int, str]:
        match = re.fullmatch(r"(table|figure)(\d+)", name)
        return (("table", "figure").index(match[1]), int(match[2]), name) if match else (2, 0, name)

    return sorted(names, key=sort_key)


def find_recipe(name: str) -> Recipe:
    """Load a recipe by name, or from a user's file.

    Example:
        >>> find_recipe("table2").title
        'Seven norms, task-incremental, with ER and DER++'
    """
    if name.endswith(".toml"):
        path = Path(name)
        return parse_recipe(path.stem, read_toml_text(path, "`contnorm paper` takes a recipe's file."), str(path))
    if name not in recipe_names():
        raise unknown("recipe", name, recipe_names())
    text = resources.files("contnorm.paper").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return parse_recipe(name, text, f"{name}.toml")


def parse_recipe(name: str, text: str, where: str) -> Recipe:
    """Parse a recipe; error messages begin with ``where``."""
    values = parse_toml(text, where)
    check_keys(values, RECIPE_KEYS, where, needed=("title",))
    kind = _one_of(values.get("kind", "runs"), KINDS, f"{where}: kind")
    if kind in ("runs", "curves"):
        check_keys(values, RECIPE_KEYS, where, needed=("scores", "runs"))
    settings = _settings(values.get("settings", {}), f"{where}: settings")
    scores = _scores(values.get("scores", {}), f"{where}: scores", curves=kind == "curves")
    runs = tuple(_run_grid(b, settings, f"{where}: runs {i}") for i, b in _tables(values, "runs", where))
    recipe = Recipe(
        name=name,
        title=_typed(values["title"], str, f"{where}: title"),
        kind=cast(Any, kind),
        table=_typed(values.get("table", ""), str, f"{where}: table"),
        scores=scores,
        runs=runs,
        settings=settings,
        selected=tuple(_selected(s, f"{where}: selected {i}") for i, s in _tables(values, "selected", where)),
        claims=tuple(
            claim for i, c in _tables(values, "claims", where) for claim in _claims(c, runs, f"{where}: claims {i}")
        ),
        numbers=tuple(
            cell
            for i, row in _tables(values, "published", where)
            for cell in _published(row, scores, f"{where}: published {i}")
        ),
        published_runs=_runs(values.get("published_runs", RUNS), f"{where}: published_runs"),
        alone=_typed(values.get("alone", False), bool, f"{where}: alone"),
        note=_typed(values.get("note", ""), str, f"{where}: note"),
        streams=_names(values.get("streams", []), f"{where}: streams"),
        ours=_typed(values.get("ours", False), bool, f"{where}: ours"),
    )
    _check_one_precision(recipe, where)
    return recipe


def _check_one_precision(recipe: Recipe, where: str) -> None:
    """Reject a recipe whose runs differ in precision: a table has one, and ``--precision`` selects it."""
    for key in ("precision", "deterministic"):
        for i, selected in enumerate(recipe.selected, 1):
            if key in selected.settings.get("train", {}):
                raise UserError(
                    f"{where}: selected {i}: sets train.{key}. Set it for the whole table, under [settings]."
                )
        trains = [from_dict(merge_settings(recipe.settings, grid.settings)).train for grid in recipe.runs]
        values = list(dict.fromkeys(show_value(getattr(train, key)) for train in trains))
        if len(values) > 1:
            raise UserError(
                f"{where}: the runs have several values of train.{key}: {', '.join(values)}. A table has one; set it "
                f"under [settings]."
            )


def _published(row: Values, scores: Values, where: str) -> list[PublishedNumber]:
    """Published numbers of a row; each metric must be listed in ``[scores]``."""
    cells = numbers_of_row(row, where)
    for cell in cells:
        if cell.metric not in scores:
            raise UserError(f"{where}: {unknown('metric of [scores]', cell.metric, scores)}")
    return cells


def _run_grid(values: Values, shared: Values, where: str) -> RunGrid:
    check_keys(values, RUNS_KEYS, where, needed=("streams", "strategies", "norms"))
    settings = _settings(values.get("settings", {}), f"{where}: settings")
    from_dict(merge_settings(shared, settings), where)
    for key in ("streams", "strategies", "norms", "views"):
        if values.get(key) == []:
            raise UserError(f"{where}: {key} is empty, so the grid has no run. Name at least one.")
    return RunGrid(
        streams=_names(values["streams"], f"{where}: streams"),
        strategies=tuple(_strategy(s, f"{where}: strategies") for s in _list(values["strategies"], where)),
        norms=tuple(_norm(n, f"{where}: norms") for n in _list(values["norms"], f"{where}: norms")),
        buffers=_numbers(values, "buffers", where),
        forwards=tuple(_one_of(f, FORWARDS, f"{where}: forwards") for f in _list(values.get("forwards", []), where))
        or (None,),
        batches=_numbers(values, "batches", where),
        replays=_numbers(values, "replays", where),
        views=tuple(_one_of(v, tuple(VIEWS), f"{where}: views") for v in _list(values.get("views", ["plain"]), where)),
        published=_typed(values.get("published", True), bool, f"{where}: published"),
        settings=settings,
    )


def _numbers(values: Values, key: str, where: str) -> tuple[int | None, ...]:
    """Whole numbers of a list; a single None if the grid does not have it."""
    numbers = _list(values.get(key, []), f"{where}: {key}")
    return tuple(_typed(number, int, f"{where}: {key}") for number in numbers) or (None,)


def _norm(entry: Any, where: str) -> RecipeNorm:
    """Parse a norm: a name, or a table with a name and settings."""
    values = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(values, Mapping) or "name" not in values:
        raise UserError(f'{where}: {show_value(entry)} is no norm. Write a name, or {{ name = "cn", groups = 32 }}.')
    config = from_dict({"norm": values}, where).norm
    try:
        find_norm(config.name)
        apply_defaults({"norm": values})  # rejects settings that the norm does not have
    except (UserError, ValueError) as error:
        raise UserError(f"{where}: {error}") from error
    return RecipeNorm(config.name, {key: value for key, value in values.items() if key != "name"})


def _selected(values: Values, where: str) -> SelectedSettings:
    check_keys(values, ("where", "settings"), where, needed=("where", "settings"))
    return SelectedSettings(
        _selector(values["where"], f"{where}: where"), _settings(values["settings"], f"{where}: settings")
    )


def _claims(values: Values, runs: Iterable[RunGrid], where: str) -> list[Claim]:
    """Claims of an entry: one or, with ``each_norm_but``, one for each norm of the grids that it does not name."""
    if "each_norm_but" not in values:
        return [_claim(values, where)]
    left_out = _names(values["each_norm_but"], f"{where}: each_norm_but")
    names = dict.fromkeys(find_norm(norm.name)[0].name for grid in runs for norm in grid.norms)
    if unused := [name for name in left_out if name not in names]:
        raise UserError(f"{where}: each_norm_but: {unknown('norm of [[runs]]', unused[0], names)}")
    says = _typed(values.get("says", ""), str, f"{where}: says")
    if "{norm}" not in says:
        raise UserError(f"{where}: says={show_value(says)} must contain {{norm}}, the place of each norm's name.")
    rest = {key: value for key, value in values.items() if key != "each_norm_but"}
    cells = _selector(values.get("cells", {}), f"{where}: cells")
    return [
        _claim({**rest, "says": says.replace("{norm}", name), "cells": {**cells, "norm": name}}, where)
        for name in names
        if name not in left_out
    ]


def _claim(values: Values, where: str) -> Claim:
    check_keys(values, CLAIM_KEYS, where, needed=("says", "kind", "score"))
    kind = _one_of(values["kind"], get_args(ClaimKind), f"{where}: kind")
    check_score(values["score"], f"{where}: score")
    than = values.get("than", [])
    others = [than] if isinstance(than, Mapping) else _list(than, f"{where}: than")
    if kind in ("above", "near", "steadier") and not others and "than_score" not in values:
        raise UserError(f'{where}: a claim of kind {kind!r} needs `than`: which cells, such as {{ norm = "bn" }}.')
    if kind == "flat":
        check_curve(values["score"], f"{where}: score")
    if "than_score" in values:
        check_score(values["than_score"], f"{where}: than_score")
    bound = {"near": "margin", "flat": "margin", "under": "limit"}.get(kind)
    if bound is not None and bound not in values:
        raise UserError(f"{where}: a claim of kind {kind!r} needs `{bound}`, a number.")
    return Claim(
        says=_typed(values["says"], str, f"{where}: says"),
        kind=cast(ClaimKind, kind),
        score=values["score"],
        cells=_selector(values.get("cells", {}), f"{where}: cells"),
        than=tuple(_selector(other, f"{where}: than") for other in others),
        than_score=values.get("than_score"),
        margin=_number(values.get("margin", 0.0), f"{where}: margin", least=0.0),
        limit=_number(values.get("limit", 0.0), f"{where}: limit"),
    )


def _selector(values: Any, where: str) -> Values:
    if not isinstance(values, Mapping):
        raise UserError(f'{where}: {show_value(values)} must be a table such as {{ norm = "cn" }}.')
    check_keys(values, DIMENSIONS, where)
    return values


def _scores(values: Any, where: str, curves: bool) -> Values:
    for score in _typed(values, dict, where).values():
        check_score(score, where)
        if curves:
            check_curve(score, where)
    return cast(Values, values)


def _settings(values: Any, where: str) -> Values:
    from_dict(_typed(values, dict, where), where)
    refuse_code(values, {}, where)
    return cast(Values, values)


def _tables(values: Values, key: str, where: str) -> Iterable[tuple[int, Values]]:
    """Tables of an array, numbered from 1."""
    tables = _list(values.get(key, []), f"{where}: {key}")
    for i, table in enumerate(tables, 1):
        yield i, _typed(table, dict, f"{where}: {key} {i}")


def _names(values: Any, where: str) -> tuple[str, ...]:
    return tuple(_typed(value, str, where) for value in _list(values, where))


def _list(values: Any, where: str) -> list[Any]:
    return cast(list[Any], _typed(values, list, where))


def _runs(value: Any, where: str) -> int:
    if _typed(value, int, where) < 2:
        raise UserError(f"{where}: {value} must be 2 or more; there is no deviation of one run.")
    return cast(int, value)


def _strategy(value: Any, where: str) -> str:
    """Name of a strategy that is built in or registered."""
    refuse_code({"strategy": {"name": value}}, {}, where)
    return value if isinstance(value, str) and is_user_code(value) else _one_of(value, STRATEGIES, where)


def _number(value: Any, where: str, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {show_value(value)} must be a finite number.")
    if value < least:
        raise UserError(f"{where}: {show_value(value)} must be {least:g} or more.")
    return float(value)


def _typed(value: Any, kind: type, where: str) -> Any:
    words = {str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "a table"}
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: {show_value(value)} must be {words[kind]}.")
    return value


def _one_of(value: Any, known: Iterable[str], where: str) -> str:
    names = list(known)
    if value not in names:
        raise UserError(f"{where}: {unknown('name', value if isinstance(value, str) else show_value(value), names)}")
    return cast(str, value)


def check_keys(values: Values, known: Iterable[str], where: str, needed: Iterable[str] = ()) -> None:
    """Raise a `UserError` for an unknown key, or for a needed key that is missing.

    Example:
        >>> check_keys({"title": "mine"}, ("title", "kind"), "own.toml", needed=("title",))
    """
    names = list(known)
    for key in values:
        if key not in names:
            raise UserError(f"{where}: {unknown('key', key, names)}")
    for key in needed:
        if key not in values:
            raise UserError(f"{where}: the key {key!r} is missing. There are: {', '.join(names)}.")
