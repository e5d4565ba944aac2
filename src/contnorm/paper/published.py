"""Published numbers of the paper's tables, and the comparison of our runs with them.

Norms, strategies and streams have the names of this package. ``momentum`` is None for a norm's default, ``groups`` and
``buffer`` are None if the paper does not state them or they do not apply, ``moments`` is ``"oracle"`` for BN*. Doubtful
numbers have a flag.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, Literal

from contnorm.bench.config.schema import show_value
from contnorm.bench.records import spread_over_seeds
from contnorm.bench.stats import Interval, t_interval, welch_interval
from contnorm.errors import UserError, unknown

__all__ = [
    "RUNS",
    "DataRow",
    "PublishedComparison",
    "PublishedNumber",
    "compare_published",
    "data_rows",
    "find",
    "numbers_of_row",
    "published",
]


RUNS = 5  # number of runs behind the paper's means and standard deviations


@dataclass(frozen=True)
class PublishedNumber:
    """One number of the paper.

    Attributes:
        table: Number of the table, as text.
        dataset: The stream.
        setting: ``"task"``, ``"class"``, ``"domain"`` or ``"free"``.
        split: Group of classes, in the multi-label tables.
        metric: ``"acc"``, ``"fm"``, ``"la"``, ``"drift_mean_1"``, ``"extra_time"`` and so on.
        mean: None in tables that print only standard deviations.
        std: None if none is printed.
        flag: Reason why the number is doubtful; empty if it is not.
    """

    table: str
    dataset: str
    strategy: str
    norm: str
    groups: int | None
    momentum: float | str | None
    moments: str
    buffer: int | None
    setting: str | None
    split: str | None
    metric: str
    mean: float | None
    std: float | None
    flag: str


@dataclass(frozen=True)
class DataRow:
    """Row of the paper's Table 7: statistics of a data set."""

    stream: str
    tasks: int
    shape: tuple[int, ...]
    train: int
    test: int
    classes: int
    flag: str = ""


@cache
def published() -> tuple[PublishedNumber, ...]:
    """All published numbers of the paper.

    Example:
        >>> len(published())
        598
    """
    return tuple(cell for table, rows in _raw()["tables"].items() for row in rows for cell in _cells(table, row))


@cache
def data_rows() -> tuple[DataRow, ...]:
    """Rows of Table 7.

    Example:
        >>> data_rows()[0].stream, data_rows()[0].train
        ('permuted-mnist', 10000)
    """
    return tuple(DataRow(**{**row, "shape": tuple(row["shape"])}) for row in _raw()["data"])


def find(**wanted: Any) -> list[PublishedNumber]:
    """Published numbers whose fields equal the given values.

    Example:
        >>> [cell.mean for cell in find(table="2", dataset="split-cifar100", strategy="er", norm="cn", metric="acc")]
        [67.48]
    """
    known = [f.name for f in fields(PublishedNumber)]
    for name in wanted:
        if name not in known:
            raise unknown("field of a published number", name, known)
    return [cell for cell in published() if all(getattr(cell, name) == value for name, value in wanted.items())]


def numbers_of_row(row: Mapping[str, Any], where: str) -> list[PublishedNumber]:
    """Published numbers of a ``[[published]]`` row of a recipe.

    Example:
        >>> row = {"dataset": "split-mnist", "strategy": "er", "norm": "bn", "values": {"acc": [90.1, 0.4]}}
        >>> [(cell.metric, cell.mean, cell.std) for cell in numbers_of_row(row, "own.toml")]
        [('acc', 90.1, 0.4)]
    """
    known = [*NAMED, *OPEN, "setting", "moments", "values"]
    for key in row:
        if key not in known:
            raise UserError(f"{where}: {unknown('key', key, known)}")
    for key in (*NAMED, "values"):
        if key not in row:
            raise UserError(f"{where}: the key {key!r} is missing. There are: {', '.join(known)}.")
    if not isinstance(row["values"], Mapping):
        raise UserError(f"{where}: values={row['values']!r} must be a table such as {{ acc = [90.1, 0.4] }}.")
    for metric, value in row["values"].items():
        _check_number(value, f"{where}: values.{metric}={show_value(value)}")
    return list(_cells("", row))


