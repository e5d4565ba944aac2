"""Figures of the documentation, drawn from the records: light and dark SVG files, and the social preview.

Each has at most a few words in letters of at least 13 pixels at a width of 480, so that it can be read on a phone. The
descriptions are the alternative texts of the pages, with the numbers that the figure shows.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from contnorm.bench.figures import COLORS, MARKERS, curve_with_band
from contnorm.bench.metrics import acc_so_far
from contnorm.bench.stats import t_interval
from tools.comparisons import (
    MEMORY,
    NAMES,
    PERMUTED,
    RIVALS,
    STRATEGIES,
    WS,
    comparisons,
    on_test_tasks,
    rival,
    selected,
)
from tools.cubes import DESCRIPTION, cubes_figure
from tools.evidence import RECORDS, Cell, Comparison
from tools.svg import scheme_colors, with_figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FIGURES", "DocFigure", "rate_panels", "social_preview"]

ROOT = RECORDS.parents[1]
WIDTH = 480  # pixels
TEXT, TITLE = 14, 15  # sizes of letters, in pixels
INK = "#000000"
FAINT = (0, 0, 0, 0.35)
CASES = [(dtype, layout) for dtype in ("fp32", "bf16") for layout in ("nchw", "nhwc")]


class DocFigure(NamedTuple):
    """A figure of the documentation.

    Attributes:
        draw: Draws it, with black ink and a transparent background.
        describe: Its alternative text.
    """

    draw: Callable[[], Figure]
    describe: Callable[[], str]


def _figure(height: int, left: int, title: str, bottom: int = 48, top: int = 30) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; margins are in pixels."""
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    box = (left / WIDTH, bottom / height, (WIDTH - left - 14) / WIDTH, (height - bottom - top) / height)
    axes = figure.add_axes(box)
    figure.text(8 / WIDTH, 1 - 18 / height, title, fontsize=TITLE, fontweight="bold", va="baseline")
    axes.tick_params(labelsize=TEXT)
    axes.xaxis.label.set_fontsize(TEXT)
    axes.yaxis.label.set_fontsize(TEXT)
    return figure, axes


class RateCurve(NamedTuple):
    """Mean accuracy over the stream by learning rate, on the test tasks.

    Attributes:
        label: Norm, and its moments in evaluation.
        points: Mean over seeds at each rate, in percent.
        half: Half the width of its 95 % interval, at each rate.
        seeds: Number of seeds at each rate.
    """

    label: str
    points: dict[float, float]
    half: dict[float, float]
    seeds: dict[float, int]


CURVES = {
    "BN": ("bn", "running"),
    "CN": ("cn", "running"),
    "BN, memory": ("bn", "memory"),
    "CN, memory": ("cn", "memory"),
}
LINES: tuple[Literal["-", "--"], ...] = ("-", "--")  # running moments, and moments of the memory
RATE_STREAMS = {"split-cifar100": "CIFAR-100", "split-mini-imagenet": "mini-ImageNet"}


@cache
def rate_panels() -> dict[str, list[RateCurve]]:
    """Curves of each stream and strategy with recorded runs, by the title of its panel."""
    panels = {}
    for stream, title in RATE_STREAMS.items():
        for strategy in STRATEGIES:
            curves = []
            for label, (norm, moments) in CURVES.items():
                by_rate = {
                    rate: [both[1] for both in seeds.values()]
                    for rate, seeds in on_test_tasks(stream, strategy, norm, moments).items()
                }
                intervals = {rate: t_interval(values) for rate, values in by_rate.items()}
                half = {rate: (one.high - one.low) / 2 for rate, one in intervals.items() if one is not None}
                points = {rate: fmean(by_rate[rate]) for rate in half}
                curves.append(RateCurve(label, points, half, {rate: len(by_rate[rate]) for rate in half}))
            panels[f"{title}, {NAMES[strategy]}"] = curves
    return panels


