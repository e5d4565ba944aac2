"""Recipes: tables and figures of a paper as data, read from TOML files; and the published numbers of this one.

A recipe defines runs as grids of streams, strategies, norms and memory sizes, their shared settings, the scores to
compare with published numbers, and the claims of the paper. Pydantic checks every key and type of a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from contnorm.bench.components import is_user_code
from contnorm.bench.config.defaults import apply_defaults, refuse_code
from contnorm.bench.config.schema import from_dict, parse_toml, read_toml_text, show_value
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.metrics import SCORES, score_title
from contnorm.bench.strategies import STRATEGIES
from contnorm.errors import UserError, unknown
from contnorm.registry import find_norm

DRIFT = ("drift_mean_1", "drift_mean_2", "drift_var_1", "drift_var_2")  # later layers have higher numbers
OTHER_TITLES = {"extra_time": "time over BN, %", "acc_so_far": "ACC so far", "parameters": "parameters"}
RUNS = 5  # number of runs behind the paper's means and standard deviations
Mean = Annotated[float, Field(ge=-1e12, le=1e12)]
Deviation = Annotated[float, Field(ge=0, le=1e12)]  # its square must be finite
Value = tuple[Mean | None] | tuple[Mean | None, Deviation | None] | tuple[Mean | None, Deviation | None, str]


@dataclass(frozen=True, kw_only=True)
class PublishedPlace:
    """Place of published numbers in a table.

    Attributes:
        dataset: The stream.
        setting: ``"task"``, ``"class"``, ``"domain"`` or ``"free"``.
        split: Group of classes, in the multi-label tables.
    """

    dataset: str
    strategy: str
    norm: str
    groups: int | None = None
    momentum: float | str | None = None
    moments: str = "running"
    buffer: int | None = None
    setting: str | None = None
    split: str | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedNumber(PublishedPlace):
    """One number of the paper.

    Attributes:
        table: Number of the table, as text.
        metric: ``"acc"``, ``"fm"``, ``"la"``, ``"drift_mean_1"``, ``"extra_time"`` and so on.
        mean: None in tables that print only standard deviations.
        std: None if none is printed.
        flag: Reason why the number is doubtful; empty if it is not.
    """

    table: str
    metric: str
    mean: float | None
    std: float | None = None
    flag: str = ""


@dataclass(frozen=True, kw_only=True)
class PublishedRow(PublishedPlace):
    """Row of a published table: by metric the mean, the standard deviation and a reason for doubt."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    values: Mapping[str, Value]

    def numbers(self, table: str = "") -> Iterator[PublishedNumber]:
        """The numbers of the row.

        Example:
            >>> row = PublishedRow(dataset="split-mnist", strategy="er", norm="bn", values={"acc": (90.1, 0.4)})
            >>> [(number.metric, number.mean, number.std) for number in row.numbers()]
            [('acc', 90.1, 0.4)]
        """
        place: dict[str, Any] = {key: value for key, value in vars(self).items() if key != "values"}
        for metric, value in self.values.items():
            numbers: dict[str, Any] = dict(zip(("mean", "std", "flag"), value, strict=False))
            yield PublishedNumber(**place, table=table, metric=metric, **numbers)


@cache
def published() -> tuple[PublishedNumber, ...]:
    """All published numbers of the paper.

    Example:
        >>> len(published())
        598
    """
    text = resources.files("contnorm.paper").joinpath("published.json").read_bytes()
    tables = TypeAdapter(dict[str, list[PublishedRow]]).validate_json(text, strict=True)
    return tuple(number for table, rows in tables.items() for row in rows for number in row.numbers(table))


def find_published(**wanted: Any) -> list[PublishedNumber]:
    """Published numbers whose fields equal the given values.

    Example:
        >>> where = {"dataset": "split-cifar100", "strategy": "er", "norm": "cn", "metric": "acc"}
        >>> [cell.mean for cell in find_published(table="2", **where)]
        [67.48]
    """
    return [one for one in published() if all(getattr(one, key) == wanted[key] for key in wanted)]


