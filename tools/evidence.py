"""Evidence for statements of the documentation: scores of recorded runs, and differences of them.

A `Cell` names archives in docs/records, the settings of one run, and which accuracies of its records count. A
`Comparison` is a pair of cells: one row of docs/results/evidence.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from contnorm import bench
from contnorm.bench.label_metrics import label_score
from contnorm.bench.metrics import score as accuracy_score
from contnorm.bench.records import Record
from contnorm.bench.stats import PairedDifference, summarize_differences

RECORDS = Path(__file__).resolve().parents[1] / "docs" / "records"


@cache
def load(archive: str) -> bench.Runs:
    """The runs of an archive in docs/records."""
    runs = bench.load_runs(RECORDS / archive)
    assert list(runs.problems) == []
    return runs


@cache
def _select(archive: str, where: tuple[tuple[str, Any], ...]) -> bench.Runs:
    runs = load(archive).where(**dict(where))
    assert len(runs.by_run()) == 1, f"{archive}: {len(runs.by_run())} runs with {dict(where)}"
    return runs


@dataclass(frozen=True)
class Cell:
    """The runs of one setting.

    Attributes:
        archives: Files in docs/records; several if the seeds were run at different times.
        where: Conditions on settings, as `bench.Runs.where` takes them; exactly one run must satisfy them.
        matrix: Counts of a record: ``matrix``, ``matrix_task``, ``matrix_running``.
    """

    archives: tuple[str, ...]
    where: Mapping[str, Any] = field(hash=False)
    matrix: str = "matrix"

    def runs(self) -> list[Record]:
        """The records of the finished seeds."""
        return [record for archive in self.archives for record in _select(archive, tuple(self.where.items()))]

    def scores(self, score: str = "acc") -> dict[int, float]:
        """Score of each finished seed, in percent."""
        return {record.seed: self._score(record, score) for record in self.runs()}

    def mean(self, score: str = "acc") -> float:
        return fmean(self.scores(score).values())

    def std(self, score: str = "acc") -> float:
        return stdev(self.scores(score).values())

    def _score(self, record: Record, score: str) -> float:
        if record.multi_label:
            labels = record.labels
            assert labels is not None
            return label_score(labels, score, record.classes_of("overall"))
        counts = record.matrix_of(self.matrix)
        assert counts is not None
        return accuracy_score(counts, score)


@dataclass(frozen=True)
class MeanCell:
    """Several settings of one norm: the score of a seed is its mean over them."""

    cells: Sequence[Cell]

    def scores(self, score: str = "acc") -> dict[int, float]:
        by_cell = [cell.scores(score) for cell in self.cells]
        return {seed: fmean(scores[seed] for scores in by_cell) for seed in by_cell[0]}

    def mean(self, score: str = "acc") -> float:
        return fmean(self.scores(score).values())


@dataclass(frozen=True)
class Comparison:
    """Two cells whose scores are compared seed by seed.

    Attributes:
        what: The two, such as ``CN - BN``.
        situation: Stream, strategy and learning rates.
        first: The cell whose score comes first in the difference.
        second: The other cell.
        basis: What the seeds and learning rates were chosen by.
        scores: Names of the scores that are compared.
    """

    what: str
    situation: str
    first: Cell | MeanCell
    second: Cell | MeanCell
    basis: str
    scores: tuple[str, ...] = ("acc", "aia")

    def by_seed(self, score: str) -> dict[int, float]:
        """Difference of each seed that finished with both."""
        first, second = self.first.scores(score), self.second.scores(score)
        return {seed: first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())}

    def difference(self, score: str = "acc") -> PairedDifference:
        """Paired difference with its ordinary 95 % interval."""
        return summarize_differences(list(self.by_seed(score).values()))

    def text(self, score: str = "acc") -> str:
        """The difference with its interval, such as ``+0.19 (-0.11 to +0.48)``."""
        pair = self.difference(score)
        return f"{pair.mean:+.2f} ({pair.t})"

    def excludes_zero(self, score: str = "acc") -> bool:
        pair = self.difference(score)
        assert pair.t is not None
        return not pair.t.holds(0.0)

    @property
    def seeds(self) -> int:
        """Number of seeds that finished with both."""
        return len(self.difference(self.scores[0]).differences)

    @property
    def archives(self) -> list[str]:
        """The archives of both cells."""
        cells = [
            cell
            for side in (self.first, self.second)
            for cell in (side.cells if isinstance(side, MeanCell) else [side])
        ]
        return list(dict.fromkeys(archive for cell in cells for archive in cell.archives))
