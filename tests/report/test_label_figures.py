"""Figures where pictures have several labels: bars, marks and panels lie where the records' numbers put them."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from contnorm.bench.memory_stats import Census
from contnorm.bench.metrics.multilabel import mean_ap
from contnorm.bench.records import Record, Store
from contnorm.paper.recipe import find_recipe
from contnorm.report import multilabel_figures as label_figures
from contnorm.report.heat_map import matrix_heat_map
from contnorm.report.memory_panels import has_memory, memory_panels
from contnorm.report.plot import COLOURS
from tests.report.made_records import TASKS, make_records

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    root = tmp_path_factory.mktemp("runs")
    make_records(find_recipe("table5"), root, only=lambda c: c.place["stream"] == "cocoseq" and c.place["norm"] == "bn")
    return Store(root).load_all().records


DRAWN = {
    "bars": lambda made: label_figures.group_bars(
        {"bn": [[r.score("map", g) for r in made] for g in ("majority", "minority")]},
        ["majority", "minority"],
        "B",
        "y",
    ),
    "classes": lambda made: label_figures.ap_of_groups(made, "Classes <&>"),
    "two runs": lambda made: label_figures.ap_by_frequency({"bn": made, "cn4": made[:1]}, "Classes"),
    "memory": lambda made: memory_panels(made, "Memory <&>"),
    "over tasks": lambda made: label_figures.map_over_tasks({"bn": made}, "cocoseq"),
    "heat map": lambda made: matrix_heat_map(made, "mAP"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_whole_named_and_takes_the_pages_colours(name: str, made: list[Record]) -> None:
    svg = DRAWN[name](made)
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-label") and root.get("viewBox")
    assert root.get("width") is None and root.get("height") is None, "it is as wide as its place"
    assert "currentColor" in svg and "nan" not in svg
    assert svg == DRAWN[name](made), "the same records give the same picture"


def heights(svg: str, colour: str) -> list[float]:
    """Of the bars of a colour, but for that of the legend, which is 14 wide, and marks, which are 6."""
    bars = [r for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("fill") == colour]
    return [float(bar.get("height") or 0) for bar in bars if bar.get("width") not in ("14", "6")]


def test_bars_are_as_high_as_the_means_and_strokes_as_long_as_the_deviations() -> None:
    values = {"bn": [[10.0, 20.0], [30.0, 30.0]], "cn4": [[-40.0], []]}
    svg = label_figures.group_bars(values, ["majority", "minority"], "mAP", "percent")
    first, second = heights(svg, COLOURS[0])
    [below] = heights(svg, COLOURS[1])
    assert (second / first, below / first) == pytest.approx((30 / 15, 40 / 15), rel=0.02), (
        "a tenth of a pixel, as written"
    )
    ends = re.findall(
        r'points="[\d.]+,([\d.]+) [\d.]+,([\d.]+)" fill="none" stroke="currentColor" stroke-width="1.2"', svg
    )
    assert len(ends) == 1, "neither one seed nor two alike have a deviation"
    long = abs(float(ends[0][0]) - float(ends[0][1]))
    assert long / first == pytest.approx(2 * math.sqrt(50) / 15, rel=0.02)
    label = ElementTree.fromstring(svg).get("aria-label")
    assert label == "mAP. majority: bn 15.0, cn4 -40.0; minority: bn 30.0, cn4 none."


def test_a_class_stands_at_how_often_it_came_and_how_well_it_is_known(made: list[Record]) -> None:
    """The made stream shows the classes 180, 120, 60, 30, 12 and 6 times; the horizontal axis is by powers."""
    root = ElementTree.fromstring(DRAWN["classes"](made))
    told = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert [text.partition(":")[0] for text in told] == [
        "a, majority", "b, majority", "c, moderate", "d, moderate", "e, minority", "f, minority",
    ]  # fmt: skip
    ap = 100 * sum(r.counted.tally[-1].ap[2] for r in made) / len(made)  # type: ignore[union-attr, operator]
    assert told[2] == f"c, moderate: 60 pictures, {ap:.1f}"
    across = [_centre(group[1]) for group in root.iter(f"{SVG}g") if group[0].tag == f"{SVG}title"]
    scale = (across[0] - across[5]) / math.log(180 / 6)
    assert [(x - across[5]) / scale for x in across] == pytest.approx(
        [math.log(n / 6) for n in (180, 120, 60, 30, 12, 6)], abs=0.02
    )
    group = [mean_ap(r.counted.tally[-1], [0, 1]) for r in made]  # type: ignore[union-attr]
    assert f"majority {sum(group) / len(group):.1f}, 2;" in (root.get("aria-label") or "")


def _centre(mark: ElementTree.Element) -> float:
    if mark.tag == f"{SVG}circle":
        return float(mark.get("cx") or 0)
    if mark.tag == f"{SVG}rect":
        return float(mark.get("x") or 0) + float(mark.get("width") or 0) / 2
    return float(re.findall(r"M([\d.]+)", mark.get("d") or "")[0])


def test_the_memory_stands_beside_the_stream_after_each_task(made: list[Record]) -> None:
    svg = DRAWN["memory"](made)
    assert re.findall(r"after task \d", svg) == [f"after task {i + 1}" for i in range(TASKS)]
    bars = heights(svg, COLOURS[0])
    assert len(bars) == 6 * TASKS and bars == pytest.approx([bars[0]] * len(bars)), "it holds as much of each"
    steps = [
        [tuple(map(float, p.split(","))) for p in line.split()]
        for line in re.findall(r'<polyline points="([^"]*)"', svg)
    ]
    floor = max(float(y) for y in re.findall(r'd="M58 [\d.]+V([\d.]+)H', svg))
    rise = [(floor - y) ** 2 for _, y in steps[-1]][::2]
    assert [value / rise[0] for value in rise] == pytest.approx(
        [1, 40 / 60, 20 / 60, 10 / 60, 4 / 60, 2 / 60], abs=0.02
    )
    assert bars[-1] ** 2 / rise[0] == pytest.approx((1 / 6) / (60 / 136), rel=0.02)
    label = ElementTree.fromstring(svg).get("aria-label") or ""
    assert "minority classes 33.3 percent of the memory's labels and 4.4 of the stream's." in label


def test_classes_never_shown_have_no_place_and_none_held_no_bar(made: list[Record]) -> None:
    census = Census(4, ((3, 0, 0), (2, 2, 0)), ((5, 0, 0), (5, 9, 0)), (3, 5), (0, 1))
    raw = {**made[0].raw, "census": census.to_json(), "classes": {"names": list("abc"), "groups": ["minority"] * 3}}
    svg = memory_panels([Record(made[0].config, 0, made[0].counted, {}, raw)], "Memory")
    assert len(heights(svg, COLOURS[0])) == 3
    xs = [float(x) for x in re.findall(r'<rect x="([\d.]+)"[^>]*height="[\d.]+" fill', svg)][:3]
    assert xs[0] == xs[2] > xs[1], "in the order of the end, where the second is the most frequent"
    assert not has_memory(
        Record(made[0].config, 0, made[0].counted, {}, {"census": Census(0, (), (), (), ()).to_json()})
    )


def test_where_no_class_was_shown_the_figure_is_empty(made: list[Record]) -> None:
    nothing = Census(4, ((0,) * 6,), ((0,) * 6,), (0,), (0,)).to_json()
    raw = {**made[0].raw, "census": nothing}
    svg = label_figures.ap_of_groups([Record(made[0].config, 0, made[0].counted, {}, raw)], "Classes")
    assert "how many: none." in (ElementTree.fromstring(svg).get("aria-label") or "") and "nan" not in svg
    assert "nan" not in memory_panels([Record(made[0].config, 0, made[0].counted, {}, raw)], "Memory")
    groups = label_figures.group_bars({"bn": [[math.nan], []]}, ["majority", "minority"], "B", "y")
    assert "majority: bn none; minority: bn none." in groups and "nan" not in groups


def test_a_heat_map_of_labels_has_their_map(made: list[Record]) -> None:
    svg = DRAWN["heat map"](made)
    found = [mean_ap(r.counted.own[2][0]) for r in made]  # type: ignore[union-attr, arg-type]
    assert f">{sum(found) / len(found):.0f}</text>" in svg and "mAP on task" in svg
