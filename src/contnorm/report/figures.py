"""Figures of the report from plain numbers, drawn with matplotlib; `contnorm.report.svg` puts them on the page.

All have a transparent background. Series differ in marker, dash or hatching as well as in color. Sizes are in pixels.
Curves and heat maps are those of `contnorm.bench.figures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from contnorm.bench.escape import escape_terminal, shorten
from contnorm.bench.figures import COLORS, MARKERS, accuracy_matrix, curve_with_band
from contnorm.report.svg import with_figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "accuracy_matrix_heatmap",
    "class_scatter",
    "curves_over_tasks",
    "drift_by_depth",
    "forgetting_bars",
    "group_bars",
    "memory_panels",
    "paired_differences",
    "score_by_rate",
]

WIDTH, TOP, BOTTOM, RIGHT, LEFT = 640, 30, 50, 14, 58
LEGEND_LINE = 18
LETTER = 6.6  # width of a character of 12 pixels, on average
LONGEST_NAME = 80  # characters of a name in a legend or at a row
LONGEST_TITLE = 84  # characters of a line of a title
INK = "#000000"  # becomes the text color of the page
DASHES: tuple[Any, ...] = ((0, (1, 1.6)), (0, (4, 2.2)), "-")  # for the first, the middle and the last task
CELL, COLOR_BAR = 26, 90  # sides of a cell of a heat map, and room for its color bar
PANEL, PANEL_GAP = 92, 16
SHARES = (0.0, 1.0, 5.0, 10.0, 20.0, 40.0, 60.0, 100.0)
DISTANCES = (0.0, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@with_figure_style
def curves_over_tasks(curves: Mapping[str, Sequence[Sequence[float]]], title: str, ylabel: str) -> Figure:
    """Curves over the number of tasks learned: means over seeds, with a band of one standard deviation.

    Args:
        curves: For each name, one curve per seed; the points that all seeds have are drawn.
        title: Title of the figure.
        ylabel: Label of the value axis.
    """
    arrays = {name: np.array(list(zip(*some, strict=False)), dtype=np.float64).T for name, some in curves.items()}
    figure, ax = _axes(title, "tasks learned", ylabel, legend=list(arrays))
    for index, (name, values) in enumerate(arrays.items()):
        curve_with_band(ax, np.arange(1, values.shape[1] + 1), values, name, index)
    deviations = [values.std(0, ddof=1) if len(values) > 1 else 0.0 for values in arrays.values()]
    means = [values.mean(0) for values in arrays.values()]
    ends = [m + sign * s for m, s in zip(means, deviations, strict=True) for sign in (-1, 1)]
    _count_ticks(ax, max(values.shape[1] for values in arrays.values()))
    ax.set_ylim(*_limits(np.concatenate(ends)))
    _legend(figure, ax.lines, list(arrays))
    return figure


@with_figure_style
def score_by_rate(points: Mapping[str, Sequence[tuple[float, float, float]]], title: str, ylabel: str) -> Figure:
    """Curves of a score over the learning rate, on a logarithmic axis, with bands of one standard deviation.

    Args:
        points: For each name, learning rate, mean and standard deviation of the score, by increasing learning rate.
        title: Title of the figure.
        ylabel: Label of the value axis.
    """
    figure, ax = _axes(title, "learning rate, logarithmic scale", ylabel, legend=list(points))
    for index, some in enumerate(points.values()):
        rates, means, deviations = np.array(some, dtype=np.float64).T
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        ax.fill_between(rates, means - deviations, means + deviations, color=color, alpha=0.18, linewidth=0)
        ax.plot(rates, means, color=color, marker=marker, markersize=5, linewidth=1.8)
    every = np.array([point for some in points.values() for point in some], dtype=np.float64)
    rates = np.unique(every[:, 0])
    ax.set_xscale("log")
    ax.set_xlim(*np.power(10, _limits(np.log10(rates))))
    ticks = _spaced_ticks(np.log10(rates))
    ax.set_xticks(np.power(10, ticks), [f"{10**tick:.4g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_ylim(*_limits([*(every[:, 1] - every[:, 2]), *(every[:, 1] + every[:, 2])]))
    _legend(figure, ax.lines, list(points))
    return figure


def _spaced_ticks(places: Sequence[float] | npt.NDArray[np.float64]) -> list[float]:
    """Places whose labels do not overlap: at least a twelfth of the axis apart.

    Example:
        >>> _spaced_ticks([0.0, 0.01, 1.0])
        [0.0, 1.0]
    """
    least = (places[-1] - places[0]) / 12
    ticks: list[float] = []
    for place in map(float, places):
        if not ticks or place - ticks[-1] >= least:
            ticks.append(place)
    return ticks


@with_figure_style
def accuracy_matrix_heatmap(matrix: npt.ArrayLike, title: str, what: str = "accuracy") -> Figure:
    """Heat map of a matrix of percentages (tasks, tasks) with a color bar; cells with NaN are empty."""
    values = np.asarray(matrix, dtype=np.float64)
    side = len(values) * CELL
    left, below, bar = 46, 42, min(side, 160)
    width, height = max(left + side + COLOR_BAR, 260), TOP + side + below
    figure = _figure(width, height)
    ax = figure.add_axes((left / width, below / height, side / width, side / height))
    mesh = accuracy_matrix(ax, values, what)
    figure.text(left / width, 1 - 16 / height, escape_terminal(title), fontsize=13, va="baseline")
    # The color bar is a second mesh right of the cells: axes of its own would take half of the time of the figure.
    edges, colors = np.linspace(bar / CELL, 0, 11), np.arange(5.0, 100.0, 10.0)[:, None]
    x = len(values) + 24 / CELL
    ax.pcolormesh([x, x + 12 / CELL], edges, colors, cmap=mesh.cmap, vmin=0, vmax=100, clip_on=False)
    ax.set(xlim=(0, len(values)), ylim=(len(values), 0))
    for percent in (0, 50, 100):
        ax.text(x + 17 / CELL, bar / CELL * (1 - percent / 100), f"{percent} %", va="center")
    return figure


@with_figure_style
def drift_by_depth(distances: Mapping[str, Mapping[int, Sequence[float]]], title: str, ylabel: str) -> Figure:
    """Distances by layer, from the input on; linear for small and logarithmic for large distances.

    Args:
        distances: For each moment, by the number of tasks learned (at most three), the distance of each layer.
        title: Title of the figure.
        ylabel: Label of the distance.
    """
    names = [f"{moment}, after task {task}" for moment, by_task in distances.items() for task in by_task]
    figure, ax = _axes(title, "norm layer, from the input on", ylabel, legend=names)
    for index, by_task in enumerate(distances.values()):
        for values, dash in zip(by_task.values(), DASHES[-len(by_task) :], strict=True):
            places = np.arange(1, len(values) + 1)
            ax.plot(places, np.asarray(values), color=COLORS[index], linestyle=dash, linewidth=1.8)
    each = [np.asarray(values) for by_task in distances.values() for values in by_task.values()]
    largest = max(float(np.max(values)) for values in each)
    ax.set_yscale("function", functions=(np.log1p, np.expm1))
    ax.set_ylim(0, math.expm1(math.log1p(largest) * 1.05) or 1.0)
    marks = [mark for mark in DISTANCES if mark <= largest * 1.05]
    ax.set_yticks(marks, [f"{mark:g}" for mark in marks])
    ax.minorticks_off()
    _count_ticks(ax, len(each[0]))
    _legend(figure, ax.lines, names)
    return figure


@with_figure_style
def forgetting_bars(recovered: Sequence[float], remaining: Sequence[float], title: str) -> Figure:
    """Stacked bars of the forgetting of each task: the part in the weights, and the part that exact moments recover."""
    names = ["weights", "statistics: recovered by exact moments"]
    figure, ax = _axes(title, "task", "points forgotten at the end", legend=names)
    places = np.arange(1, len(remaining) + 1)
    rest, back = np.asarray(remaining, dtype=np.float64), np.asarray(recovered, dtype=np.float64)
    weights = ax.bar(places, rest, 0.66, color=COLORS[0])
    statistics = ax.bar(places, back, 0.66, bottom=rest, color=COLORS[1], hatch="///", edgecolor="#332211", linewidth=0)
    ax.axhline(0, color=INK, linewidth=1)
    _count_ticks(ax, len(rest), room=0.5)
    ax.set_ylim(*_limits(np.concatenate([rest, rest + back, [0.0]])))
    _legend(figure, [weights, statistics], names)
    return figure


@with_figure_style
def paired_differences(
    pairs: Mapping[str, Sequence[float]],
    intervals: Mapping[str, tuple[float, float] | None],
    title: str,
    xlabel: str,
) -> Figure:
    """Paired differences, one row per name: each seed as a dot, the mean as a line, its interval as a bar."""
    figure, ax = _axes(title, xlabel, "", height=76 + 36 * len(pairs), left=230)
    ax.axvline(0, color=INK, linewidth=1)
    ends: list[float] = [0.0]
    for row, (name, differences) in enumerate(pairs.items()):
        color, values, interval = COLORS[row % len(COLORS)], np.asarray(differences), intervals[name]
        ends += [*values, *(interval or ())]
        if interval is not None:
            ax.plot(interval, [row, row], color=color, linewidth=9, alpha=0.3)
        ax.scatter(values, np.full(len(values), row), s=50, color=color, alpha=0.75, linewidths=0)
        ax.plot([values.mean()] * 2, [row - 0.3, row + 0.3], color=color, linewidth=3)
    ax.set_xlim(*_limits(ends))
    ax.set_ylim(len(pairs) - 0.4, -0.6)
    ax.set_yticks(range(len(pairs)), [""] * len(pairs))
    _name_rows(ax, list(pairs), letters=230 // 7)
    return figure


@with_figure_style
def group_bars(
    values: Mapping[str, Sequence[tuple[float, float]]], groups: Sequence[str], title: str, ylabel: str
) -> Figure:
    """Grouped bars with error bars.

    Args:
        values: For each series, mean and standard deviation in each group; a NaN mean has no bar.
        groups: Names of the groups.
        title: Title of the figure.
        ylabel: Label of the value axis.
    """
    figure, ax = _axes(title, "group of classes", ylabel, legend=list(values))
    width = 0.8 / len(values)
    handles, ends = [], [0.0]
    for index, some in enumerate(values.values()):
        color = COLORS[index % len(COLORS)]
        offset = (index - (len(values) - 1) / 2) * width
        bars = [(place + offset, m, s) for place, (m, s) in enumerate(some, 1) if not math.isnan(m)]
        places, means, deviations = (
            (np.array(column) for column in zip(*bars, strict=True)) if bars else [np.empty(0)] * 3
        )
        drawn = ax.bar(places, means, 0.9 * width, color=color, alpha=0.55)
        spread = deviations > 0
        ax.vlines(places[spread], (means - deviations)[spread], (means + deviations)[spread], color=INK, linewidth=1.2)
        (tops,) = ax.plot(places, means, color=color, marker=MARKERS[index % len(MARKERS)], markersize=6, linestyle="")
        handles.append((drawn, tops))
        ends += [*(means - deviations), *(means + deviations)]
    ax.axhline(0, color=INK, linewidth=1)
    ax.set_xlim(0.5, len(groups) + 0.5)
    ax.set_xticks(range(1, len(groups) + 1), [escape_terminal(group) for group in groups])
    ax.set_ylim(*_limits(ends))
    _legend(figure, handles, list(values))
    return figure


@with_figure_style
def class_scatter(series: Mapping[str, Sequence[tuple[float, float]]], title: str) -> Figure:
    """Average precision of classes against how often they were shown, on a logarithmic axis.

    Args:
        series: For each name, the count and the average precision in percent of each class. The markers of the
            series with number i have the gid ``series-i``, for tooltips.
        title: Title of the figure.
    """
    xlabel, ylabel = "training images of the class in the stream", "average precision, percent"
    figure, ax = _axes(title, xlabel, ylabel, legend=list(series))
    points = np.array([point for some in series.values() for point in some] or [(1.0, math.nan)])
    low, high = points[:, 0].min(), points[:, 0].max()
    ax.set_xscale("log")
    ax.set_xlim(*np.power(10, _limits(np.log10([low, high]))))
    ticks = [factor * 10**power for power in range(7) for factor in (1, 2, 5) if low <= factor * 10**power <= high]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()
    handles = []
    for index, some in enumerate(series.values()):
        x, y = np.array(some).T
        marker, color = MARKERS[index % len(MARKERS)], COLORS[index % len(COLORS)]
        handles.append(ax.scatter(x, y, s=38, marker=marker, color=color, linewidths=0, gid=f"series-{index}"))
    ax.set_ylim(*_limits([*points[:, 1], 0.0]))
    _legend(figure, handles, list(series))
    return figure


@with_figure_style
def memory_panels(held: npt.ArrayLike, shown: npt.ArrayLike, title: str) -> Figure:
    """Share of each class in the memory and in the stream so far, with one panel per task and a square-root scale.

    Args:
        held: Percentages of the labels in the memory, of shape (tasks, classes).
        shown: Percentages of the labels in the stream so far, of the same shape; classes are drawn in this order.
        title: Title of the figure.
    """
    memory, stream = np.asarray(held, dtype=np.float64), np.asarray(shown, dtype=np.float64)
    tasks, classes = memory.shape
    top = float(max(memory.max(initial=0), stream.max(initial=0))) * 1.05 or 1.0
    above, below = 40, 62
    height = above + (PANEL + PANEL_GAP) * tasks + below
    figure = _figure(WIDTH, height)
    _title(figure, title)
    marks = _apart([mark for mark in SHARES if mark <= top], top)
    names = ["in the memory", "in the stream so far"]
    handles: list[Any] = []
    for task in range(tasks):
        bottom = height - above - (PANEL + PANEL_GAP) * task - PANEL
        ax = figure.add_axes((LEFT / WIDTH, bottom / height, (WIDTH - LEFT - RIGHT) / WIDTH, PANEL / height))
        places = np.flatnonzero(memory[task])
        bars = ax.bar(places + 0.5, memory[task][places], 0.8, color=COLORS[0])
        line = ax.stairs(stream[task], np.arange(classes + 1), color=COLORS[1], linewidth=1.8, baseline=None)
        handles = [bars, line]
        ax.set_yscale("function", functions=(lambda v: np.sqrt(np.maximum(v, 0)), np.square))
        ax.set(xlim=(0, max(classes, 1)), ylim=(0, top), xticks=[])
        ax.set_yticks(marks, [f"{mark:g}" for mark in marks])
        ax.text(1, 0.98, f"after task {task + 1}", ha="right", va="top", transform=ax.transAxes)
    label = "class, from the most to the least frequent in the stream"
    figure.text((LEFT + WIDTH - RIGHT) / 2 / WIDTH, (below + PANEL_GAP - 20) / height, label, ha="center")
    middle = (below + (height - above)) / 2 / height
    figure.text(
        14 / WIDTH, middle, "percent of all labels, square-root scale", rotation=90, rotation_mode="anchor", ha="center"
    )
    _legend(figure, handles, names)
    return figure


def _apart(marks: Sequence[float], top: float) -> list[float]:
    """Ticks of a square-root scale whose labels do not overlap."""
    shown: list[float] = []
    for mark in marks:
        if not shown or PANEL * (math.sqrt(mark / top) - math.sqrt(shown[-1] / top)) >= 13:
            shown.append(mark)
    return shown


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width / 72, height / 72), dpi=72)


def _axes(
    title: str, xlabel: str, ylabel: str, height: int = 360, left: int = LEFT, legend: Sequence[str] = ()
) -> tuple[Figure, Axes]:
    """Figure with one pair of axes, and room for the lines of the title and of the legend."""
    above = TOP + 15 * (len(_title_lines(title)) - 1)
    below = BOTTOM + LEGEND_LINE * _legend_rows(legend)
    total = height - TOP - BOTTOM + above + below
    figure = _figure(WIDTH, total)
    ax = figure.add_axes((left / WIDTH, below / total, (WIDTH - RIGHT - left) / WIDTH, (total - above - below) / total))
    _title(figure, title)
    # A long label is moved to the left, so that it stays inside the figure.
    middle = min((left + WIDTH - RIGHT) / 2, WIDTH - LETTER / 2 * len(xlabel) - 4)
    figure.text(middle / WIDTH, (below - 35) / total, escape_terminal(xlabel), ha="center")
    if ylabel:
        center = (total - above + below) / 2 / total
        figure.text(14 / WIDTH, center, escape_terminal(ylabel), rotation=90, rotation_mode="anchor", ha="center")
    return figure, ax


def _title_lines(title: str) -> list[str]:
    return wrap(escape_terminal(title), LONGEST_TITLE) or [""]


def _title(figure: Figure, title: str) -> None:
    """One text per line: matplotlib would align several lines by the widths of its own font, not the browser's."""
    height = figure.get_figheight() * 72
    for number, line in enumerate(_title_lines(title)):
        figure.text(0.5, 1 - (16 + 15 * number) / height, line, ha="center", fontsize=14)


