"""Figures of multi-label streams: scores by group of classes, and average precision by class frequency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from contnorm.bench.data.dataset import GROUPS
from contnorm.bench.memory_stats import Census
from contnorm.bench.metrics.multilabel import LabelMatrix, mean_ap
from contnorm.bench.records import Record, spread_over_seeds
from contnorm.report.figures import curves_over_tasks
from contnorm.report.plot import Plot, Span

__all__ = ["ap_by_frequency", "ap_of_groups", "group_bars", "map_over_tasks"]

Points = dict[int, tuple[float, float]]  # by class: its count in the stream, and its average precision


def group_bars(values: Mapping[str, Sequence[Sequence[float]]], groups: Sequence[str], title: str, what: str) -> str:
    """Grouped bars: for each group of classes, the mean over seeds of each series with its standard deviation.

    Args:
        values: Scores of each seed, by series name and then by group.
        groups: Names of the groups.
        title: Title of the figure.
        what: Label of the value axis.
    """
    spreads = {name: [_spread(some) for some in by_group] for name, by_group in values.items()}
    ends = [mean + sign * std for some in spreads.values() for mean, std in some for sign in (-1, 1)]
    marks = tuple((float(i), group) for i, group in enumerate(groups, 1))
    x = Span(0.5, len(groups) + 0.5, marks)
    plot = Plot(title, x, Span.around([end for end in ends if not math.isnan(end)], 0.0), "group of classes", what)
    width = 0.8 / len(spreads)
    for number, (name, some) in enumerate(spreads.items()):
        shift = (number - (len(spreads) - 1) / 2) * width
        bars = [(i + shift, mean, std) for i, (mean, std) in enumerate(some, 1) if not math.isnan(mean)]
        plot.columns([(place, mean) for place, mean, _ in bars], [std for *_, std in bars], number, width, name)
    plot.stroke((x.low, 0.0), (x.high, 0.0), None, 1.0)
    summary = (
        f"{group}: {', '.join(f'{name} {some[i][0]:.1f}' for name, some in spreads.items())}"
        for i, group in enumerate(groups)
    )
    return plot.svg(f"{'; '.join(summary)}.".replace("nan", "none"))


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and deviation; the deviation of a single seed is 0, and a group without test images has NaN for both."""
    if not values:
        return math.nan, math.nan
    mean, std = spread_over_seeds(list(values))
    return mean, 0.0 if math.isnan(std) else std


def ap_of_groups(records: Sequence[Record], title: str) -> str:
    """Final average precision of each class of one run against its count in the stream, coloured by group."""
    points, groups = _points(records), records[0].raw["classes"]["groups"]
    by_group = {group: {c: point for c, point in points.items() if groups[c] == group} for group in GROUPS}
    return _scatter({group: some for group, some in by_group.items() if some}, records[0], title)


def ap_by_frequency(runs: Mapping[str, Sequence[Record]], title: str) -> str:
    """Final average precision of each class of several runs against its count in the stream, coloured by run."""
    return _scatter({name: _points(records) for name, records in runs.items()}, next(iter(runs.values()))[0], title)


def _points(records: Sequence[Record]) -> Points:
    """Means over seeds; classes without training or test images are left out."""
    shown = [Census.from_json(record.raw["census"]).shown[-1] for record in records]
    tallies = [_labels(record).tally[-1] for record in records]
    points: Points = {}
    for c in range(tallies[0].classes):
        often = fmean(counts[c] for counts in shown)
        aps = [ap for tally in tallies if (ap := tally.ap[c]) is not None]
        if often and aps:
            points[c] = (often, 100 * fmean(aps))
    return points


def _labels(record: Record) -> LabelMatrix:
    assert isinstance(record.counted, LabelMatrix)
    return record.counted


def _scatter(series: Mapping[str, Points], record: Record, title: str) -> str:
    """Scatter plot with a colour and marker per series; series without any class are left out."""
    shown = {name: points for name, points in series.items() if points}
    placed = [point for points in shown.values() for point in points.values()]
    counts, precisions = [n for n, _ in placed] or [1.0], [ap for _, ap in placed]
    x, y = _by_tens(min(counts), max(counts)), Span.around(precisions, 0.0)
    plot = Plot(title, x, y, "training pictures of the class that the stream showed", "average precision, percent")
    names = record.raw["classes"]["names"]
    for number, (name, points) in enumerate(shown.items()):
        tooltips = [f"{names[c]}, {name}: {n:g} pictures, {ap:.1f}" for c, (n, ap) in points.items()]
        plot.scatter([(math.log10(n), ap) for n, ap in points.values()], number, name, tooltips)
    summary = (f"{name} {fmean(ap for _, ap in points.values()):.1f}, {len(points)}" for name, points in shown.items())
    return plot.svg(f"Mean of the classes, and how many: {'; '.join(summary) or 'none'}.")


def _by_tens(low: float, high: float) -> Span:
    """Logarithmic axis, with ticks at 1, 2 and 5 times each power of ten.

    Example:
        >>> [text for _, text in _by_tens(3, 40).marks]
        ['5', '10', '20']
    """
    ends = Span.around([math.log10(low), math.log10(high)])
    marks = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]
    inside = [mark for mark in marks if low <= mark <= high]
    return Span(ends.low, ends.high, tuple((math.log10(mark), str(mark)) for mark in inside) or ((ends.low, ""),))


def map_over_tasks(groups: Mapping[str, Sequence[Record]], title: str) -> str:
    """mAP on the test images of the tasks so far, after each task, with a band of one standard deviation over seeds."""
    curves = {name: [[mean_ap(row) for row in _labels(r).tally] for r in records] for name, records in groups.items()}
    return curves_over_tasks(curves, title, "mAP on their pictures, percent")
