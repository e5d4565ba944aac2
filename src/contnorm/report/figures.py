"""Figures of records, each as a piece of SVG for a page: they have no ground of their own and take its text colour.

Every figure is a function of records alone; needs matplotlib, not torch.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING, Any

from contnorm.comparison.intervals import t_interval
from contnorm.metrics.matrix import acc_so_far
from contnorm.results import Record, spread_over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "accuracy_over_tasks",
    "curves_over_tasks",
    "drift_by_depth",
    "drift_over_tasks",
    "forgetting_split",
    "paired_differences",
]

COLOURS = ("#4477aa", "#ee7733", "#228833", "#aa3377", "#66a5c9", "#b59f2a", "#8a8a8a", "#cc6677")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK = "#010203"  # stands for the page's text colour until the figure is written


class _Canvas:
    """One figure being drawn; `svg` is there once it is finished. `says` is read to those who can't see it."""

    def __init__(self, figure: Any, axes: Axes) -> None:
        self.figure, self.axes, self.svg, self.says = figure, axes, "", ""


@contextmanager
def _canvas(title: str, width: float = 6.4, height: float = 3.6) -> Iterator[_Canvas]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    style: Any = {
        "svg.hashsalt": "contnorm",
        "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    }
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
        canvas = _Canvas(figure, axes)
        yield canvas
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Title": title})
        pyplot.close(figure)
    canvas.svg = _for_a_page(written.getvalue(), f"{title}. {canvas.says}" if canvas.says else title)


def _for_a_page(svg: str, says: str) -> str:
    """Without its file header, as wide as its place, named for readers who can't see it."""
    body = svg[svg.index("<svg") :].replace(INK, "currentColor")
    body = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    return body.replace("<svg ", f'<svg role="img" aria-label="{_escaped(says)}" ', 1)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def accuracy_over_tasks(groups: Mapping[str, Sequence[Record]], title: str) -> str:
    """The mean accuracy on the tasks so far, after each task; a band of one standard deviation over seeds."""
    curves = {name: [acc_so_far(record.matrix) for record in records] for name, records in groups.items()}
    return curves_over_tasks(curves, title, "accuracy on them, percent")


def curves_over_tasks(curves: Mapping[str, Sequence[Sequence[float]]], title: str, what: str) -> str:
    """By name a curve a seed: their means after each task, with bands of one standard deviation over seeds."""
    with _canvas(title) as canvas:
        for number, (name, some) in enumerate(curves.items()):
            _line_with_band(canvas.axes, number, name, some)
        canvas.axes.set(xlabel="tasks learned", ylabel=what, title=title)
        canvas.axes.legend(frameon=False, fontsize=8, ncols=1 + (len(curves) > 4))
        ends = (f"{name} {fmean(curve[-1] for curve in some):.2f}" for name, some in curves.items())
        canvas.says = f"At the end: {', '.join(ends)}."
    return canvas.svg


def _line_with_band(axes: Axes, number: int, name: str, curves: Sequence[Sequence[float]]) -> None:
    """One curve a seed: their mean, and a band where there are several."""
    places = list(range(1, len(curves[0]) + 1))
    spread = [spread_over_seeds(list(values)) for values in zip(*curves, strict=True)]
    colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
    means = [mean for mean, _ in spread]
    axes.plot(places, means, color=colour, marker=mark, markersize=4, label=name)
    if len(curves) > 1:
        low, high = ([mean + sign * std for mean, std in spread] for sign in (-1, 1))
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xticks(places)


def drift_over_tasks(records: Sequence[Record], title: str) -> str:
    """How far running moments are from exact ones after each task: a curve for each layer's means and variances."""
    layers = list(records[0].drift["by_task"][0])
    curves = {
        f"{layer} {moment}": [[after[layer][moment] for after in record.drift["by_task"]] for record in records]
        for layer in layers
        for moment in ("mean", "var")
    }
    return curves_over_tasks(curves, title, "L1 distance to exact moments")


def drift_by_depth(records: Sequence[Record], title: str) -> str:
    """The same of a deep network: from the first layer to the last, after the first, the middle and the last task."""
    layers = list(records[0].drift["by_task"][0])
    tasks = len(records[0].drift["by_task"])
    shown = sorted({0, (tasks - 1) // 2, tasks - 1})
    depth, ends = range(1, len(layers) + 1), []
    with _canvas(title) as canvas:
        for number, moment in enumerate(("mean", "var")):
            for after, dash in zip(shown, (":", "--", "-")[-len(shown) :], strict=True):
                values = [
                    fmean(record.drift["by_task"][after][layer][moment] for record in records) for layer in layers
                ]
                canvas.axes.plot(depth, values, dash, color=COLOURS[number], label=f"{moment}, after task {after + 1}")
            ends.append(f"{moment} {values[0]:.2f} in the first layer, {values[-1]:.2f} in the last")
        canvas.axes.set(xlabel="norm layer, from the input on", ylabel="L1 distance to exact moments", title=title)
        canvas.axes.set_yscale("symlog", linthresh=1.0)  # from hundredths to hundreds
        canvas.axes.legend(frameon=False, fontsize=7, ncols=2)
        canvas.says = f"At the end: {'; '.join(ends)}."
    return canvas.svg


def forgetting_split(records: Sequence[Record], title: str) -> str:
    """For each task, what was forgotten at the end: what exact moments give back (statistics), and the rest (weights).

    Needs records of runs evaluated both ways, ``--eval-moments oracle``.
    """
    running = [matrix for record in records if (matrix := record.matrix_of("matrix_running")) is not None]
    tasks = running[0].tasks
    lost = [fmean(m.at(t, t) - m.at(tasks - 1, t) for m in running) for t in range(tasks - 1)]
    back = [
        fmean(r.matrix.at(tasks - 1, t) - m.at(tasks - 1, t) for r, m in zip(records, running, strict=True))
        for t in range(tasks - 1)
    ]
    places = [t + 1 for t in range(tasks - 1)]
    with _canvas(title) as canvas:
        rest = [whole - part for whole, part in zip(lost, back, strict=True)]
        canvas.axes.bar(places, rest, color=COLOURS[0], label="weights")
        canvas.axes.bar(
            places, back, bottom=rest, color=COLOURS[1], hatch="//", label="statistics: exact moments give it back"
        )
        canvas.axes.axhline(0, color=INK, linewidth=0.8)
        canvas.axes.set(xlabel="task", ylabel="points forgotten at the end", title=title, xticks=places)
        canvas.axes.legend(frameon=False, fontsize=8)
        canvas.says = f"Of {fmean(lost):.1f} points forgotten on average exact moments give {fmean(back):.1f} back."
    return canvas.svg


def paired_differences(pairs: Mapping[str, Sequence[float]], title: str, unit: str = "points of ACC") -> str:
    """Seed by seed: each difference as a mark, their mean as a line across, its 95 % interval as a bar."""
    with _canvas(title, 7.6, 1.2 + 0.42 * len(pairs)) as canvas:
        for number, differences in enumerate(reversed(list(pairs.values()))):
            colour = COLOURS[(len(pairs) - 1 - number) % len(COLOURS)]
            interval = t_interval(differences)
            if interval is not None:
                canvas.axes.plot(interval, [number] * 2, color=colour, linewidth=7, alpha=0.22, solid_capstyle="butt")
            canvas.axes.plot(differences, [number] * len(differences), "o", color=colour, markersize=5, alpha=0.7)
            canvas.axes.plot([fmean(differences)] * 2, [number - 0.3, number + 0.3], color=colour, linewidth=2.5)
        canvas.axes.axvline(0, color=INK, linewidth=0.8)
        canvas.axes.set_title(fill(title, 70), loc="left")
        canvas.axes.set_xlabel(f"difference, {unit}, seed by seed; bar: 95 % interval of the mean")
        canvas.axes.set_yticks(range(len(pairs)), [fill(name, 34) for name in reversed(list(pairs))])
        means = (f"{name} {fmean(differences):+.2f}" for name, differences in pairs.items())
        canvas.says = f"Means: {'; '.join(means)}."
    return canvas.svg
