"""Figures from plain numbers: artists are where the numbers put them."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.figure import Figure

from contnorm.report import figures
from contnorm.report.record_figures import MOST_CURVES
from contnorm.report.svg import svg_of


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]


def test_curves_differ_in_color_and_marker() -> None:
    """Also readers who can't distinguish the colors can distinguish the curves, up to the most that a figure has."""
    figure = figures.curves_over_tasks({f"line {i}": [[1.0, 2.0]] for i in range(MOST_CURVES)}, "Lines", "y")
    lines = figure.axes[0].lines
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == MOST_CURVES
    assert {f"line {i}" for i in range(MOST_CURVES)} <= set(texts(figure))


def test_curves_of_seeds_with_different_lengths_are_drawn_as_far_as_all_go() -> None:
    figure = figures.curves_over_tasks({"cn": [[1.0, 2.0, 3.0], [3.0, 4.0]]}, "x", "y")
    assert figure.axes[0].lines[0].get_ydata().tolist() == [2.0, 3.0]


def test_curves_and_bands_are_inside_the_axes() -> None:
    figure = figures.curves_over_tasks({"cn": [[1.0, 2.0], [3.0, 9.0]], "bn": [[0.0, 5.0]]}, "x", "y")
    low, high = figure.axes[0].get_ylim()
    assert low < 0.0 and high > 5.5 + math.sqrt(24.5)


@pytest.mark.parametrize("curve", [[5.0, 5.0], [0.0, 0.0], [7.0]])
def test_constant_curve_can_be_drawn(curve: list[float]) -> None:
    svg = svg_of(figures.curves_over_tasks({"flat": [curve]}, "x", "y"), "x")
    assert "nan" not in svg and "inf" not in svg


def test_score_by_rate_has_points_bands_and_ticks_at_the_rates() -> None:
    points = {"bn": [(0.001, 60.0, 1.0), (0.01, 70.0, 2.0), (0.1, 65.0, 0.0)], "cn": [(0.01, 80.0, 3.0)]}
    [ax] = figures.score_by_rate(points, "x", "ACC").axes
    assert ax.get_xscale() == "log"
    assert [line.get_xydata().tolist() for line in ax.lines] == [
        [[0.001, 60.0], [0.01, 70.0], [0.1, 65.0]],
        [[0.01, 80.0]],
    ]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["0.001", "0.01", "0.1"]
    low, high = ax.get_ylim()
    assert low < 59 and high > 83, "bands are inside the axes"


def test_constant_differences_can_be_drawn() -> None:
    svg = svg_of(figures.paired_differences({"none": [0.0, 0.0]}, {"none": None}, "x", "y"), "x")
    assert "nan" not in svg and "inf" not in svg


def test_forgetting_bars_are_stacked() -> None:
    figure = figures.forgetting_bars([3.0, -1.0], [10.0, 12.0], "Forgotten")
    weights, statistics = figure.axes[0].containers
    assert [bar.get_height() for bar in weights] == [10.0, 12.0] and [bar.get_y() for bar in weights] == [0.0, 0.0]
    assert [bar.get_height() for bar in statistics] == [3.0, -1.0]
    assert [bar.get_y() for bar in statistics] == [10.0, 12.0], "on top of the others"
    assert {bar.get_hatch() for bar in statistics} != {bar.get_hatch() for bar in weights}


def test_paired_differences_are_at_their_values() -> None:
    pairs = {"a": [0.0, 4.0], "b": [-1.0, 1.0, 3.0]}
    figure = figures.paired_differences(pairs, {"a": None, "b": (-2.0, 4.0)}, "Pairs", "difference")
    ax = figure.axes[0]
    assert [dots.get_offsets().tolist() for dots in ax.collections] == [
        [[0.0, 0.0], [4.0, 0.0]],
        [[-1.0, 1.0], [1.0, 1.0], [3.0, 1.0]],
    ]
    segments = [list(map(float, line.get_xdata())) for line in ax.lines]
    assert segments == [[0, 0], [2, 2], [-2, 4], [1, 1]], "zero, mean of a, interval and mean of b"
    assert {"a", "b"} <= set(texts(figure))
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first row is at the top"


