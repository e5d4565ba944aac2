"""Cells with the records of their runs: scores per seed, curves over tasks, and the precision of a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from contnorm.bench.config.schema import PRECISIONS, RunConfig
from contnorm.bench.label_metrics import LABEL_SCORES, label_score
from contnorm.bench.metrics import acc_so_far, score
from contnorm.bench.records import Record
from contnorm.paper.cells import SHARED_DIMENSIONS, RecipeCell
from contnorm.paper.scores import drift_parts

__all__ = [
    "NUMERICS",
    "MeasuredCell",
    "Numerics",
    "Seeds",
    "baseline_of",
    "curve_of",
    "measure_cells",
    "numerics_of",
    "table_numerics",
    "training_seconds",
    "with_numerics",
]

WARM_UP = 2  # tasks without representative times


@dataclass(frozen=True)
class MeasuredCell:
    """A cell with the records of its run.

    Attributes:
        cell: The cell.
        records: Records by seed.
        baseline: Records of the BN run by seed, for the comparison of training times.
        left_out: Number of records in each other precision; a table shows one precision only.
        diverged: Diverged seeds, each with the message of its divergence note.
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
        """Score after each task, by seed."""
        all_curves = {seed: curve_of(record, self.cell, name) for seed, record in self.records.items()}
        return {seed: curve for seed, curve in all_curves.items() if curve}

    def _value(self, record: Record, name: str) -> float | None:
        if name == "extra_time":
            return self._extra_time(record)
        if name == "parameters":
            return record.parameters
        if name == "acc_so_far" or drift_parts(name):
            curve = curve_of(record, self.cell, name)
            return curve[-1] if curve else None
        return self._label_score(record, name) if name in LABEL_SCORES else self._score(record, name)

    def _score(self, record: Record, name: str) -> float | None:
        matrix = None if record.multi_label else record.matrix_of(self.cell.view.matrix)
        try:
            return None if matrix is None else score(matrix, name)
        except ValueError:  # needs accuracies that were not measured, such as those before the first task
            return None

    def _label_score(self, record: Record, name: str) -> float | None:
        """Score over the cell's group of labels; None if no test image has one of them."""
        labels = self.cell.view.labels
        matrix = None if labels is None else record.labels
        if matrix is None or labels is None:
            return None
        value = label_score(matrix, name, record.classes_of(labels))
        return None if math.isnan(value) else value

    def _extra_time(self, record: Record) -> float | None:
        """Training time in percent over that of BN with the same seed; None if one of the times is missing."""
        baseline = (self.baseline or {}).get(record.seed)
        ours, theirs = training_seconds(record), None if baseline is None else training_seconds(baseline)
        return 100 * (ours / theirs - 1) if ours is not None and theirs else None


def training_seconds(record: Record) -> float | None:
    """Time of the training loop, without the first two tasks if there are more; None if unknown.

    In the first two tasks kernels are compiled and graphs captured: without replay in the first, with it in the second.
    """
    seconds = record.seconds
    by_task = seconds.get("train_by_task", [])
    if len(by_task) > WARM_UP:
        return float(sum(by_task[WARM_UP:]))
    return float(seconds["train"]) if "train" in seconds else None


def curve_of(record: Record, cell: RecipeCell, name: str) -> list[float]:
    """Score after each task; empty if the record does not have it."""
    parts = drift_parts(name)
    if parts:
        if cell.place["moments"] == "oracle":  # oracle moments have no drift
            return []
        moment, layer = parts
        rows = [list(row.values()) for row in record.drift.get("by_task", [])]
        return [row[layer][moment] for row in rows if layer < len(row)]
    matrix = None if record.multi_label else record.matrix_of(cell.view.matrix)
    if matrix is None:
        return []
    if name != "acc_so_far":
        raise ValueError(f"curve_of: {name!r} has no value after each task. Use acc_so_far, or a drift.")
    return acc_so_far(matrix)


def baseline_of(cell: RecipeCell, cells: Sequence[RecipeCell]) -> RecipeCell | None:
    """Cell of plain BN that equals a cell in everything but the norm; None if there is none."""
    for other in cells:
        plain = other.place["norm"] == "bn" and other.place["momentum"] is None
        if plain and all(other.place[key] == cell.place[key] for key in SHARED_DIMENSIONS):
            return other
    return None


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

    @property
    def options(self) -> str:
        """Options of `contnorm paper` that select it."""
        return f"--precision {self.precision}{'' if self.deterministic else ' --set train.deterministic=false'}"


NUMERICS = tuple(Numerics(*values) for values in product(PRECISIONS, (True, False)))  # most precise first
Seeds = Mapping[int, Record]


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


def table_numerics(runs: Iterable[Mapping[Numerics, int]], default: Numerics) -> Numerics:
    """Precision of a table: the one with the most seeds over all its runs.

    On a tie it is the recipe's, ``default``, then the most precise. ``runs`` has the number of seeds by precision.

    Example:
        >>> tf32, fp32 = Numerics("tf32", True), Numerics("fp32", True)
        >>> str(table_numerics([{tf32: 3}, {tf32: 3, fp32: 4}], fp32)), str(table_numerics([], fp32))
        ('tf32', 'fp32')
    """
    total: Counter[Numerics] = Counter({default: 0})
    for run in runs:
        total.update(run)
    return min(total, key=lambda numerics: (-total[numerics], numerics != default, NUMERICS.index(numerics)))


def measure_cells(
    configs: Mapping[RecipeCell, RunConfig],
    find: Callable[[RunConfig], Mapping[Numerics, Seeds]],
    diverged: Callable[[RunConfig], Mapping[int, str]],
    numerics: Numerics | None = None,
) -> list[MeasuredCell]:
    """Cells of a table with their records, all of one precision; a cell without records was not run.

    Args:
        configs: Settings of the run of each cell.
        find: Returns the records of a run by precision and seed.
        diverged: Returns the diverged seeds of a run in the precision of its settings, with the reasons.
        numerics: Precision of the table; None for the one with the most seeds, diverged ones included.
    """
    if not configs:
        return []
    runs = {config: find(config) for config in dict.fromkeys(configs.values())}
    if numerics is None:
        counts = [_count_seeds(config, records, diverged) for config, records in runs.items()]
        numerics = table_numerics(counts, numerics_of(next(iter(runs))))
    measured = []
    for cell, config in configs.items():
        base = baseline_of(cell, list(configs))
        records = runs[config].get(numerics, {})
        baseline = None if base is None else runs[configs[base]].get(numerics, {})
        left_out = {other: len(seeds) for other, seeds in runs[config].items() if other != numerics and seeds}
        notes = sorted(diverged(with_numerics(config, numerics)).items())
        without_record = {seed: reason for seed, reason in notes if seed not in records}
        measured.append(MeasuredCell(cell, records, baseline, left_out, without_record))
    return measured


def _count_seeds(
    config: RunConfig, records: Mapping[Numerics, Seeds], diverged: Callable[[RunConfig], Mapping[int, str]]
) -> dict[Numerics, int]:
    """Number of recorded and diverged seeds of a run by precision."""
    return {one: len({*records.get(one, ()), *diverged(with_numerics(config, one))}) for one in NUMERICS}
