"""Figures of records as SVG, each with a description for screen readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from contnorm.bench.metrics.accuracy_matrix import acc_so_far
from contnorm.bench.records import Record, spread_over_seeds
from contnorm.bench.stats import t_interval
from contnorm.report.plot import COLOURS, Plot, Span

__all__ = [
    "accuracy_over_tasks",
    "curves_over_tasks",
    "drift_by_depth",
    "drift_over_tasks",
    "forgetting_parts",
    "forgetting_split",
    "paired_differences",
]

DISTANCE, MOMENTS = "L1 distance to exact moments", ("mean", "var")
DASHES = ("2 3", "7 4", "")  # line styles for the first, the middle and the last task


def accuracy_over_tasks(groups: Mapping[str, Sequence[Record]], title: str) -> str:
    """Mean accuracy on the tasks so far, after each task, with a band of one standard deviation over seeds."""
    curves = {name: [acc_so_far(record.matrix) for record in records] for name, records in groups.items()}
    return curves_over_tasks(curves, title, "accuracy on them, percent")


def curves_over_tasks(curves: Mapping[str, Sequence[Sequence[float]]], title: str, what: str) -> str:
    """Mean curves over seeds, by name, with bands of one standard deviation; ``curves`` has one curve per seed."""
    spreads = {name: _spreads(some) for name, some in curves.items()}
    ends = [mean + sign * (std if std == std else 0.0) for s in spreads.values() for mean, std in s for sign in (-1, 1)]
    tasks = max(len(spread) for spread in spreads.values())
    plot = Plot(title, Span.counted(tasks), Span.around(ends), "tasks learned", what)
    for number, spread in enumerate(spreads.values()):
        if not any(math.isnan(std) for _, std in spread):
            low, high = ([(i, mean + sign * std) for i, (mean, std) in enumerate(spread, 1)] for sign in (-1, 1))
            plot.band(low, high, number)
    for number, (name, spread) in enumerate(spreads.items()):
        plot.line([(i, mean) for i, (mean, _) in enumerate(spread, 1)], number, name=name)
    return plot.svg(f"At the end: {', '.join(f'{name} {spread[-1][0]:.2f}' for name, spread in spreads.items())}.")


def _spreads(curves: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Mean and deviation for the tasks that all curves have; with ``max_steps``, seeds may reach different tasks."""
    return [spread_over_seeds(list(values)) for values in zip(*curves, strict=False)]


def drift_over_tasks(records: Sequence[Record], title: str) -> str:
    """Distance of running moments from exact ones after each task: one curve per layer and moment."""
    layers = list(records[0].drift["by_task"][0])
    curves = {
        f"{layer} {moment}": [[after[layer][moment] for after in record.drift["by_task"]] for record in records]
        for layer in layers
        for moment in MOMENTS
    }
    return curves_over_tasks(curves, title, "L1 distance to exact moments")


def drift_by_depth(records: Sequence[Record], title: str) -> str:
    """Distance of running moments from exact ones by layer, after the first, the middle and the last task."""
    layers, tasks = list(records[0].drift["by_task"][0]), min(len(record.drift["by_task"]) for record in records)
    shown = sorted({0, (tasks - 1) // 2, tasks - 1})
    values = {
        (moment, after): [fmean(r.drift["by_task"][after][layer][moment] for r in records) for layer in layers]
        for moment in MOMENTS
        for after in shown
    }
    plot = Plot(title, Span.counted(len(layers)), _by_tens(values.values()), "norm layer, from the input on", DISTANCE)
    for number, moment in enumerate(MOMENTS):
        for after, dash in zip(shown, DASHES[-len(shown) :], strict=True):
            points = [(i, _tens(value)) for i, value in enumerate(values[moment, after], 1)]
            plot.line(points, number, dash, f"{moment}, after task {after + 1}", marks=False)
    ends = ((moment, values[moment, tasks - 1]) for moment in MOMENTS)
    summary = (f"{moment} {some[0]:.2f} in the first layer, {some[-1]:.2f} in the last" for moment, some in ends)
    return plot.svg(f"At the end: {'; '.join(summary)}.")


def _tens(value: float) -> float:
    """Scale that is linear for small and logarithmic for large values; distances range from hundredths to hundreds."""
    return math.log10(1 + value)


def _by_tens(values: Iterable[Sequence[float]]) -> Span:
    largest = max(max(some) for some in values)
    marks = [v for v in (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0) if v <= largest * 1.05]
    return Span(0.0, _tens(largest) * 1.05 or 1.0, tuple((_tens(value), f"{value:g}") for value in marks))


def forgetting_parts(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Forgetting of each task but the last, split into the part that exact moments recover and the rest.

    Needs records of runs with ``--eval-moments oracle``; returns means over them.
    """
    running = [matrix for record in records if (matrix := record.matrix_of("matrix_running")) is not None]
    last = min(matrix.tasks for matrix in running) - 1
    forgotten = [fmean(m.at(t, t) - m.at(last, t) for m in running) for t in range(last)]
    both = list(zip(records, running, strict=True))
    back = [fmean(record.matrix.at(last, t) - m.at(last, t) for record, m in both) for t in range(last)]
    return back, [whole - part for whole, part in zip(forgotten, back, strict=True)]


def forgetting_split(records: Sequence[Record], title: str) -> str:
    """Bars of the forgetting of each task: the part that exact moments recover (statistics), and the rest (weights)."""
    back, rest = forgetting_parts(records)
    forgotten = [a + b for a, b in zip(back, rest, strict=True)]
    places = range(1, len(forgotten) + 1)
    x, y = Span.counted(len(forgotten), room=0.5), Span.around([*forgotten, *rest], 0.0)
    plot = Plot(title, x, y, "task", "points forgotten at the end")
    plot.bars(places, [0.0] * len(rest), rest, COLOURS[0], "weights")
    plot.bars(places, rest, forgotten, "url(#hatch)", "statistics: exact moments give it back")
    plot.stroke((plot.x.low, 0.0), (plot.x.high, 0.0), None, 1.0)
    return plot.svg(f"Of {fmean(forgotten):.1f} points forgotten on average exact moments give {fmean(back):.1f} back.")


def paired_differences(pairs: Mapping[str, Sequence[float]], title: str, unit: str = "points of ACC") -> str:
    """Paired differences: each seed as a dot, the mean as a line, its 95 % interval as a bar."""
    intervals = {name: t_interval(differences) for name, differences in pairs.items()}
    values = [value for some in pairs.values() for value in some] + [v for i in intervals.values() if i for v in i]
    rows = tuple((float(-row), name) for row, name in enumerate(pairs))
    label = f"difference, {unit}, seed by seed; bar: 95 % interval of the mean"
    y = Span(-len(pairs) + 0.4, 0.6, rows)
    plot = Plot(title, Span.around(values, 0.0), y, label, height=76 + 36 * len(pairs), left=230)
    plot.stroke((0.0, y.low), (0.0, y.high), None, 1.0)
    for row, (name, differences) in enumerate(pairs.items()):
        interval, mean = intervals[name], fmean(differences)
        if interval is not None:
            plot.stroke((interval.low, -row), (interval.high, -row), row, 9.0, 0.3)
        plot.dots([(value, -row) for value in differences], row)
        plot.stroke((mean, -row - 0.3), (mean, -row + 0.3), row, 3.0)
    return plot.svg(f"Means: {'; '.join(f'{name} {fmean(some):+.2f}' for name, some in pairs.items())}.")