def _draw_rates(axes: Axes, curves: Sequence[RateCurve], colors: Sequence[str]) -> None:
    """Curves over the learning rate, with 95 % intervals of the means."""
    for index, curve in enumerate(curves):
        rates, means = list(curve.points), list(curve.points.values())
        axes.errorbar(rates, means, list(curve.half.values()), color=colors[index % 2], marker=MARKERS[index],
                      markersize=5.5, linewidth=2, linestyle=LINES[index // 2], elinewidth=1.3)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([0.001, 0.003, 0.01, 0.03], ["0.001", "0.003", "0.01", "0.03"])
    axes.minorticks_off()
    axes.set_xlim(0.0008, 0.04)


@with_figure_style
def learning_rate() -> Figure:
    """Mean accuracy over the stream by learning rate on the test tasks, one panel per stream and strategy."""
    figure = Figure(figsize=(WIDTH / 72, 470 / 72))
    figure.text(8 / WIDTH, 1 - 18 / 470, "Accuracy over the stream, percent", fontsize=TITLE, fontweight="bold")
    for place, (title, curves) in enumerate(rate_panels().items()):
        column, row = place % 2, place // 2
        axes = figure.add_axes((0.085 + 0.49 * column, 0.55 - 0.43 * row, 0.415, 0.30))
        _draw_rates(axes, curves, COLORS)
        axes.set_title(title, fontsize=TEXT, loc="left")
        limits = (62, 74) if "CIFAR" in title else (56, 72)
        axes.set(ylim=limits, yticks=range(limits[0] + 2, limits[1], 4))
        axes.tick_params(labelsize=13)
        if row:
            axes.set_xlabel("learning rate", fontsize=TEXT)
    handles = [
        Line2D([], [], color=COLORS[i % 2], marker=MARKERS[i], linewidth=2, markersize=6, linestyle=LINES[i // 2])
        for i in range(len(CURVES))
    ]
    figure.legend(handles, list(CURVES), loc="upper left", bbox_to_anchor=(0, 1 - 24 / 470), ncols=4, fontsize=TEXT,
                  borderpad=0.3, handletextpad=0.3, handlelength=1.7, columnspacing=0.8)  # fmt: skip
    return figure


def _describe_rates() -> str:
    parts = []
    for title, curves in rate_panels().items():
        best = [(c.label, max(c.points, key=lambda rate: c.points[rate]), c) for c in curves if c.points]
        parts.append(
            f"{title}: " + ", ".join(f"{label} at most {c.points[rate]:.1f}, at {rate:g}" for label, rate, c in best)
        )
    return f"Mean accuracy over the stream by learning rate, on the test tasks. {'; '.join(parts)}."


class Interval(NamedTuple):
    """A difference with its 95 % interval."""

    label: str
    mean: float
    low: float
    high: float


def _interval(label: str, comparison: Comparison, score: str = "acc") -> Interval:
    pair = comparison.difference(score)
    assert pair.t is not None
    return Interval(label, pair.mean, pair.t.low, pair.t.high)


def _draw_intervals(
    axes: Axes, rows: Sequence[Interval], limits: tuple[float, float], index: int, shift: float
) -> None:
    """Draw differences with their intervals, one row each; one that is left of the limits becomes a number."""
    color, marker = COLORS[index], MARKERS[index]
    for place, row in enumerate(rows):
        y = place + shift
        if row.mean < limits[0]:
            x = limits[0] + index * 3.2  # the numbers of one norm side by side
            axes.text(x, place, f"◄ {row.mean:.0f}", color=color, va="center", fontsize=TEXT)
            continue
        axes.plot([max(row.low, limits[0]), min(row.high, limits[1])], [y, y], color=color, linewidth=2)
        axes.plot(row.mean, y, marker=marker, color=color, markersize=6)
    axes.set_xlim(*limits)


def _rows(axes: Axes, labels: Sequence[str], xlabel: str) -> None:
    axes.axvline(0, color=INK, linewidth=0.9, zorder=0)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(xlabel)


SHORT = {
    MEMORY: "BN, memory moments",
    WS: "GN + weight std.",
    "BN, frozen after the first task": "BN, frozen",
    "BN, moments of each task": "BN, moments by task",
}
PAPER = {"CN": "cn", "BRN": "brn", "GN": "gn", "SN": "sn", "IN": "in", "no norm": "none"}


def panel_rows(strategy: str) -> dict[str, Interval]:
    """Each norm at its selected learning rate minus BN."""
    bn = selected("bn", strategy)
    cells = {SHORT.get(entry, entry): rival(entry, strategy) for entry in RIVALS}
    cells |= {name: selected(norm, strategy) for name, norm in PAPER.items()}
    return {label: _interval(label, Comparison("", "", cell, bn, "")) for label, cell in cells.items()}


@with_figure_style
def panel() -> Figure:
    """Differences to BN of all norms, with ER and DER++."""
    by_strategy = {strategy: panel_rows(strategy) for strategy in STRATEGIES}
    labels = sorted(by_strategy["er"], key=lambda label: -fmean(rows[label].mean for rows in by_strategy.values()))
    figure, axes = _figure(560, 168, "Accuracy minus that of BN, tuned", top=56)
    for index, rows in enumerate(by_strategy.values()):
        _draw_intervals(axes, [rows[label] for label in labels], (-20, 3), index, 0.34 * index - 0.17)
    _rows(axes, labels, "points of accuracy, 95 % interval")
    _legend(figure, [NAMES[strategy] for strategy in STRATEGIES])
    return figure


def _describe_panel() -> str:
    parts = []
    for strategy in STRATEGIES:
        rows = panel_rows(strategy)
        best, worst = (choose(rows.values(), key=lambda row: row.mean) for choose in (max, min))
        parts.append(
            f"with {NAMES[strategy]}, from {best.label} ({best.mean:+.1f}) to {worst.label} ({worst.mean:+.1f}), "
            f"and CN {rows['CN'].mean:+.1f}"
        )
    return f"Accuracy of {len(rows)} norms, each tuned, minus that of BN, in points: {'; '.join(parts)}."


def _legend(figure: Figure, names: Sequence[str], columns: int = 4) -> None:
    handles = [Line2D([], [], color=COLORS[i], marker=MARKERS[i], linewidth=2, markersize=6) for i in range(len(names))]
    height = figure.get_figheight() * 72
    figure.legend(
        handles,
        list(names),
        loc="upper left",
        bbox_to_anchor=(0, 1 - 24 / height),
        ncols=columns,
        fontsize=TEXT,
        borderpad=0.3,
        handletextpad=0.4,
        columnspacing=1.2,
    )


SITUATIONS = {
    "CIFAR-100, ER, tuned": "tuned er",
    "CIFAR-100, DER++, tuned": "tuned derpp",
    "CIFAR-100, ER, by order": "order er",
    "CIFAR-100, DER++, by order": "order derpp",
    "CIFAR-100, ER, 0.03": "one rate er",
    "CIFAR-100, DER++, 0.03": "one rate derpp",
    "CIFAR-100, no replay": "single",
    "mini-ImageNet, ER, tuned": "mini tuned er",
    "mini-ImageNet, DER++, best": "mini derpp 0.01",
    "mini-ImageNet, DER++, 0.03": "mini derpp one rate",
    "mini-ImageNet, ER, best": "mini er 0.01",
    "mini-ImageNet, ER, 0.03": "mini er 0.03",
    "CIFAR-10, DER++ 500": "cifar10 500 unknown",
    "CIFAR-10, DER++ 2,560": "cifar10 2560 unknown",
    "Tiny-ImageNet, DER++": "tiny unknown",
    "permuted MNIST, ER": "permuted er",
    "permuted MNIST, no replay": "permuted single",
}


def situations() -> list[Interval]:
    """CN minus BN, mean accuracy over the stream."""
    return [_interval(label, comparisons()[name], "aia") for label, name in SITUATIONS.items()]


@with_figure_style
def cn_less_bn() -> Figure:
    """CN minus BN by situation."""
    rows = situations()
    figure, axes = _figure(550, 246, "Accuracy over the stream, CN minus BN")
    _draw_intervals(axes, rows, (-3, 8), 0, 0.0)
    _rows(axes, [row.label for row in rows], "points, 95 % interval")
    return figure


def _describe_situations() -> str:
    return (
        "Mean accuracy over the stream of CN minus that of BN, in points, with 95 % intervals: "
        + "; ".join(f"{row.label} {row.mean:+.1f} ({row.low:+.1f} to {row.high:+.1f})" for row in situations())
        + "."
    )


def layer_ratios() -> dict[str, dict[tuple[str, str], float]]:
    """Time of CN over that of BN, forward and backward in a CUDA graph: shape -> (type, layout) -> ratio."""
    ratios: dict[str, dict[tuple[str, str], float]] = {}
    lines = (ROOT / "benchmarks" / "results" / "layers.csv").read_text().splitlines()
    for row in csv.DictReader(lines):
        if row["mode"] == "train" and row["layer"] == "cn":
            ratios.setdefault(row["shape"], {})[row["dtype"], row["layout"]] = float(row["over_bn"])
    return ratios


@with_figure_style
def cn_over_bn() -> Figure:
    """Time of CN over that of BN by shape, type and layout."""
    ratios = layer_ratios()
    figure, axes = _figure(430, 128, "Time of CN over that of BN, one layer", top=76)
    for index, case in enumerate(CASES):
        values = [ratios[shape][case] for shape in ratios]
        places = np.arange(len(values)) + 0.14 * (index - 1.5)
        axes.plot(values, places, marker=MARKERS[index], color=COLORS[index], linestyle="none", markersize=6.5)
    axes.set_xscale("log")
    _rows(axes, list(ratios), "below 1, CN is faster")
    axes.lines[-1].set_xdata([1, 1])
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_xlim(0.09, 2.3)
    axes.grid(axis="y", color=(0, 0, 0, 0.12), linewidth=0.8)
    names = {"fp32": "float32", "bf16": "bfloat16", "nchw": "NCHW", "nhwc": "channels last"}
    _legend(figure, [f"{names[dtype]}, {names[layout]}" for dtype, layout in CASES], columns=2)
    return figure


def _describe_layers() -> str:
    values = [ratio for by_case in layer_ratios().values() for ratio in by_case.values()]
    return (
        "Time of CN over that of BN, forward and backward in a CUDA graph on one H200, by shape, type and layout: "
        f"from {min(values):.2f} to {max(values):.2f}; CN is faster in {sum(v < 1 for v in values)} of {len(values)} "
        "cases."
    )


def _moment_curves() -> dict[str, list[list[float]]]:
    """Accuracy on the tasks so far, on permuted MNIST without replay, one curve per seed."""
    sources = {
        "BN, exact moments": ("bn", "matrix"),
        "CN": ("cn", "matrix_running"),
        "BN": ("bn", "matrix_running"),
    }
    curves = {}
    for label, (norm, matrix) in sources.items():
        runs = Cell((PERMUTED,), {"norm": norm, "strategy": "single"}).runs()
        curves[label] = [acc_so_far(counts) for run in runs if (counts := run.matrix_of(matrix)) is not None]
    return curves


@with_figure_style
def exact_moments() -> Figure:
    """What exact moments give back to BN: accuracy over tasks."""
    figure, axes = _figure(300, 52, "Exact moments give accuracy back to BN")
    for label, curves in _moment_curves().items():
        index = {"BN": 0, "CN": 1, "BN, exact moments": 2}[label]
        curve_with_band(axes, np.arange(1, len(curves[0]) + 1), np.array(curves), label, index)
    axes.set(xlabel="tasks learned", ylabel="accuracy (percent)", xticks=range(1, len(curves[0]) + 1))
    axes.legend(loc="lower left", fontsize=TEXT)
    return figure


def _describe_moments() -> str:
    ends = ", ".join(f"{n} {fmean(curve[-1] for curve in curves):.1f}" for n, curves in _moment_curves().items())
    tasks = len(_moment_curves()["BN"][0])
    return f"Accuracy on permuted MNIST without replay, after {tasks} tasks: {ends} percent."


def verdict_rates() -> dict[str, dict[int, float]]:
    """Rate of verdicts by stage for normal differences, from the simulated table of the page."""
    page = (ROOT / "docs" / "concepts" / "deciding.md").read_text()
    stages: list[int] = []
    found: dict[str, dict[int, float]] = {}
    for line in page.splitlines():
        columns = [column.strip() for column in line.strip("| ").split("|")]
        if columns[0] == "true difference":
            stages = [int(column) for column in columns[1:-1]]
        elif stages and columns[-1] == "normal":
            found[columns[0]] = dict(zip(stages, map(float, columns[1:-1]), strict=True))
    return found


@with_figure_style
def seeds_needed() -> Figure:
    """Rate of verdicts by the number of seeds."""
    figure, axes = _figure(310, 62, "Rate of verdicts by number of seeds", top=72)
    by_difference = verdict_rates()
    for index, by_stage in enumerate(by_difference.values()):
        axes.plot(
            list(by_stage), [100 * rate for rate in by_stage.values()],
            color=COLORS[index], marker=MARKERS[index], markersize=6, linewidth=2,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    stages = list(next(iter(by_difference.values())))
    axes.set_xticks(stages, list(map(str, stages)))
    axes.set(xlabel="seeds", ylabel="percent", ylim=(-4, 104))
    names = ["no difference" if d == "0" else f"{d} point{'s' * (d != '1')}" for d in by_difference]
    _legend(figure, names, columns=2)
    return figure


def _describe_verdicts() -> str:
    needed = {d: min(n for n, rate in one.items() if rate >= 0.9) for d, one in verdict_rates().items()}
    parts = ", ".join(f"{n} seeds for a true difference of {d}" for d, n in needed.items())
    return f"Number of seeds until nine of ten comparisons have a verdict: {parts}."


@with_figure_style
def social_preview() -> Figure:
    """The picture that other sites show for the repository: 1,280 x 640 pixels, on a background of its own."""
    colors = scheme_colors("dark")
    ink, series = colors["ink"], [colors[f"series-{number}"] for number in range(1, 4)]
    figure = Figure(figsize=(12.8, 6.4), facecolor=colors["ground"])
    figure.text(0.05, 0.72, "contnorm", color=ink, fontsize=58, fontweight="bold")
    for height, text in ((0.58, "Normalization layers for"), (0.51, "continual learning in PyTorch")):
        figure.text(0.05, height, text, color=ink, fontsize=25)
    for height, text in ((0.35, "Convert, re-estimate moments,"), (0.29, "compare on the same seeds.")):
        figure.text(0.05, height, text, color=ink, fontsize=20)
    panels = [item for item in rate_panels().items() if "DER++" in item[0]]
    for place, (title, curves) in enumerate(panels):
        axes = figure.add_axes((0.57, 0.57 - 0.46 * place, 0.39, 0.33))
        for spine in axes.spines.values():
            spine.set_color(ink)
        _draw_rates(axes, curves, series)
        axes.tick_params(colors=ink, labelsize=14)
        axes.set_title(f"{title}: accuracy by learning rate", color=ink, fontsize=15, loc="left")
        for curve, color in zip(curves[:2] if place else (), series, strict=False):
            rate = max(curve.points)
            axes.annotate(curve.label, (rate, curve.points[rate]), xytext=(8, -4), textcoords="offset points",
                          color=color, fontsize=17, fontweight="bold")  # fmt: skip
    return figure


FIGURES: Mapping[str, DocFigure] = {
    "learning-rate": DocFigure(learning_rate, _describe_rates),
    "panel": DocFigure(panel, _describe_panel),
    "cn-less-bn": DocFigure(cn_less_bn, _describe_situations),
    "cn-over-bn": DocFigure(cn_over_bn, _describe_layers),
    "cubes": DocFigure(cubes_figure, lambda: DESCRIPTION),
    "exact-moments": DocFigure(exact_moments, _describe_moments),
    "seeds-needed": DocFigure(seeds_needed, _describe_verdicts),
}
