"""Figure of a sweep: the mean score of each setting over a numeric setting, one curve per combination of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from contnorm.bench.figures import COLORS, MARKERS, with_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Point", "sweep_figure"]


MOST_TICKS = 6  # with more, labels that are not rotated would overlap


@dataclass(frozen=True)
class Point:
    """A setting in the figure.

    Attributes:
        curve: Name of its curve.
        x: Its value on the axis: a number, or a name.
        mean: Mean score; NaN if no seed finished.
        std: Standard deviation over seeds; NaN for one seed.
        usable: Whether all seeds finished; a diverged setting is drawn as a cross, and not connected.
        best: Whether it is the chosen one.
    """

    curve: str
    x: float | str
    mean: float
    std: float
    usable: bool
    best: bool


def sweep_figure(points: Sequence[Point], x_label: str, y_label: str, title: str | None = None) -> Figure:
    """Draw the score of each setting, with its standard deviation; chosen settings are circled.

    Args:
        points: The settings, in the order of their curves.
        x_label: Name of the setting on the axis.
        y_label: Name of the score.
        title: Title of the figure.

    Example:
        >>> points = [Point("bn", lr, mean, 1.0, True, lr == 0.1) for lr, mean in ((0.01, 60.0), (0.1, 64.0))]
        >>> ax = sweep_figure(points, "lr", "ACC (percent)").axes[0]
        >>> ax.get_xscale(), ax.lines[0].get_ydata().tolist()
        ('log', [60.0, 64.0])
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 4.2), layout="constrained")
    ax = drawn.add_subplot()
    names = list(dict.fromkeys(point.x for point in points))
    numbers = [x for x in names if not isinstance(x, str)]
    if len(numbers) < len(names):  # names have no scale: one tick each
        ax.set_xticks(range(len(names)), [str(name) for name in names])
    elif all(x > 0 for x in numbers):
        ax.set_xscale("log")
        ax.set_xticks(sorted(numbers), [f"{x:g}" for x in sorted(numbers)])
        ax.set_xticks([], minor=True)
    if len(names) > MOST_TICKS:
        ax.tick_params(axis="x", rotation=60)
    for index, curve in enumerate(dict.fromkeys(point.curve for point in points)):
        chosen = [point for point in points if point.curve == curve]
        places = names if len(numbers) < len(names) else None
        _draw_curve(ax, chosen, places, curve, index)
    _draw_unusable(ax, points, names if len(numbers) < len(names) else None)
    ax.set_xlabel(x_label, parse_math=False)
    ax.set_ylabel(y_label, parse_math=False)
    for text in ax.legend().get_texts():
        text.set_parse_math(False)
    if title:
        ax.set_title(title, parse_math=False, fontsize="medium")
    return with_png(drawn)


def _place(point: Point, names: Sequence[float | str] | None) -> float:
    """Position of a point on the axis; ``names`` are the ticks of an axis without a scale."""
    return float(point.x) if names is None else names.index(point.x)


def _draw_curve(ax: Axes, points: Sequence[Point], names: Sequence[float | str] | None, label: str, index: int) -> None:
    usable = [point for point in points if point.usable and not math.isnan(point.mean)]
    usable.sort(key=lambda point: _place(point, names))
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    x, y = [_place(point, names) for point in usable], [point.mean for point in usable]
    ax.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.8 if names is None else 0, label=label)
    spread = [0.0 if math.isnan(point.std) else point.std for point in usable]
    ax.errorbar(x, y, yerr=spread, color=color, linewidth=0, elinewidth=1, capsize=3)
    for point in usable:
        if point.best:
            ax.plot(
                _place(point, names),
                point.mean,
                marker="o",
                markersize=13,
                markerfacecolor="none",
                color=color,
                zorder=4,
            )


def _draw_unusable(ax: Axes, points: Sequence[Point], names: Sequence[float | str] | None) -> None:
    """Draw a cross at the bottom for each setting with a diverged or missing seed."""
    places = sorted({_place(point, names) for point in points if not point.usable})
    if places:
        bottom = [0.02] * len(places)
        ax.plot(
            places, bottom, "x", color="#555555", transform=ax.get_xaxis_transform(), label="diverged or unfinished"
        )
