"""Figures where pictures have several labels: scores by group of classes, and each class by how often it came."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from contnorm.bench.data.multilabel import GROUPS
from contnorm.bench.memory_stats import Census
from contnorm.bench.metrics.multilabel import LabelMatrix, mean_ap
from contnorm.bench.records import Record, spread_over_seeds
from contnorm.report.figures import curves_over_tasks
from contnorm.report.plot import Plot, Span

__all__ = ["ap_by_frequency", "ap_of_groups", "group_bars", "map_over_tasks"]

Points = dict[int, tuple[float, float]]  # by class: how often the stream showed it, and its average precision


def group_bars(values: Mapping[str, Sequence[Sequence[float]]], groups: Sequence[str], title: str, what: str) -> str:
    """Beside each other for each group of classes: the mean over seeds of each name, with one deviation up and down.

    Args:
        values: By name, for each of the groups, a score a seed.
        groups: What stands below the bars.
        title: Of the figure.
        what: Of the values.
    """
    spreads = {name: [_spread(some) for some in by_group] for name, by_group in values.items()}
    ends = [mean + sign * std for some in spreads.values() for mean, std in some for sign in (-1, 1)]
    marks = tuple((float(i), group) for i, group in enumerate(groups, 1))
    x = Span(0.5, len(groups) + 0.5, marks)
    plot = Plot(title, x, Span.around([end for end in ends if not math.isnan(end)], 0.0), "group of classes", what)
    width = 0.8 / len(spreads)
    for number, (name, some) in enumerate(spreads.items()):
        shift = (number - (len(spreads) - 1) / 2) * width
        there = [(i + shift, mean, std) for i, (mean, std) in enumerate(some, 1) if not math.isnan(mean)]
        plot.columns([(place, mean) for place, mean, _ in there], [std for *_, std in there], number, width, name)
    plot.stroke((x.low, 0.0), (x.high, 0.0), None, 1.0)
    said = (
        f"{group}: {', '.join(f'{name} {some[i][0]:.1f}' for name, some in spreads.items())}"
        for i, group in enumerate(groups)
    )
    return plot.svg(f"{'; '.join(said)}.".replace("nan", "none"))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """A single seed has no deviation to draw, and a group without test pictures nothing at all."""
    if not values:
        return math.nan, math.nan
    mean, std = spread_over_seeds(list(values))
    return mean, 0.0 if math.isnan(std) else std


def ap_of_groups(records: Sequence[Record], title: str) -> str:
    """Of one run: each class's average precision at the end against how often the stream showed it, by group."""
    points, groups = _points(records), records[0].raw["classes"]["groups"]
    own = {group: {c: point for c, point in points.items() if groups[c] == group} for group in GROUPS}
    return _scatter({group: some for group, some in own.items() if some}, records[0], title)


def ap_by_frequency(runs: Mapping[str, Sequence[Record]], title: str) -> str:
    """The same of several runs, told apart by name."""
    return _scatter({name: _points(records) for name, records in runs.items()}, next(iter(runs.values()))[0], title)


def _points(records: Sequence[Record]) -> Points:
    """Means over seeds; classes that were never shown or that no test picture has are left out."""
    shown = [Census.from_json(record.raw["census"]).shown[-1] for record in records]
    tallies = [_labels(record).tally[-1] for record in records]
    found: Points = {}
    for c in range(tallies[0].classes):
        often = fmean(counts[c] for counts in shown)
        aps = [ap for tally in tallies if (ap := tally.ap[c]) is not None]
        if often and aps:
            found[c] = (often, 100 * fmean(aps))
    return found


def _labels(record: Record) -> LabelMatrix:
    assert isinstance(record.counted, LabelMatrix)
    return record.counted


def _scatter(series: Mapping[str, Points], record: Record, title: str) -> str:
    """Marks of a colour and a shape a name; names without any class, as in a try of few steps, are left out."""
    there = {name: points for name, points in series.items() if points}
    placed = [point for points in there.values() for point in points.values()]
    often, found = [n for n, _ in placed] or [1.0], [ap for _, ap in placed]
    x, y = _by_tens(min(often), max(often)), Span.around(found, 0.0)
    plot = Plot(title, x, y, "training pictures of the class that the stream showed", "average precision, percent")
    names = record.raw["classes"]["names"]
    for number, (name, points) in enumerate(there.items()):
        told = [f"{names[c]}, {name}: {n:g} pictures, {ap:.1f}" for c, (n, ap) in points.items()]
        plot.scatter([(math.log10(n), ap) for n, ap in points.values()], number, name, told)
    said = (f"{name} {fmean(ap for _, ap in points.values()):.1f}, {len(points)}" for name, points in there.items())
    return plot.svg(f"Mean of the classes, and how many: {'; '.join(said) or 'none'}.")


def _by_tens(low: float, high: float) -> Span:
    """By powers of ten, marked at 1, 2 and 5 times each.

    Example:
        >>> [text for _, text in _by_tens(3, 40).marks]
        ['5', '10', '20']
    """
    ends = Span.around([math.log10(low), math.log10(high)])
    marks = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]
    inside = [mark for mark in marks if low <= mark <= high]
    return Span(ends.low, ends.high, tuple((math.log10(mark), str(mark)) for mark in inside) or ((ends.low, ""),))


def map_over_tasks(groups: Mapping[str, Sequence[Record]], title: str) -> str:
    """mAP on the test pictures of the tasks so far, after each task; a band of one standard deviation over seeds."""
    curves = {name: [[mean_ap(row) for row in _labels(r).tally] for r in records] for name, records in groups.items()}
    return curves_over_tasks(curves, title, "mAP on their pictures, percent")
