"""Series of a cell's records: a score per seed, or a curve over tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from contnorm.bench.metrics.accuracy_matrix import acc_so_far, score
from contnorm.bench.metrics.multilabel import LABEL_SCORES, label_score
from contnorm.bench.records import Record
from contnorm.paper.cells import Cell
from contnorm.paper.score_names import drift_parts

__all__ = ["Measured", "baseline_of", "curve_of", "training_seconds"]

ONE_LAYOUT = (
    "stream",
    "strategy",
    "layers",
    "buffer",
    "tasks",
    "moments",
    "setting",
    "labels",
)  # what a cell shares with its baseline

WARM_UP = 2  # tasks without representative times


@dataclass(frozen=True)
class Measured:
    """A cell with the records of its run.

    Attributes:
        cell: The cell.
        records: Records by seed.
        baseline: Records of the BN run by seed, for the comparison of training times.
        left_out: Number of records in other precisions, which do not count for the cell.
        lost: Diverged seeds, each with the message of its divergence note.
    """

    cell: Cell
    records: Mapping[int, Record]
    baseline: Mapping[int, Record] | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    lost: Mapping[int, str] = field(default_factory=dict)

    @property
    def run(self) -> bool:
        """Whether the cell was run: it has records or diverged seeds."""
        return bool(self.records or self.lost)

    @property
    def why_empty(self) -> str:
        """Text shown instead of a missing number."""
        return "lost" if self.lost and not self.records else "not run"

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
            return record.raw.get("parameters")
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
        matrix = None if labels is None else record.labels_of(self.cell.view.matrix)
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
    seconds = record.raw.get("seconds", {})
    by_task = seconds.get("train_by_task", [])
    if len(by_task) > WARM_UP:
        return float(sum(by_task[WARM_UP:]))
    return float(seconds["train"]) if "train" in seconds else None


def curve_of(record: Record, cell: Cell, name: str) -> list[float]:
    """Score after each task; empty if the record does not have it."""
    parts = drift_parts(name)
    if parts:
        if cell.view.moments == "oracle":  # oracle moments have no drift
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


def baseline_of(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """Cell of plain BN that equals a cell in everything but the norm; None if there is none."""
    for other in cells:
        plain = other.place["norm"] == "bn" and other.place["momentum"] is None
        if plain and all(other.place[key] == cell.place[key] for key in ONE_LAYOUT):
            return other
    return None
