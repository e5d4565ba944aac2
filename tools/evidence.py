"""Evidence for statements of the documentation: scores of recorded runs, and what they decide.

A `Cell` names an archive in docs/records, the settings of one run, and which accuracies of its records count. A
comparison of two cells is decided by the staged rule (`staged`), or has an ordinary 95 % interval (`plain`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from contnorm import bench
from contnorm.bench.metrics.accuracy_matrix import score as accuracy_score
from contnorm.bench.metrics.multilabel import label_score
from contnorm.bench.records import Record
from contnorm.bench.sequential import Decision, decide_differences
from contnorm.bench.stats import PairedDifference, paired_difference

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
        archive: File in docs/records.
        where: Conditions on settings, as `bench.Runs.where` takes them; exactly one run must satisfy them.
        matrix: Counts of a record: ``matrix``, ``matrix_task``, ``matrix_running``.
    """

    archive: str
    where: dict[str, Any] = field(hash=False)
    matrix: str = "matrix"

    def runs(self) -> bench.Runs:
        return _select(self.archive, tuple(self.where.items()))

    def scores(self, score: str = "acc") -> dict[int, float]:
        """Score of each finished seed, in percent."""
        return {record.seed: self._score(record, score) for record in self.runs()}

    def diverged(self) -> set[int]:
        return {run.seed for run in self.runs().diverged}

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


def differences(first: Cell, second: Cell, score: str = "acc") -> dict[int, float]:
    """First minus second, for each seed that finished in both."""
    a, b = first.scores(score), second.scores(score)
    return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}


def staged(first: Cell, second: Cell, cases: int, score: str = "acc") -> Decision:
    """Decision of the staged rule over the seeds from 100 on; ``cases`` is the number of comparisons of the table."""
    lost = first.diverged() | second.diverged()
    return decide_differences(differences(first, second, score), cases=cases, diverged=lost)


def plain(first: Cell, second: Cell, score: str = "acc") -> PairedDifference:
    """Paired difference with its 95 % interval, for exploratory records and for comparisons that no claim makes."""
    pair = paired_difference(first.scores(score), second.scores(score))
    assert pair is not None
    return pair