def _legend_columns(names: Sequence[str]) -> int:
    """Number of columns that fit below the axes; a column is as wide as its longest name."""
    widths = [50 + LETTER * min(len(name), LONGEST_NAME) for name in names]
    for rows in range(1, len(widths)):
        if sum(max(widths[first : first + rows]) for first in range(0, len(widths), rows)) <= WIDTH - LEFT:
            return math.ceil(len(widths) / rows)
    return 1


def _legend_rows(names: Sequence[str]) -> int:
    return math.ceil(len(names) / _legend_columns(names)) if names else 0


def _legend(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Legend below the axes; room for it was made by `_axes`."""
    if not names:
        return
    height = figure.get_figheight() * 72
    labels = [shorten(escape_terminal(name), LONGEST_NAME) for name in names]
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(LEFT / WIDTH, LEGEND_LINE * _legend_rows(names) / height + 2 / height),
        ncols=_legend_columns(names),
        borderaxespad=0,
        borderpad=0,
        handlelength=1.9,
        handletextpad=0.6,
        columnspacing=1.3,
        labelspacing=(LEGEND_LINE - 12 * 1.164) / 12,
    )


def _limits(values: npt.ArrayLike, room: float = 0.05) -> tuple[float, float]:
    """Range of the finite values with a margin.

    Example:
        >>> _limits([0.0, 10.0, float("nan")])
        (-0.5, 10.5)
    """
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    margin = (high - low) * room or abs(high) * room or 1.0
    return low - margin, high + margin


def _count_ticks(ax: Axes, count: int, room: float = 0.3) -> None:
    """Ticks at the integers from 1 on; of many, only some."""
    ax.set_xlim(1 - room, count + room)
    ax.set_xticks(range(1, count + 1, 1 if count <= 12 else 2 if count <= 24 else 5))


def _name_rows(ax: Axes, names: Sequence[str], letters: int) -> None:
    """Names of rows left of the axes, wrapped; one text per line, as in `_title`."""
    for row, name in enumerate(names):
        lines = wrap(shorten(escape_terminal(name), LONGEST_NAME), letters) or [""]
        for number, line in enumerate(lines):
            offset = (-7, -4 + 7 * (len(lines) - 1) - 14 * number)
            ax.annotate(
                line, (0, row), offset, xycoords=ax.get_yaxis_transform(), textcoords="offset points", ha="right"
            )
