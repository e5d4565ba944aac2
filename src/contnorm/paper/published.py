"""Published numbers of the paper's tables, and the comparison of our runs with them.

Norms, strategies and streams have the names of this package. ``momentum`` is None for a norm's default, ``groups`` and
``buffer`` are None if the paper does not state them or they do not apply, ``moments`` is ``"oracle"`` for BN*. Doubtful
numbers have a flag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from contnorm.bench.records import spread_over_seeds
from contnorm.bench.stats import Interval, t_interval, welch_interval

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


def find(**wanted: Any) -> list[PublishedNumber]:
    """Published numbers whose fields equal the given values.

    Example:
        >>> [cell.mean for cell in find(table="2", dataset="split-cifar100", strategy="er", norm="cn", metric="acc")]
        [67.48]
    """
    return [one for one in published() if all(getattr(one, key) == wanted[key] for key in wanted)]


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
    why = "the published std is 0" if std == 0 else ""  # without a spread an interval would have no width
    if len(values) < 2 or math.isnan(spread) or spread == 0:
        why = "one seed" if len(values) < 2 else "a seed has no value" if spread else "our seeds are all equal"
    interval: Interval | None = None
    verdict: Verdict = "none"
    if not why:
        interval = t_interval([v - mean for v in values]) if std is None else welch_interval(values, mean, std, runs)
    if interval is not None:
        verdict = "agrees" if interval.holds(0.0) else "above" if interval.low > 0 else "below"
    return PublishedComparison(ours, spread, ours - mean, interval, verdict, how, why)