def drift_parts(name: str) -> tuple[str, int] | None:
    """Moment and index of the norm layer of a drift score, counted from 0; None for other scores.

    Example:
        >>> drift_parts("drift_var_2"), drift_parts("acc")
        (('var', 1), None)
    """
    match = re.fullmatch(r"drift_(mean|var)_([1-9]\d*)", name)
    return (match[1], int(match[2]) - 1) if match else None


def column_title(name: str) -> str:
    """Column title of a score of a recipe; forgetting scores other than the paper's keep their name.

    Example:
        >>> column_title("fm"), column_title("fm_mammoth"), column_title("drift_var_2")
        ('FM', 'fm_mammoth', 'var of layer 2')
    """
    parts = drift_parts(name)
    return f"{parts[0]} of layer {parts[1] + 1}" if parts else OTHER_TITLES.get(name, score_title(name))


def _score(name: str) -> str:
    known = [*SCORES, *LABEL_SCORES, *DRIFT, *OTHER_TITLES]
    if name not in known and not drift_parts(name):
        raise unknown("score", name, known)
    return name


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    from_dict(values, "settings")
    refuse_code(values, {}, "settings")
    return values


def _norm(entry: Any) -> dict[str, Any]:
    """Settings of a norm, which an entry may only name."""
    values = {"name": entry} if isinstance(entry, str) else entry
    find_norm(apply_defaults({"norm": values}).norm.name)  # rejects settings that the norm does not have
    return {"name": "bn", **values}


def _tuple(entry: Any) -> tuple[Any, ...]:
    return tuple(entry) if isinstance(entry, list) else (entry,)


def _strategy(name: str) -> str:
    refuse_code({"strategy": {"name": name}}, {}, "strategies")
    if name not in STRATEGIES and not is_user_code(name):
        raise unknown("strategy", name, STRATEGIES)
    return name


