"""Cells of a recipe, one for each run of its grids and each view of that run, with the records of their runs.

All records of a table have one precision: the one with the most seeds, unless another one is asked for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from contnorm.bench.config.defaults import frozen_label
from contnorm.bench.config.schema import PRECISIONS, RunConfig, merge_settings
from contnorm.bench.label_metrics import LABEL_SCORES, label_score
from contnorm.bench.metrics import acc_so_far, score
from contnorm.bench.records import DIVERGED, Record, Runs
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError, unknown
from contnorm.paper.recipe import DIMENSIONS, VIEWS, PublishedNumber, Recipe, RunGrid, View, drift_parts, published
from contnorm.registry import find_norm, numbered_name

OF_NORM = ("groups", "momentum", "schedule", "freeze_after")  # dimensions that belong to the norm of a cell
# Dimensions that a grid may list, with the setting that each is.
GIVEN_SETTINGS = {
    "buffer": ("memory", "size"),
    "forward": ("strategy", "forward"),
    "batch": ("train", "batch"),
    "replay": ("train", "replay"),
}
WARM_UP = 2  # tasks without representative times

# --- Cells -----------------------------------------------------------------------------------------------------------


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
        place = self.place
        moments = moments_label(place["moments"], place["weights"] or "plain")
        norm = numbered_name(find_norm(place["norm"])[0], place["groups"]) if place["groups"] else place["norm"]
        extra = [f" {place[key]}" for key in ("momentum", "schedule", "layers") if place[key] is not None]
        label = "".join([*extra, frozen_label(place["freeze_after"])])
        return f"{norm}*{label}" if moments == "*" else f"{norm}{label}{moments}"

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

    @property
    def source(self) -> str:
        """Data set: that of the recipe's settings, else the first data set of its stream.

        Example:
            >>> from contnorm.paper.recipe import find_recipe
            >>> cells_of(find_recipe("table2"))[0].source
            'cifar100'
        """
        source, name = self.values["stream"].get("source"), self.place["stream"]
        if not source and not find_stream(name).sources:
            raise UserError(f"stream {name}: no data set is set. Add settings = {{ stream = {{ source = NAME }} }}.")
        return str(source or find_stream(name).sources[0])


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


def _cells(recipe: Recipe, grid: RunGrid) -> Iterator[RecipeCell]:
    settings = merge_settings(recipe.settings, grid.settings)
    sizes = list(product(grid.buffers, grid.forwards, grid.batches, grid.replays))
    numbers = recipe.numbers or [number for number in published() if number.table == recipe.table]
    for stream, strategy, given, norm, name in product(grid.streams, grid.strategies, sizes, grid.norms, grid.views):
        (spec, groups), view = find_norm(norm["name"]), VIEWS[name]
        place = {
            "stream": stream,
            "strategy": strategy,
            "norm": spec.name,
            "groups": (groups or norm.get("groups")) if spec.grouped else None,
            **{key: norm.get(key) for key in ("momentum", "schedule", "freeze_after", "layers")},
            **dict(zip(GIVEN_SETTINGS, given, strict=True)),
            "tasks": settings.get("stream", {}).get("tasks"),
            "moments": view.moments or settings.get("evaluate", {}).get("moments", "running"),
            "weights": settings.get("evaluate", {}).get("weights"),
            "setting": view.setting,
            "labels": view.labels,
        }
        values = merge_settings(settings, {"stream": {"name": stream}, "strategy": {"name": strategy}, "norm": norm})
        for key, (group, setting) in GIVEN_SETTINGS.items():
            if place[key] is not None:
                values = merge_settings(values, {group: {setting: place[key]}})
        for selected in recipe.selected:
            if matches(place, selected.where):
                values = merge_settings(values, selected.settings)
        shown = grid.published and not recipe.ours
        yield RecipeCell(place, values, view, {n.metric: n for n in numbers if shown and _is_of(n, place)})


def _is_of(number: PublishedNumber, place: Mapping[str, Any]) -> bool:
    """Whether a published number is of a place; groups, buffer and setting match any value if one side has none."""
    return (
        (number.dataset, number.split) == (place["stream"], place["labels"])
        and all(getattr(number, key) == place[key] for key in ("strategy", "norm", "momentum", "moments"))
        and all(
            None in (getattr(number, key), place[key]) or getattr(number, key) == place[key]
            for key in ("groups", "buffer", "setting")
        )
    )


def place_title(place: Mapping[str, Any]) -> str:
    """Heading of the cells of a table that share a place.

    Example:
        >>> place_title({"stream": "split-mnist", "strategy": "er", "buffer": 50, "tasks": None, "setting": "task"})
        'split-mnist, er, buffer 50, task-incremental'
        >>> place_title({"stream": "cocoseq", "labels": "minority"}), place_title({"labels": "overall"})
        ('cocoseq, minority classes', 'all classes')
    """
    templates = {
        "stream": "{}",
        "strategy": "{}",
        "forward": "{} forward",
        "tasks": "{} tasks",
        "setting": "{}-incremental",
        "labels": "{} classes",
    }
    known = {key: value for key, value in place.items() if value is not None}
    known.update({"labels": "all"} if known.get("labels") == "overall" else {})
    return ", ".join(templates.get(key, f"{key} {{}}").format(value) for key, value in known.items())


def matches(place: Mapping[str, Any], wanted: Mapping[Any, Any]) -> bool:
    """Whether a place has the wanted value, or one of several, in all named dimensions.

    ``"own"`` means the default of the norm (None).

    Example:
        >>> matches({"norm": "cn", "groups": 8}, {"norm": "cn"}), matches({"norm": "cn", "groups": 8}, {"groups": 32})
        (True, False)
        >>> matches({"norm": "cn", "groups": 8}, {"norm": ["bn", "cn"]})
        True
    """
    options = {key: value if isinstance(value, list) else [value] for key, value in wanted.items()}
    return all(("own" if place[key] is None else place[key]) in values for key, values in options.items())


def comparable(cell: RecipeCell, partner: RecipeCell, than: Mapping[Any, Any]) -> bool:
    """Whether a claim compares a cell with ``partner``.

    The partner matches the selector ``than`` and equals the cell in all dimensions that the selector does not name; if
    the selector names another norm, the dimensions of the norm may differ.
    """
    free = {*than, *(("norm", *OF_NORM) if "norm" in than else ())}
    same = all(cell.place[key] == partner.place[key] for key in DIMENSIONS if key not in free)
    return same and partner is not cell and matches(partner.place, than)


def check_entries(recipe: Recipe) -> None:
    """Raise a `UserError` for an entry of a recipe that matches no cell: it would have no effect, and is a mistake."""
    cells = cells_of(recipe)

    def some(wanted: Mapping[Any, Any]) -> list[RecipeCell]:
        return [cell for cell in cells if matches(cell.place, wanted)]

    unmatched = [f"[[selected]] where = {one.where}" for one in recipe.selected if not some(one.where)]
    used = {number for cell in cells for number in cell.published.values()}
    unmatched += [f"[[published]] {row}" for row in recipe.published if used.isdisjoint(row.numbers())]
    for claim in recipe.claims:
        text = f"[[claims]] {claim.says!r}"
        unmatched += [f"{text}: {wanted}" for wanted in (claim.cells, *claim.than) if not some(wanted)]
        unmatched += [
            f"{text}: than = {than}, with the cells of the claim,"
            for than in claim.than
            if not any(comparable(cell, partner, than) for cell in some(claim.cells) for partner in cells)
        ]
    if unmatched:
        raise UserError(
            f"{recipe.name}: {unmatched[0]} matches no cell of the table. Cells are made of the streams, strategies, "
            f"norms and buffers under [[runs]]; those that a claim compares are equal in all dimensions not named."
        )


def filter_cells(cells: Sequence[RecipeCell], only: Sequence[str]) -> list[RecipeCell]:
    """Filter cells: values of one dimension are alternatives, and all named dimensions must match.

    Example:
        >>> from contnorm.paper.recipe import find_recipe
        >>> [c.norm for c in filter_cells(cells_of(find_recipe("table3")), ["norm=cn", "norm=bn", "layers=stock"])]
        ['bn stock', 'cn32 stock']
    """
    wanted: dict[str, set[str]] = defaultdict(set)
    for text in only:
        key, equals, value = text.partition("=")
        if not equals or key not in DIMENSIONS:
            raise UserError(f"--only {text!r}: {unknown('dimension', key, DIMENSIONS)} Write it as norm=cn.")
        wanted[key].add(value)

    def texts(cell: RecipeCell, key: str) -> set[str]:
        value = "none" if cell.place[key] is None else str(cell.place[key])
        return {value, cell.norm} if key == "norm" else {value}

    matching = [cell for cell in cells if all(texts(cell, key) & values for key, values in wanted.items())]
    if not matching:
        available = {key: sorted(set().union(*(texts(cell, key) for cell in cells))) for key in wanted}
        known = "; ".join(f"{key} is one of {', '.join(values)}" for key, values in available.items())
        raise UserError(f"--only {' '.join(only)}: matches no cell of the recipe. In it, {known}.")
    return matching


# --- Records of cells ------------------------------------------------------------------------------------------------


class Numerics(NamedTuple):
    """How a run computes: its precision, and whether it is deterministic.

    Example:
        >>> str(Numerics("tf32", True)), str(Numerics("fp32", False))
        ('tf32', 'fp32, not deterministic')
    """

    precision: str
    deterministic: bool

    def __str__(self) -> str:
        return self.precision if self.deterministic else f"{self.precision}, not deterministic"


NUMERICS = tuple(Numerics(*values) for values in product(PRECISIONS, (True, False)))  # most precise first


def numerics_of(config: RunConfig) -> Numerics:
    """Precision of a run."""
    return Numerics(config.train.precision, config.train.deterministic)


def with_numerics(config: RunConfig, numerics: Numerics) -> RunConfig:
    """Settings of the same run in another precision.

    Example:
        >>> with_numerics(RunConfig(), Numerics("tf32", True)).train.precision
        'tf32'
    """
    changes: dict[str, Any] = numerics._asdict()
    return replace(config, train=replace(config.train, **changes))


@dataclass(frozen=True)
class MeasuredCell:
    """A cell with the records of its run.

    Attributes:
        cell: The cell.
        records: Records by seed.
        baseline: Records of the BN run by seed, for the comparison of training times.
        left_out: Number of records in each other precision; a table shows one precision only.
        diverged: Diverged seeds, each with the reason.
    """

    cell: RecipeCell
    records: Mapping[int, Record]
    baseline: Mapping[int, Record] | None = None
    left_out: Mapping[Numerics, int] = field(default_factory=dict)
    diverged: Mapping[int, str] = field(default_factory=dict)

    @property
    def run(self) -> bool:
        """Whether the cell was run: it has records or diverged seeds."""
        return bool(self.records or self.diverged)

    @property
    def empty_text(self) -> str:
        """Text shown instead of a missing number."""
        return "diverged" if self.diverged and not self.records else "not run"

    def values(self, name: str) -> dict[int, float]:
        """Score of each seed; seeds whose record does not have the score are omitted."""
        scores = {seed: self._value(record, name) for seed, record in self.records.items()}
        return {seed: value for seed, value in scores.items() if value is not None}

    def curves(self, name: str) -> dict[int, list[float]]:
        """Score after each task, by seed: ``acc_so_far`` or a drift."""
        every = {seed: self._curve(record, name) for seed, record in self.records.items()}
        return {seed: curve for seed, curve in every.items() if curve}

    def _curve(self, record: Record, name: str) -> list[float]:
        if parts := drift_parts(name):
            moment, layer = parts
            rows = [list(row.values()) for row in record.drift.get("by_task", [])]
            has_drift = self.cell.place["moments"] != "oracle"  # exact moments have none
            return [row[layer][moment] for row in rows if has_drift and layer < len(row)]
        matrix = None if record.multi_label else record.matrix_of(self.cell.view.matrix)
        return [] if matrix is None else acc_so_far(matrix)

    def _value(self, record: Record, name: str) -> float | None:
        if name == "extra_time":  # in percent over that of BN with the same seed
            base = (self.baseline or {}).get(record.seed)
            ours, theirs = training_seconds(record), None if base is None else training_seconds(base)
            return 100 * (ours / theirs - 1) if ours is not None and theirs else None
        if name == "parameters":
            return record.parameters
        if name == "acc_so_far" or drift_parts(name):
            curve = self._curve(record, name)
            return curve[-1] if curve else None
        labels = self.cell.view.labels
        if name in LABEL_SCORES:
            counts = None if labels is None else record.labels
            value = math.nan if counts is None else label_score(counts, name, record.classes_of(labels or ""))
            return None if math.isnan(value) else value  # no test image has one of the labels
        matrix = None if record.multi_label else record.matrix_of(self.cell.view.matrix)
        try:
            return None if matrix is None else score(matrix, name)
        except ValueError:  # needs accuracies that were not measured, such as those before the first task
            return None


def training_seconds(record: Record) -> float | None:
    """Time of the training loop, without the first two tasks if there are more; None if unknown.

    In the first two tasks kernels are compiled and graphs captured: without replay in the first, with it in the second.
    """
    by_task = record.seconds.get("train_by_task", [])
    return float(sum(by_task[WARM_UP:])) if len(by_task) > WARM_UP else record.seconds.get("train")


@lru_cache(maxsize=4096)
def _run_key(config: RunConfig) -> str:
    """Hash that identifies a run in any precision."""
    return with_numerics(config, NUMERICS[0]).hash


class RecordIndex:
    """Records of runs by settings, precision and seed."""

    def __init__(self, runs: Runs) -> None:
        self.problems = list(runs.problems)
        self._by_run: dict[str, dict[Numerics, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
        for one in sorted([*runs.records, *runs.diverged], key=lambda record: record.seed):
            model = replace(one.config.model, weights_hash=None)  # a recipe does not have it
            bare = one.config if model == one.config.model else replace(one.config, model=model)
            for key in {_run_key(one.config), _run_key(bare)}:
                self._by_run[key][numerics_of(one.config)].setdefault(one.seed, one)

    def records(self, config: RunConfig, seeds: range) -> dict[int, Record]:
        """Records of a run in its precision, finished and diverged, by seed; these seeds need no run."""
        found = self._by_run.get(_run_key(config), {}).get(numerics_of(config), {})
        return {seed: one for seed, one in found.items() if seed in seeds}

    def _find(self, config: RunConfig, seeds: range) -> dict[Numerics, dict[int, Record]]:
        """Records of a run, finished and diverged, by precision and seed.

        A run that measures tasks ahead has the records of the same run without them if it has no others: the training
        is the same, and scores that need those tasks are missing or, as `fm_mammoth`, count them as zero.
        """
        found = self._by_run.get(_run_key(config), {})
        if not found and config.evaluate.ahead:
            found = self._by_run.get(_run_key(replace(config, evaluate=replace(config.evaluate, ahead=False))), {})
        return {key: {seed: one for seed, one in some.items() if seed in seeds} for key, some in found.items()}

    def numerics(self, configs: Iterable[RunConfig], seeds: range, train: Mapping[str, Any] | None = None) -> Numerics:
        """Precision of a table: the one with the most seeds over all its runs; on a tie the recipe's.

        Args:
            configs: Settings of the runs, in the recipe's precision; at least one.
            seeds: Seeds that count.
            train: Settings of training that are asked for, such as ``{"precision": "tf32"}``.
        """
        runs = list(dict.fromkeys(configs))
        default, total = numerics_of(runs[0]), Counter[Numerics]()
        for config in runs:
            total.update({one: len(some) for one, some in self._find(config, seeds).items()})
        typed = {key: value for key, value in (train or {}).items() if key in Numerics._fields}
        allowed = [one for one in NUMERICS if typed.items() <= one._asdict().items()]
        return min(allowed, key=lambda one: (-total[one], one != default))

    def measure(
        self, configs: Mapping[RecipeCell, RunConfig], seeds: range, numerics: Numerics | None = None
    ) -> list[MeasuredCell]:
        """Cells of a table with their records, all of one precision; a cell without records was not run.

        Args:
            configs: Settings of the run of each cell.
            seeds: Seeds that count.
            numerics: Precision of the table; None for the one with the most seeds.
        """
        if not configs:
            return []
        numerics = numerics or self.numerics(configs.values(), seeds)
        found = {config: self._find(config, seeds) for config in dict.fromkeys(configs.values())}
        records = {
            config: {s: one for s, one in some.get(numerics, {}).items() if one.status != DIVERGED}
            for config, some in found.items()
        }
        measured = []
        for cell, config in configs.items():
            base = baseline_of(cell, configs)
            diverged = {s: r.reason for s, r in found[config].get(numerics, {}).items() if r.status == DIVERGED}
            left_out = {key: len(some) for key, some in found[config].items() if some and key != numerics}
            baseline = None if base is None else records[configs[base]]
            measured.append(MeasuredCell(cell, records[config], baseline, left_out, diverged))
        return measured


def baseline_of(cell: RecipeCell, cells: Iterable[RecipeCell]) -> RecipeCell | None:
    """Cell of plain BN that equals a cell in everything but the norm; None if there is none."""
    plain = {"norm": "bn", "momentum": "own"}
    same = (one for one in cells if (matches(one.place, plain) if one is cell else comparable(cell, one, plain)))
    return next(same, None)
