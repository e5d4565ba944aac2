"""Figures of runs with matplotlib: accuracy over tasks, accuracy matrices as heat maps.

Matplotlib is imported when something is drawn. Figures are not of pyplot, so there is no global state and no display.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#4477aa", "#ee7733", "#228833", "#c24d8c", "#66a5c9", "#b59f2a", "#8a8a8a", "#7a5cc0", "#cc6677")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p")  # one per color, for readers who can't distinguish colors
MOST_NUMBERS = 10  # tasks; with more, the numbers in the cells would not be readable


def curve_with_band(
    ax: Axes, x: npt.ArrayLike, curves: npt.ArrayLike, label: str | None = None, index: int = 0
) -> None:
    """Draw the mean of curves with markers, and a band of one standard deviation if there are several curves.

    Args:
        ax: Axes to draw on.
        x: Positions of the points, of shape (points,).
        curves: One curve per seed, of shape (seeds, points).
        label: Entry in the legend.
        index: Number of the series, which selects its color and marker.
    """
    values = np.atleast_2d(np.asarray(curves, dtype=np.float64))
    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    mean = values.mean(0)
    if len(values) > 1:
        std = values.std(0, ddof=1)
        ax.fill_between(np.asarray(x), mean - std, mean + std, color=color, alpha=0.18, linewidth=0)
    ax.plot(np.asarray(x), mean, color=color, marker=marker, markersize=5, linewidth=1.8, label=label)


def accuracy_curve(ax: Axes, matrices: npt.ArrayLike, label: str | None = None) -> None:
    """Draw the mean accuracy on the tasks so far, after each task, with a band of one standard deviation over seeds.

    Several calls on the same axes take different colors.

    Args:
        ax: Axes to draw on.
        matrices: Accuracy in percent, of shape (seeds, tasks, tasks): entry [s, i, j] is the accuracy of seed s on
            task j after task i, and NaN above the diagonal.
        label: Entry in the legend.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().add_subplot()
        >>> accuracy_curve(ax, [[[90.0, float("nan")], [70.0, 80.0]]], "BN")
        >>> ax.lines[0].get_ydata().tolist()
        [90.0, 75.0]
    """
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(matrices, dtype=np.float64)
    tasks = values.shape[1]
    curves = np.stack([values[:, i, : i + 1].mean(1) for i in range(tasks)], axis=1)
    curve_with_band(ax, np.arange(1, tasks + 1), curves, label, index=len(ax.lines))
    ax.set(xlabel="tasks learned", ylabel="accuracy on these tasks (percent)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if tasks == 1:
        ax.set_xticks([1])


def accuracy_matrix(ax: Axes, matrix: npt.ArrayLike, what: str = "accuracy") -> Any:
    """Draw an accuracy matrix as a heat map from 0 to 100 percent, with its numbers if there are few tasks.

    Args:
        ax: Axes to draw on.
        matrix: Accuracy in percent, of shape (tasks, tasks); NaN cells stay empty. With three dimensions, the mean
            over the first one (the seeds) is drawn.
        what: Name of the score, for the label of the axis.

    Returns:
        The mesh, for a color bar.

    Example:
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().add_subplot()
        >>> mesh = accuracy_matrix(ax, [[90.0, float("nan")], [70.0, 80.0]])
        >>> [text.get_text() for text in ax.texts]
        ['90', '70', '80']
    """
    values = np.asarray(matrix, dtype=np.float64)
    values = values if values.ndim == 2 else values.mean(0)
    tasks = len(values)
    # The mesh is clipped to the axes by construction; without a clip path the SVG is smaller.
    mesh = ax.pcolormesh(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=100, clip_on=False)
    if tasks <= MOST_NUMBERS:
        for i, j in zip(*np.nonzero(np.isfinite(values)), strict=True):
            color = "#ffffff" if values[i, j] < 60 else "#111111"
            ax.text(j + 0.5, i + 0.5, f"{values[i, j]:.0f}", color=color, ha="center", va="center", fontsize="small")
    step = 1 if tasks <= MOST_NUMBERS else 4
    ticks = np.arange(0, tasks, step)
    ax.set_xticks(ticks + 0.5, [str(i + 1) for i in ticks])
    ax.set_yticks(ticks + 0.5, [str(i + 1) for i in ticks])
    ax.tick_params(length=0)
    ax.set(xlabel=f"{what} on task", ylabel="after task", xlim=(0, tasks), ylim=(tasks, 0), aspect="equal")
    ax.spines[:].set_visible(False)
    return mesh


def figure(results: Sequence[npt.ArrayLike], labels: Sequence[str]) -> Figure:
    """Figure of one run or several: accuracy over tasks in one axes and, next to it, the mean accuracy matrix of each.

    Args:
        results: For each run, matrices as in `accuracy_curve`.
        labels: The name of each run. Mathematical notation is not parsed, so names may contain dollar signs.

    Example:
        >>> matrices = [[[90.0, float("nan")], [70.0, 80.0]]]
        >>> len(figure([matrices, matrices], ["BN", "CN"]).axes)  # the color bar has axes too
        4
    """
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(4.5 * (len(results) + 1), 4.0), layout="constrained")
    curve, *axes = drawn.subplots(1, len(results) + 1)
    for matrices, label, ax in zip(results, labels, axes, strict=True):
        accuracy_curve(curve, matrices, label)
        mesh = accuracy_matrix(ax, matrices)
        if len(results) > 1:
            ax.set_title(label, parse_math=False, fontsize="medium")
    curve.set_ylim(top=min(curve.get_ylim()[1], 101))  # the band of a standard deviation may exceed 100 %
    if len(results) > 1:
        curve.legend()
    else:
        drawn.suptitle(labels[0], parse_math=False)
    drawn.colorbar(mesh, ax=axes[-1], label="percent")
    return with_png(drawn)


def with_png(drawn: Figure) -> Figure:
    """Let notebooks show a figure that is not of pyplot: they look for this method."""

    def png() -> bytes:
        image = io.BytesIO()
        drawn.savefig(image, format="png", dpi=100)
        return image.getvalue()

    drawn._repr_png_ = png  # type: ignore[attr-defined]
    return drawn
