"""Figures of records: what is drawn is what the records say, and fits a page in any light."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix, acc_so_far
from contnorm.bench.records import Record, Store
from contnorm.report import figures
from contnorm.report.heat_map import colour_of, matrix_heat_map
from contnorm.report.plot import Plot, Span
from contnorm.report.views import MOST_CURVES

STORE = Store(Path(__file__).resolve().parents[2] / "docs" / "records" / "runs")


def records(name: str) -> list[Record]:
    return STORE.find(name)


def single_bn() -> list[Record]:
    return records("09ba865b075b")


DRAWN = {
    "heat map": lambda: matrix_heat_map(single_bn(), "Single, BN"),
    "17 tasks": lambda: matrix_heat_map(records("85d5f7c04f8c"), "ER, CN"),
    "accuracy": lambda: figures.accuracy_over_tasks(
        {"BN": records("ba9df79f047e"), "CN": records("85d5f7c04f8c")}, "Split CIFAR-100"
    ),
    "drift": lambda: figures.drift_over_tasks(single_bn(), "Drift"),
    "split": lambda: figures.forgetting_split(single_bn(), "Forgotten"),
    "pairs": lambda: figures.paired_differences({"CN - BN": [1.0, 2.0, -0.5]}, "Pairs"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_whole_named_and_takes_the_pages_colours(name: str) -> None:
    svg = DRAWN[name]()
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-label") and root.get("viewBox")
    assert root.get("width") is None and root.get("height") is None, "it is as wide as its place"
    assert "currentColor" in svg and "nan" not in svg
    assert svg == DRAWN[name](), "the same records give the same picture"


def deep() -> list[Record]:
    """A network of twenty layers whose drift grows with depth."""
    rows = [{f"norm{i}": {"mean": 0.1 * i * t, "var": 1.0 * i * t} for i in range(1, 21)} for t in (1, 2, 3)]
    return [replace(single_bn()[0], drift={"by_task": rows})]


def test_the_drift_of_a_deep_network_is_drawn_by_depth() -> None:
    svg = figures.drift_by_depth(deep(), "Drift")
    label = ElementTree.fromstring(svg).get("aria-label")
    assert label == (
        "Drift. At the end: mean 0.30 in the first layer, 6.00 in the last; "
        "var 3.00 in the first layer, 60.00 in the last."
    )
    assert "mean, after task 1<" in svg and "var, after task 3<" in svg
    assert figures.drift_by_depth([replace(deep()[0], drift={"by_task": deep()[0].drift["by_task"][:1]})], "One task")


def test_a_heat_map_has_the_numbers_of_the_matrix() -> None:
    svg, found = DRAWN["heat map"](), single_bn()
    mean = sum(r.matrix.at(4, 0) for r in found) / 5
    assert f">{mean:.0f}</text>" in svg
    written = re.findall(r"<text[^>]*>(\d+)</text>", svg)
    assert len(written) >= 15 + 10, "a number for each cell measured, and ten for the axes"
    assert len(re.findall(r"<text[^>]*>\d+</text>", DRAWN["17 tasks"]())) < 60, "too many cells for numbers"
    assert DRAWN["17 tasks"]().count("<rect") == 17 * 18 // 2 + 10, "a square for each cell measured, ten of the bar"
    assert f'fill="{colour_of(mean)}"' in svg


def test_accuracy_so_far_is_the_mean_over_tasks_learned() -> None:
    record = single_bn()[0]
    curve = acc_so_far(record.matrix)
    assert curve[0] == record.matrix.at(0, 0) and curve[-1] == pytest.approx(record.score("acc"))


def test_forgetting_is_split_into_what_exact_moments_give_back_and_the_rest() -> None:
    back, rest = figures.forgetting_parts(single_bn())
    found = single_bn()
    running = [AccuracyMatrix(**r.raw["matrix_running"]) for r in found]
    lost = sum(m.at(0, 0) - m.at(4, 0) for m in running) / 5
    assert rest[0] + back[0] == pytest.approx(lost)
    assert back[0] == pytest.approx(
        sum(r.matrix.at(4, 0) - m.at(4, 0) for r, m in zip(found, running, strict=True)) / 5
    )
    assert sum(back) > 0, "exact moments give something back"


def test_bars_stand_on_each_other_and_are_as_high_as_their_numbers() -> None:
    """The axis of the picture gives the height of a point; bars of weights, then of statistics, one a task."""
    back, rest = figures.forgetting_parts(single_bn())
    svg = ElementTree.fromstring(DRAWN["split"]())
    bars = [r for r in svg.iter("{http://www.w3.org/2000/svg}rect") if float(r.get("width") or 0) > 40]
    heights = [float(bar.get("height") or 0) for bar in bars]
    scale = heights[0] / rest[0]
    assert heights == pytest.approx([abs(v) * scale for v in (*rest, *back)], abs=0.2), "of a pixel, as written"
    tops = [float(bar.get("y") or 0) for bar in bars]
    assert tops[4] + heights[4] == pytest.approx(tops[0], abs=0.2)


def test_marks_of_differences_are_where_the_axis_says() -> None:
    svg = figures.paired_differences({"a": [0.0, 4.0], "b": [-1.0, 1.0, 3.0]}, "Pairs")
    dots = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', svg)]
    scale = (dots[1] - dots[0]) / 4
    assert [round((x - dots[0]) / scale, 1) for x in dots] == [0.0, 4.0, -1.0, 1.0, 3.0]
    assert ">a</text>" in svg and ">b</text>" in svg and "Means: a +2.00; b +1.00." in svg


def test_no_two_of_the_lines_in_a_picture_look_alike() -> None:
    """Neither by colour, nor by mark where colours can't be told apart."""
    plot = Plot("Lines", Span(0, 2), Span(0, 2), "x")
    for number in range(MOST_CURVES):
        plot.line([(1.0, 1.0)], number, name=f"line {number}")
    drawn = re.findall(r'(<(?:circle|rect|path) [^>]*?) fill="(#\w{6})"/>', plot.svg("All in one place."))
    legend = drawn[MOST_CURVES:]
    assert len(legend) == MOST_CURVES
    assert len({mark for mark, _ in legend}) == len({colour for _, colour in legend}) == MOST_CURVES


def test_a_curve_that_never_changes_can_be_drawn() -> None:
    for drawn in (
        figures.curves_over_tasks({"flat": [[5.0, 5.0]], "zero": [[0.0, 0.0]]}, "x", "y"),
        figures.curves_over_tasks({"zero": [[0.0, 0.0]]}, "x", "y"),
        figures.paired_differences({"none": [0.0, 0.0]}, "x"),
    ):
        assert ElementTree.fromstring(drawn).tag.endswith("svg") and "nan" not in drawn and "inf" not in drawn


def test_a_title_with_odd_characters_does_not_break_the_page() -> None:
    drawn = ElementTree.fromstring(figures.paired_differences({"a < b": [1.0]}, 'A "title" <b> & more'))
    told = ["".join(text.itertext()) for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert 'A "title" <b> & more' in told and "a < b" in told