def test_group_bars_have_means_and_deviations() -> None:
    values = {"bn": [(15.0, math.sqrt(50)), (30.0, 0.0)], "cn4": [(-40.0, 0.0), (math.nan, math.nan)]}
    ax = figures.group_bars(values, ["majority", "minority"], "mAP", "percent").axes[0]
    assert [[bar.get_height() for bar in bars] for bars in ax.containers] == [[15.0, 30.0], [-40.0]]
    (errors,) = [segments for lines in ax.collections if (segments := lines.get_segments())]
    assert len(errors) == 1, "a deviation of zero has no error bar"
    assert errors[0][:, 1].tolist() == pytest.approx([15 - math.sqrt(50), 15 + math.sqrt(50)])
    low, high = ax.get_ylim()
    assert low < -40 and high > 30


def test_group_bars_without_any_value_can_be_drawn() -> None:
    svg = svg_of(figures.group_bars({"bn": [(math.nan, math.nan)]}, ["majority"], "B", "y"), "x")
    assert "nan" not in svg


def test_class_scatter_has_a_logarithmic_axis_with_round_ticks() -> None:
    points = [(3.0, 20.0), (40.0, 50.0)]
    ax = figures.class_scatter({"bn": points}, "Classes").axes[0]
    assert ax.get_xscale() == "log" and ax.collections[0].get_offsets().tolist() == [list(point) for point in points]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["5", "10", "20"]


def test_class_scatter_without_points_can_be_drawn() -> None:
    assert "nan" not in svg_of(figures.class_scatter({}, "Classes"), "x")


def test_memory_panels_have_a_bar_per_class_held_and_a_step_per_class_shown() -> None:
    held, shown = np.array([[100.0, 0.0], [50.0, 50.0]]), np.array([[100.0, 0.0], [36.0, 64.0]])
    figure = figures.memory_panels(held, shown, "Memory")
    assert len(figure.axes) == 2
    assert [[bar.get_height() for bar in ax.containers[0]] for ax in figure.axes] == [[100.0], [50.0, 50.0]]
    stairs = [
        ax.findobj(lambda artist: hasattr(artist, "get_data") and hasattr(artist, "_edges"))[0] for ax in figure.axes
    ]
    assert [some.get_data().values.tolist() for some in stairs] == shown.tolist()
    heights = figure.axes[1].transData.transform([[0, 0], [0, 25], [0, 100]])[:, 1]
    assert (heights[1] - heights[0]) * 2 == pytest.approx(heights[2] - heights[0]), "square-root scale"
    assert {"after task 1", "after task 2"} <= set(texts(figure))


def test_memory_panels_without_labels_can_be_drawn() -> None:
    for shape in ((1, 0), (2, 3)):
        assert "nan" not in svg_of(figures.memory_panels(np.zeros(shape), np.zeros(shape), "Memory"), "x")


def test_drift_is_drawn_on_a_logarithmic_scale_with_zero() -> None:
    distances = {"mean": {1: [0.0, 1.0], 3: [2.0, 300.0]}}
    figure = figures.drift_by_depth(distances, "Drift", "distance")
    ax = figure.axes[0]
    zero, one, hundred = ax.transData.transform([[1, 0], [1, 1], [1, 99]])[:, 1]
    assert (hundred - zero) / (one - zero) == pytest.approx(math.log(100) / math.log(2))
    assert {"mean, after task 1", "mean, after task 3"} <= set(texts(figure))
    assert len({str(line.get_linestyle()) for line in ax.lines}) == 2


def test_heatmap_has_a_color_bar_of_the_same_colors() -> None:
    figure = figures.accuracy_matrix_heatmap([[95.0, math.nan], [5.0, 55.0]], "Accuracy")
    cells, bar = (mesh.to_rgba(mesh.get_array().ravel()) for mesh in figure.axes[0].collections)
    assert np.array_equal(bar[[0, 5, 9]], cells[[2, 3, 0]]), "colors of 5, 55 and 95 percent"
    assert {"0 %", "50 %", "100 %"} <= set(texts(figure))


def test_long_titles_and_names_of_rows_are_wrapped() -> None:
    title, name = "a word of the title " * 10, "a name of a row " * 5
    figure = figures.paired_differences({name: [1.0]}, {name: None}, title, "x")
    written = texts(figure)
    assert sum("word" in text for text in written) == 3 and sum("row" in text for text in written) == 3


@pytest.mark.parametrize("count", [1, 4, 5, 9])
def test_legend_fits_the_width_of_the_figure(count: int) -> None:
    names = [f"er {'long ' * i}name" for i in range(count)]
    figure = figures.curves_over_tasks({name: [[1.0, 2.0]] for name in names}, "x", "y")
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x1 <= figure.bbox.x1 and box.y0 >= -1
    assert box.y1 <= figure.axes[0].get_window_extent().y0 - 36, "below the label of the axis"