def _check_number(value: Any, where: str) -> None:
    """Check that a value is a mean, optionally followed by a standard deviation and a flag."""
    numbers, doubt = (value[:2], value[2:]) if isinstance(value, list) else ([], [])
    whole = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    if not numbers or not whole or len(doubt) > 1 or not all(isinstance(text, str) for text in doubt):
        raise UserError(f"{where} must be [mean], [mean, std] or [mean, std, reason for doubt].")
    if not all(abs(number) <= LARGEST for number in numbers) or any(std < 0 for std in numbers[1:]):
        raise UserError(f"{where} must be numbers of at most {LARGEST:g}, with a standard deviation of 0 or more.")


LARGEST = 1e12  # the square of a standard deviation must be finite

NAMED = ("dataset", "strategy", "norm")

OPEN = ("groups", "momentum", "buffer", "split")


def _cells(table: str, row: Mapping[str, Any]) -> Iterator[PublishedNumber]:
    optional: dict[str, Any] = {key: row.get(key) for key in OPEN}
    required: dict[str, Any] = {key: row[key] for key in NAMED}
    for metric, (mean, *rest) in row["values"].items():
        std, flag = [*rest, None, ""][:2] if not rest else [*rest, ""][:2]
        yield PublishedNumber(
            table=table,
            **required,
            **optional,
            moments=row.get("moments", "running"),
            setting=row.get("setting"),
            metric=metric,
            mean=mean,
            std=std,
            flag=flag or "",
        )


@cache
def _raw() -> dict[str, Any]:
    text = resources.files("contnorm.paper").joinpath("published.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


Verdict = Literal["agrees", "above", "below", "none"]


@dataclass(frozen=True)
class PublishedComparison:
    """Comparison of our runs with a published number.

    Attributes:
        mean: Our mean over seeds.
        std: Our sample standard deviation; NaN for one seed.
        difference: Our mean minus the published mean.
        interval: 95 % interval of the difference; None if it is undefined.
        verdict: ``"none"`` if there is no interval.
        how: ``"welch"``, from both standard deviations; ``"ours"``, from ours only, if none is published.
        why: Reason why there is no interval; empty if there is one.
    """

    mean: float
    std: float
    difference: float
    interval: Interval | None
    verdict: Verdict
    how: Literal["welch", "ours"]
    why: str = ""


def compare_published(values: Sequence[float], mean: float, std: float | None, runs: int = 5) -> PublishedComparison:
    """Compare our values, one per seed, with a published mean and standard deviation over ``runs`` runs.

    Example:
        >>> compare_published([10.0, 11.0, 12.0], 11.2, 1.0).verdict
        'agrees'
        >>> compare_published([10.0, 10.1, 9.9], 20.0, 0.1).verdict
        'below'
        >>> compare_published([10.0], 11.2, 1.0).verdict, compare_published([10.0, 11.0, 12.0], 11.2, None).how
        ('none', 'ours')
        >>> compare_published([10.0, 10.0], 11.2, 1.0).why, compare_published([10.0, 11.0], 11.2, 0.0).why
        ('our seeds are all equal', 'the published std is 0')
    """
    ours, spread = spread_over_seeds(list(values))
    how: Literal["welch", "ours"] = "ours" if std is None else "welch"
    why, interval = _no_interval_reason(values, spread, std), None
    if not why:
        differences = [value - mean for value in values]
        interval = t_interval(differences) if std is None else welch_interval(values, mean, std, runs)
    return PublishedComparison(ours, spread, ours - mean, interval, _verdict(interval), how, why)


def _no_interval_reason(values: Sequence[float], spread: float, std: float | None) -> str:
    """Reason why no interval can be computed; empty if it can."""
    if len(values) < 2:
        return "one seed"
    if math.isnan(spread):
        return "a seed has no value"
    if spread == 0:
        return "our seeds are all equal"
    return "the published std is 0" if std == 0 else ""


def _verdict(interval: Interval | None) -> Verdict:
    if interval is None:
        return "none"
    if interval.holds(0.0):
        return "agrees"
    return "above" if interval.low > 0 else "below"
