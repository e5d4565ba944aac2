"""Figures of the documentation, drawn from the records: light and dark SVG files, and the social preview.

Each has at most a few words in letters of at least 13 pixels at a width of 480, so that it can be read on a phone. The
descriptions are the alternative texts of the pages, with the numbers that the figure shows.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from contnorm.bench.figures import COLORS, MARKERS, curve_with_band
from contnorm.bench.metrics.accuracy_matrix import acc_so_far
from contnorm.bench.stats import PairedDifference
from tools.comparisons import (
    CIFAR10,
    COCOSEQ,
    FINE_GRID,
    GRID,
    MEMORY,
    MINI,
    NAMES,
    PERMUTED,
    RIVALS,
    STRATEGIES,
    TINY,
    WS,
    over_rates,
    recipe,
    rival,
    selected,
)
from tools.cubes import DESCRIPTION, cubes_figure
from tools.evidence import RECORDS, Cell, load, plain
from tools.svg import scheme_colors, with_figure_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FIGURES", "DocFigure", "rates", "social_preview"]

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


class RatePoint(NamedTuple):
    """Accuracy on the validation tasks at one learning rate."""

    rate: float
    mean: float
    std: float


def rates(norm: str, strategy: str = "er") -> list[RatePoint]:
    """Accuracy of a norm on the validation tasks by learning rate, over all seeds that were run there."""
    scores: dict[float, dict[int, float]] = {}
    for archive in (GRID, FINE_GRID):
        for rate in {run.config.train.lr for run in load(archive).where(norm=norm, strategy=strategy)}:
            cell = Cell(archive, {"norm": norm, "strategy": strategy, "lr": rate})
            scores.setdefault(rate, {}).update(cell.scores())
    return [RatePoint(rate, fmean(s.values()), stdev(s.values())) for rate, s in sorted(scores.items())]


def selected_rate(norm: str, strategy: str = "er") -> float:
    """Learning rate that was selected on the validation tasks."""
    (rate,) = {record.config.train.lr for record in selected(norm, strategy).runs()}
    return float(rate)


RATE_NORMS = ("bn", "cn", "gn")


def _draw_rates(axes: Axes, colors: Sequence[str] = COLORS, ink: Any = INK, ring: float = 13) -> None:
    """Curves of the norms over the learning rate, with a ring at the selected one."""
    for index, norm in enumerate(RATE_NORMS):
        rate, mean, std = np.array(rates(norm)).T
        axes.fill_between(rate, mean - std, mean + std, color=colors[index], alpha=0.16, linewidth=0)
        axes.plot(rate, mean, color=colors[index], marker=MARKERS[index], markersize=6, linewidth=2.2)
        place = list(rate).index(selected_rate(norm))
        axes.plot(rate[place], mean[place], "o", markersize=ring, markerfacecolor="none", markeredgecolor=ink)
    axes.set_xscale("log")
    axes.set_xticks([0.001, 0.003, 0.01, 0.03, 0.1, 0.3], ["0.001", "0.003", "0.01", "0.03", "0.1", "0.3"])
    axes.minorticks_off()
    axes.set(xlabel="learning rate", ylabel="accuracy (percent)")


@with_figure_style
def learning_rate() -> Figure:
    """Accuracy of BN, CN and GN by learning rate, with ER."""
    figure, axes = _figure(320, 52, "Tuned, CN and BN match; too high, CN loses less")
    _draw_rates(axes)
    for index, norm in enumerate(RATE_NORMS):
        rate, mean, _ = next(point for point in rates(norm) if point.rate == 0.1)
        axes.annotate(
            norm.upper(),
            (rate, mean),
            xytext=(9, 6),
            textcoords="offset points",
            color=COLORS[index],
            fontsize=TITLE,
            fontweight="bold",
        )
    axes.text(0.03, 0.06, "○ selected rate", transform=axes.transAxes, fontsize=TEXT)
    return figure


def _describe_rates() -> str:
    at = {norm: {point.rate: point.mean for point in rates(norm)} for norm in RATE_NORMS}
    best = ", ".join(f"{n.upper()} {at[n][selected_rate(n)]:.1f} at {selected_rate(n):g}" for n in RATE_NORMS)
    high = ", ".join(f"{norm.upper()} {at[norm][0.1]:.1f}" for norm in RATE_NORMS)
    return (
        "Accuracy by learning rate with ER on the validation tasks of Split CIFAR-100. "
        f"At the selected rate: {best}. At 0.1: {high} percent."
    )


class Interval(NamedTuple):
    """A difference with its 95 % interval."""

    label: str
    mean: float
    low: float
    high: float


def _interval(label: str, pair: PairedDifference) -> Interval:
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
    return {label: _interval(label, plain(cell, bn)) for label, cell in cells.items()}


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


def _cn_and_bn(archive: str, matrix: str = "matrix", score: str = "acc", **where: Any) -> PairedDifference:
    cn, bn = (Cell(archive, {"norm": norm, **where}, matrix) for norm in ("cn", "bn"))
    return plain(cn, bn, score)


def situations() -> list[Interval]:
    """CN minus BN in every situation that was run with both."""
    pairs: dict[str, PairedDifference] = {
        "CIFAR-100, ER, tuned": plain(selected("cn", "er"), selected("bn", "er")),
        "CIFAR-100, DER++, tuned": plain(selected("cn", "derpp"), selected("bn", "derpp")),
        "CIFAR-100, ER, rate too high": over_rates("cn", "bn", "er"),
        "CIFAR-100, DER++, rate too high": over_rates("cn", "bn", "derpp"),
        "CIFAR-100, ER, 0.03": plain(recipe("cn"), recipe("bn")),
        "CIFAR-100, no replay": plain(recipe("cn", "single"), recipe("bn", "single")),
    }
    for size in (500, 2560):
        pairs[f"CIFAR-10, DER++ {size:,}"] = _cn_and_bn(CIFAR10, buffer=size)
    pairs["Tiny-ImageNet, DER++"] = _cn_and_bn(TINY)
    pairs["mini-ImageNet, ER"] = _cn_and_bn(MINI, lr=0.03)
    for strategy in ("er", "single"):
        pairs[f"permuted MNIST, {NAMES[strategy]}"] = _cn_and_bn(PERMUTED, "matrix_running", strategy=strategy)
    pairs["part of COCOseq, PRS"] = _cn_and_bn(COCOSEQ, score="map", memory="prs")
    return [_interval(label, pair) for label, pair in pairs.items()]


@with_figure_style
def cn_less_bn() -> Figure:
    """CN minus BN by situation."""
    rows = situations()
    figure, axes = _figure(440, 246, "Accuracy of CN minus that of BN")
    _draw_intervals(axes, rows, (-7, 13), 0, 0.0)
    _rows(axes, [row.label for row in rows], "points, 95 % interval")
    return figure


def _describe_situations() -> str:
    return (
        "Accuracy of CN minus that of BN, in points, with 95 % intervals: "
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
        runs = Cell(PERMUTED, {"norm": norm, "strategy": "single"}).runs()
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
    axes = figure.add_axes((0.555, 0.17, 0.405, 0.66))
    for spine in axes.spines.values():
        spine.set_color(ink)
    _draw_rates(axes, series, ink, ring=19)
    axes.tick_params(colors=ink, labelsize=15)
    axes.set_xlabel("learning rate", color=ink, fontsize=17)
    axes.set_ylabel("accuracy (percent)", color=ink, fontsize=17)
    for index, norm in enumerate(RATE_NORMS):
        mean = next(point.mean for point in rates(norm) if point.rate == 0.1)
        axes.annotate(norm.upper(), (0.1, mean), xytext=(12, 9), textcoords="offset points", color=series[index],
                      fontsize=20, fontweight="bold")  # fmt: skip
    figure.text(0.05, 0.72, "contnorm", color=ink, fontsize=58, fontweight="bold")
    lines = (
        (0.60, "Normalization layers for", 25),
        (0.535, "continual learning in PyTorch", 25),
        (0.38, "Tuned batch norm matches", 20),
        (0.325, "continual norm.", 20),
        (0.245, "At a learning rate that is too high,", 20),
        (0.19, "continual norm loses less.", 20),
    )
    for height, text, size in lines:
        figure.text(0.05, height, text, color=ink, fontsize=size)
    figure.text(0.555, 0.88, "ER on Split CIFAR-100, validation tasks", color=ink, fontsize=16)
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
