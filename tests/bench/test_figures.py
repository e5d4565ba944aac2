"""Figures of accuracy matrices: what is drawn are the numbers of the arrays."""

import io
import math
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.figure import Figure

from contnorm.bench.figures import COLORS, MARKERS, accuracy_curve, accuracy_matrix, figure

NAN = math.nan
TWO_SEEDS = np.array([[[90.0, NAN], [70.0, 80.0]], [[80.0, NAN], [60.0, 90.0]]])


def test_accuracy_curve_is_mean_over_tasks_and_seeds() -> None:
    ax = Figure().add_subplot()
    accuracy_curve(ax, TWO_SEEDS, "CN")
    line = ax.lines[0]
    assert line.get_xdata().tolist() == [1, 2] and line.get_ydata().tolist() == [85.0, 75.0]
    assert line.get_label() == "CN"


def test_accuracy_curve_band_is_one_standard_deviation() -> None:
    ax = Figure().add_subplot()
    accuracy_curve(ax, TWO_SEEDS)
    (band,) = ax.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(85 + math.sqrt(50)) and heights.min() == pytest.approx(75.0)


def test_accuracy_curves_on_the_same_axes_differ_in_color_and_marker() -> None:
    ax = Figure().add_subplot()
    for index in range(len(COLORS)):
        accuracy_curve(ax, TWO_SEEDS, str(index))
    assert len({line.get_color() for line in ax.lines}) == len(COLORS)
    assert len({line.get_marker() for line in ax.lines}) == len(MARKERS) == len(COLORS)


def test_accuracy_matrix_averages_over_seeds_and_leaves_nan_cells_empty() -> None:
    ax = Figure().add_subplot()
    mesh = accuracy_matrix(ax, TWO_SEEDS)
    assert [text.get_text() for text in ax.texts] == ["85", "65", "85"]
    assert mesh.get_array().mask.tolist() == [[False, True], [False, False]]
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0, 100)


def test_accuracy_matrix_first_task_is_in_the_top_left_corner() -> None:
    ax = Figure().add_subplot()
    accuracy_matrix(ax, TWO_SEEDS[0])
    assert ax.get_ylim() == (2.0, 0.0) and ax.get_xlim() == (0.0, 2.0)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1", "2"]


def test_figure_has_curve_matrix_and_title_without_math() -> None:
    drawn = figure([TWO_SEEDS], ["cn $4"])
    assert drawn.get_suptitle() == "cn $4" and len(drawn.axes) == 3
    file = io.BytesIO()
    drawn.savefig(file, format="svg")
    assert not re.search(rb"\bnan\b", file.getvalue())


def test_matrices_of_stopped_runs_can_be_drawn() -> None:
    """A run stopped by max_steps has rows of NaN for the tasks it did not reach."""
    stopped = np.array([[[90.0, NAN], [NAN, NAN]]])
    assert figure([stopped], ["BN"]) is not None
