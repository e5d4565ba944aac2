"""Sets of records: the result of reading a folder or an archive, and functions on the records of several seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol, TypeVar

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.record import DivergedRun, Record, RecordShape

__all__ = [
    "RecordLike",
    "RecordSet",
    "drop_duplicates",
    "drop_finished",
    "drop_inconsistent",
    "group_by_run",
    "reasons_by_run",
    "spread_over_seeds",
]


@dataclass(frozen=True)
class RecordSet:
    """Records that were read together.

    Attributes:
        records: Valid records of finished runs.
        problems: One message per record, line or folder that could not be used.
        diverged_runs: Diverged runs that have no record of a finished run.
    """

    records: list[Record]
    problems: list[str]
    diverged_runs: list[DivergedRun] = field(default_factory=list)

    @property
    def diverged(self) -> dict[str, dict[int, str]]:
        """Diverged seeds by the hash of their run, each with its reason."""
        return reasons_by_run(self.diverged_runs)


def reasons_by_run(runs: Iterable[DivergedRun]) -> dict[str, dict[int, str]]:
    """Diverged seeds by the hash of their run, each with its reason; seeds are sorted.

    Example:
        >>> reasons_by_run([DivergedRun("75cc28cb778a", 1, "the loss is nan")])
        {'75cc28cb778a': {1: 'the loss is nan'}}
    """
    reasons: dict[str, dict[int, str]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        reasons.setdefault(run.hash, {}).setdefault(run.seed, run.reason)
    return dict(sorted(reasons.items()))


class RecordLike(Protocol):
    """A record or a summary of one: its settings, and at least the data-set fields of its file."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def raw(self) -> Mapping[str, Any]: ...


class _Comparable(Protocol):
    """A record or a summary of one: its path, the shape of its content and its counts."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def path(self) -> Path | None: ...
    @property
    def shape(self) -> RecordShape: ...
    @property
    def seed(self) -> int: ...
    @property
    def outcome(self) -> str: ...


T = TypeVar("T", bound=_Comparable)


def drop_duplicates(records: Iterable[T], problems: list[str]) -> list[T]:
    """Keep the first record of each run and seed, so that a mean over seeds counts no copy twice.

    Copies come from links, from folders that are listed twice, and from folders and archives that share runs. A record
    of the same run and seed with different counts, such as one from another device, is reported as a problem.
    """
    first: dict[tuple[str, int], T] = {}
    for record in records:
        other = first.setdefault((record.config.hash, record.seed), record)
        if other is not record and other.outcome != record.outcome:
            problems.append(
                f"{record.path}: is ignored. {other.path} is of the same run and seed, with different results."
            )
    return list(first.values())


def drop_inconsistent(records: Sequence[T], problems: list[str]) -> list[T]:
    """Keep the records whose shape is the most common one of their run; report the others as problems.

    Seeds of one run have the same tasks, classes and layers. A record that differs can't be averaged with the others.
    """
    if len({(record.config.hash, record.shape) for record in records}) == len({r.config.hash for r in records}):
        return list(records)  # each run has a single shape
    shapes: dict[str, Counter[RecordShape]] = {}
    for record in records:
        shapes.setdefault(record.config.hash, Counter())[record.shape] += 1
    common = {run: _most_common_shape(counts) for run, counts in shapes.items()}
    consistent = []
    for record in records:
        shape, expected = record.shape, common[record.config.hash]
        if shape.counts != expected.counts:
            problems.append(
                f"{record.path}: is ignored. It has {shape.counts}, the other seeds of its run have {expected.counts}."
            )
        elif shape.drift and shape.drift != expected.drift:
            problems.append(
                f"{record.path}: is ignored. Its drift has other layers or tasks than the other seeds of its run."
            )
        else:
            consistent.append(record)
    return consistent


def _most_common_shape(shapes: Counter[RecordShape]) -> RecordShape:
    """Most common counts, and among those the most common drift."""
    if len(shapes) == 1:
        return next(iter(shapes))
    counts: Counter[str] = Counter()
    drifts: Counter[str] = Counter()
    for shape, frequency in shapes.items():
        counts[shape.counts] += frequency
    [(common_counts, _)] = counts.most_common(1)
    for shape, frequency in shapes.items():
        if shape.counts == common_counts and shape.drift:
            drifts[shape.drift] += frequency
    return RecordShape(common_counts, drifts.most_common(1)[0][0] if drifts else "")


def drop_finished(diverged: Iterable[DivergedRun], finished: Iterable[tuple[str, int]]) -> list[DivergedRun]:
    """Keep one diverged run per hash and seed, without those that finished.

    Example:
        >>> runs = [DivergedRun("75cc28cb778a", seed, "the loss is nan") for seed in (0, 1, 1)]
        >>> [run.seed for run in drop_finished(runs, {("75cc28cb778a", 0)})]
        [1]
    """
    done = set(finished)
    first: dict[tuple[str, int], DivergedRun] = {}
    for run in diverged:
        if (run.hash, run.seed) not in done:
            first.setdefault((run.hash, run.seed), run)
    return list(first.values())


def group_by_run(records: Iterable[T]) -> dict[str, list[T]]:
    """Group records by the hash of their settings; the seeds of a run keep their order.

    Example:
        >>> group_by_run([])
        {}
    """
    groups: dict[str, list[T]] = {}
    for record in records:
        groups.setdefault(record.config.hash, []).append(record)
    return groups


def spread_over_seeds(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation.

    The standard deviation is NaN for a single seed or if a value is not finite.

    Example:
        >>> spread_over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
    """
    has_stdev = len(values) > 1 and all(map(isfinite, values))  # `stdev` fails on NaN and infinity
    return fmean(values), stdev(values) if has_stdev else float("nan")