Dimension = Literal[
    "stream", "strategy", "norm", "groups", "momentum", "schedule", "freeze_after", "layers", "buffer", "forward",
    "batch", "replay", "tasks", "moments", "weights", "setting", "labels",
]  # fmt: skip
DIMENSIONS: tuple[str, ...] = get_args(Dimension)
Selector = dict[Dimension, Any]
Score = Annotated[str, AfterValidator(_score)]
Settings = Annotated[dict[str, Any], AfterValidator(_settings)]
Norm = Annotated[dict[str, Any], BeforeValidator(_norm)]
Strategy = Annotated[str, AfterValidator(_strategy)]
ViewName = Literal["plain", "running", "oracle", "class", "task", "overall", "majority", "moderate", "minority"]
ClaimKind = Literal["above", "near", "under", "flat", "steadier"]
_T = TypeVar("_T")
Several = Annotated[tuple[_T, ...], Field(min_length=1)]
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


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
class RunGrid:
    """A grid of runs: every stream with every strategy, norm, memory size, forward pass, batch size and replay size.

    Forward passes, batch sizes and replay sizes that a grid does not list are those of its settings.
    """

    __pydantic_config__ = CHECKED

    streams: Several[str]
    strategies: Several[Strategy]
    norms: Several[Norm]
    buffers: Several[int | None] = (None,)
    forwards: Several[Literal["joint", "separate"] | None] = (None,)
    batches: Several[int | None] = (None,)
    replays: Several[int | None] = (None,)
    views: Several[ViewName] = ("plain",)
    published: bool = True  # whether the paper reports these cells
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class SelectedSettings:
    """Settings selected for some cells, such as a learning rate: by `contnorm tune` or by hand."""

    __pydantic_config__ = CHECKED

    where: Selector
    settings: Settings


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
        each_norm_but: In a file, makes one claim for each other norm of the grids; ``{norm}`` in ``says`` is its name.
    """

    __pydantic_config__ = CHECKED

    says: str
    kind: ClaimKind
    score: Score
    cells: Selector = field(default_factory=dict)
    than: Annotated[tuple[Selector, ...], BeforeValidator(_tuple)] = ()
    than_score: Score | None = None
    margin: Annotated[float, Field(ge=0)] = 0.0
    limit: float = 0.0
    each_norm_but: tuple[str, ...] | None = None

    @property
    def criterion(self) -> str:
        """Score and bound that decide the claim."""
        if self.kind in ("near", "flat"):
            return f"{self.score}, within {self.margin:g}"
        return f"{self.score}, below {self.limit:g}" if self.kind == "under" else self.score


@dataclass(frozen=True)
class Recipe:
    """A table or figure; one without runs has a note that says why.

    Attributes:
        title: One-line title.
        name: Name of the file.
        kind: ``runs``: scores and published numbers; ``curves``: scores after each task.
        table: Number of the published table.
        scores: Names of our scores by published metric.
        runs: Grids of runs.
        settings: Settings of every run.
        selected: Settings of some cells, which override all others.
        claims: Claims of the paper.
        published: Rows of published numbers in the recipe itself.
        published_runs: Number of runs behind the published standard deviations.
        alone: Whether runs must not run in parallel, as for time measurements.
        note: One-line note for the reader.
        ours: Whether it is a table of our own, beside the paper's: it has no published numbers, and its claims are
            questions.
    """

    __pydantic_config__ = CHECKED

    title: str
    name: str = ""
    kind: Literal["runs", "curves"] = "runs"
    table: str = ""
    scores: Mapping[str, Score] = field(default_factory=dict)
    runs: tuple[RunGrid, ...] = ()
    settings: Settings = field(default_factory=dict)
    selected: tuple[SelectedSettings, ...] = ()
    claims: tuple[Claim, ...] = ()
    published: tuple[PublishedRow, ...] = ()
    published_runs: Annotated[int, Field(ge=2)] = RUNS
    alone: bool = False
    note: str = ""
    ours: bool = False

    @property
    def numbers(self) -> list[PublishedNumber]:
        """Published numbers in the recipe itself."""
        return [number for row in self.published for number in row.numbers()]


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
    recipe = replace(checked(Recipe, parse_toml(text, where), where), name=name)
    for settings in [*(grid.settings for grid in recipe.runs), *(one.settings for one in recipe.selected)]:
        if {"precision", "deterministic"} & settings.get("train", {}).keys():
            raise UserError(f"{where}: sets the precision of some runs. A table has one: set it under [settings].")
    for metric in (number.metric for number in recipe.numbers if number.metric not in recipe.scores):
        raise UserError(f"{where}: published: {unknown('metric of [scores]', metric, recipe.scores)}")
    curves = [*(recipe.scores.values() if recipe.kind == "curves" else ())]
    curves += [claim.score for claim in recipe.claims if claim.kind == "flat"]
    for score in curves:
        if score != "acc_so_far" and not drift_parts(score):
            raise UserError(f"{where}: {score!r} has no value after each task. Use acc_so_far, {', '.join(DRIFT)}.")
    for claim in recipe.claims:
        if claim.kind in ("above", "near", "steadier") and not (claim.than or claim.than_score):
            raise UserError(f'{where}: {claim.says!r} needs `than`: which cells, such as {{ norm = "bn" }}.')
    norms = dict.fromkeys(find_norm(norm["name"])[0].name for grid in recipe.runs for norm in grid.norms)
    claims = [
        replace(claim, says=claim.says.replace("{norm}", norm), cells={**claim.cells, "norm": norm})
        if claim.each_norm_but is not None
        else claim
        for claim in recipe.claims
        for norm in ([""] if claim.each_norm_but is None else [one for one in norms if one not in claim.each_norm_but])
    ]
    return replace(recipe, claims=tuple(claims))


def checked(kind: type[_T], values: Mapping[str, Any], where: str) -> _T:
    """Make an object of the values of a TOML file, checked by pydantic; error messages begin with ``where``."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)  # as JSON, a list may be a tuple
    except (ValidationError, UserError) as error:
        if isinstance(error, UserError):
            raise UserError(f"{where}: {error}") from error
        problems = error.errors(include_url=False, include_context=False)
        first = min(problems, key=lambda problem: problem["type"] == "missing")  # may be missing for a misspelled key
        place = " ".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        value = "" if first["type"] == "missing" else f"={show_value(first['input'])}"
        raise UserError(f"{where}: {place}{value}: {first['msg'].rstrip('.')}.") from error
