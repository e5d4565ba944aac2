"""Figures of records: what is drawn and described is what the records contain."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import matplotlib

from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix, acc_so_far
from contnorm.bench.metrics.memory_stats import Census
from contnorm.bench.metrics.multilabel import mean_ap
from contnorm.bench.records import Record, Store
from contnorm.bench.sequential import FIRST_SEED
from contnorm.paper.recipe import find_recipe
from contnorm.report import figures, record_figures
from tests.report.record_samples import TASKS, make_records

STORE = Store(Path(__file__).resolve().parents[2] / "docs" / "records" / "runs")
SVG = "{http://www.w3.org/2000/svg}"


def single_bn() -> list[Record]:
    """The five exploratory seeds of the run."""
    return [record for record in STORE.find("09ba865b075b") if record.seed < FIRST_SEED]


@pytest.fixture(scope="module")
def multilabel(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    root = tmp_path_factory.mktemp("runs")
    make_records(find_recipe("table5"), root, only=lambda c: c.place["stream"] == "cocoseq" and c.place["norm"] == "bn")
    return Store(root).load_all().records


def deep() -> list[Record]:
    """A network of twenty layers whose drift grows with depth."""
    rows = [{f"norm{i}": {"mean": 0.1 * i * t, "var": 1.0 * i * t} for i in range(1, 21)} for t in (1, 2, 3)]
    return [replace(single_bn()[0], drift={"by_task": rows})]


DRAWN: dict[str, Callable[[], str]] = {
    "heat map": lambda: record_figures.matrix_heatmap(single_bn(), "Single, BN"),
    "17 tasks": lambda: record_figures.matrix_heatmap(STORE.find("85d5f7c04f8c"), "ER, CN"),
    "accuracy": lambda: record_figures.curves_over_tasks(
        {
            name: [acc_so_far(record.matrix) for record in STORE.find(run)]
            for name, run in (("BN", "ba9df79f047e"), ("CN", "85d5f7c04f8c"))
        },
        "Split CIFAR-100",
        "accuracy",
    ),
    "learning rates": lambda: record_figures.score_by_rate(
        {"norm=bn": [(0.01, 60.0, 1.0), (0.1, 70.0, 2.0)], "norm=cn": [(0.1, 65.0, 0.0)]}, "split-mnist, er", "ACC"
    ),
    "drift": lambda: record_figures.drift_over_tasks(single_bn(), "Drift"),
    "drift by depth": lambda: record_figures.drift_by_depth(deep(), "Drift"),
    "forgetting": lambda: record_figures.forgetting_bars(single_bn(), "Forgotten"),
    "pairs": lambda: record_figures.paired_differences({"CN - BN": [1.0, 2.0, -0.5]}, "Pairs"),
}
DRAWN_OF_LABELS: dict[str, Callable[[list[Record]], str]] = {
    "bars": lambda records: record_figures.group_bars(
        {"bn": [[r.score("map", g) for r in records] for g in ("majority", "minority")]},
        ["majority", "minority"],
        "B",
        "y",
    ),
    "classes": lambda records: record_figures.ap_by_group(records, "Classes <&>"),
    "two runs": lambda records: record_figures.ap_by_frequency({"bn": records, "cn4": records[:1]}, "Classes"),
    "memory": lambda records: record_figures.memory_panels(records, "Memory <&>"),
    "heat map": lambda records: record_figures.matrix_heatmap(records, "mAP"),
}


def assert_fits_the_page(draw: Callable[[], str]) -> None:
    svg = draw()
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-label") and root.get("viewBox")
    assert root.get("width") is None and root.get("height") is None, "as wide as its place"
    assert "currentColor" in svg and "nan" not in svg
    assert svg == draw(), "the same records give the same bytes"


@pytest.mark.parametrize("name", DRAWN)
def test_figure_is_labelled_themed_and_deterministic(name: str) -> None:
    assert_fits_the_page(DRAWN[name])


@pytest.mark.parametrize("name", DRAWN_OF_LABELS)
def test_multilabel_figure_is_labelled_themed_and_deterministic(name: str, multilabel: list[Record]) -> None:
    assert_fits_the_page(lambda: DRAWN_OF_LABELS[name](multilabel))


def label_of(svg: str) -> str:
    return ElementTree.fromstring(svg).get("aria-label") or ""


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """Arguments of the calls of a drawing function, from now on."""
    calls: list[tuple[Any, ...]] = []
    draw = getattr(figures, name)
    monkeypatch.setattr(figures, name, lambda *args: (calls.append(args), draw(*args))[1])
    return calls


def test_drift_of_a_deep_network_is_described_by_depth() -> None:
    svg = DRAWN["drift by depth"]()
    assert label_of(svg) == (
        "Drift. At the end: mean 0.30 in the first layer, 6.00 in the last; "
        "var 3.00 in the first layer, 60.00 in the last."
    )
    assert "mean, after task 1<" in svg and "var, after task 3<" in svg
    one_task = replace(deep()[0], drift={"by_task": deep()[0].drift["by_task"][:1]})
    assert record_figures.drift_by_depth([one_task], "One task")


def test_drift_of_few_layers_is_drawn_over_tasks_and_of_many_by_depth() -> None:
    assert any("norm layer, from the input on" in svg for svg in record_figures.run_figures(deep()))
    assert not any("norm layer, from the input on" in svg for svg in record_figures.run_figures(single_bn()))


def test_heatmap_has_the_numbers_and_colors_of_the_matrix() -> None:
    svg, records = DRAWN["heat map"](), single_bn()
    mean = sum(r.matrix.at(4, 0) for r in records) / 5
    assert f">{mean:.0f}</text>" in svg
    assert len(re.findall(r"<text[^>]*>\d+</text>", svg)) == 15 + 10, "a number per cell, and ten at the axes"
    color = matplotlib.colors.to_hex(matplotlib.colormaps["viridis"](mean / 100))
    assert f'fill="{color}"' in svg


def test_heatmap_of_many_tasks_has_colors_only() -> None:
    svg = DRAWN["17 tasks"]()
    assert len(re.findall(r"<text[^>]*>\d+</text>", svg)) == 10, "five at each axis"
    assert len(re.findall(r'<path [^>]*fill="#', svg)) == 17 * 18 // 2 + 10, "measured cells, and the color bar"


def test_heatmap_is_the_mean_of_the_tasks_that_all_seeds_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, "accuracy_matrix_heatmap")
    full, stopped = single_bn()[:2]
    stopped = replace(stopped, counted=AccuracyMatrix([[50, None], [40, 60]], [100, 100]))
    record_figures.matrix_heatmap([full, stopped], "x")
    matrix = calls[0][0]
    assert matrix.shape == (2, 2) and np.isnan(matrix[0, 1])
    assert matrix[1, 0] == pytest.approx((full.matrix.at(1, 0) + 40) / 2)


def test_heatmap_of_labels_has_their_map(multilabel: list[Record]) -> None:
    svg = DRAWN_OF_LABELS["heat map"](multilabel)
    values = [mean_ap(r.counted.own[2][0]) for r in multilabel]  # type: ignore[union-attr, arg-type]
    assert f">{sum(values) / len(values):.0f}</text>" in svg and "mAP on task" in svg


def test_accuracy_so_far_is_the_mean_over_tasks_learned() -> None:
    record = single_bn()[0]
    curve = acc_so_far(record.matrix)
    assert curve[0] == record.matrix.at(0, 0) and curve[-1] == pytest.approx(record.score("acc"))


def test_accuracy_over_tasks_describes_the_final_means() -> None:
    finals = [np.mean([r.score("acc") for r in STORE.find(name)]) for name in ("ba9df79f047e", "85d5f7c04f8c")]
    assert label_of(DRAWN["accuracy"]()) == f"Split CIFAR-100. At the end: BN {finals[0]:.2f}, CN {finals[1]:.2f}."


def test_score_by_rate_describes_the_highest_means() -> None:
    said = "split-mnist, er: ACC by learning rate. Highest: norm=bn 70.00 at 0.1, norm=cn 65.00 at 0.1."
    assert label_of(DRAWN["learning rates"]()) == said


def test_forgetting_is_split_into_the_recovered_part_and_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, "forgetting_bars")
    record_figures.forgetting_bars(single_bn(), "x")
    recovered, remaining, _ = calls[0]
    records = single_bn()
    running = [AccuracyMatrix(**r.raw["matrix_running"]) for r in records]
    forgotten = sum(m.at(0, 0) - m.at(4, 0) for m in running) / 5
    assert remaining[0] + recovered[0] == pytest.approx(forgotten)
    assert recovered[0] == pytest.approx(
        sum(r.matrix.at(4, 0) - m.at(4, 0) for r, m in zip(records, running, strict=True)) / 5
    )
    assert sum(recovered) > 0 and len(recovered) == len(remaining) == 4


def test_paired_differences_describe_their_means() -> None:
    svg = record_figures.paired_differences({"a": [0.0, 4.0], "b": [-1.0, 1.0, 3.0]}, "Pairs")
    assert ">a</text>" in svg and ">b</text>" in svg and label_of(svg) == "Pairs. Means: a +2.00; b +1.00."


def test_title_with_special_characters_stays_text() -> None:
    root = ElementTree.fromstring(record_figures.paired_differences({"a < b": [1.0]}, 'A "title" <b> & more'))
    written = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert 'A "title" <b> & more' in written and "a < b" in written
    assert (root.get("aria-label") or "").startswith('A "title" <b> & more')


def test_group_bars_have_means_and_deviations_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch, "group_bars")
    values = {"bn": [[10.0, 20.0], [30.0, 30.0]], "cn4": [[-40.0], []]}
    svg = record_figures.group_bars(values, ["majority", "minority"], "mAP", "percent")
    spreads = calls[0][0]
    assert spreads["bn"] == [pytest.approx((15, math.sqrt(50))), (30, 0)]
    assert spreads["cn4"][0] == (-40, 0), "a single seed has no deviation"
    assert label_of(svg) == "mAP. majority: bn 15.0, cn4 -40.0; minority: bn 30.0, cn4 none."


def test_class_scatter_has_counts_precisions_and_tooltips(
    multilabel: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream shows the classes 180, 120, 60, 30, 12 and 6 times."""
    calls = recorded(monkeypatch, "class_scatter")
    root = ElementTree.fromstring(DRAWN_OF_LABELS["classes"](multilabel))
    tooltips = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert [text.partition(":")[0] for text in tooltips] == [
        "a, majority", "b, majority", "c, moderate", "d, moderate", "e, minority", "f, minority",
    ]  # fmt: skip
    ap = 100 * sum(r.counted.tally[-1].ap[2] for r in multilabel) / len(multilabel)  # type: ignore[union-attr, operator]
    assert tooltips[2] == f"c, moderate: 60 images, AP {ap:.1f}"
    points = [point for some in calls[0][0].values() for point in some]
    assert [count for count, _ in points] == [180, 120, 60, 30, 12, 6] and points[2][1] == pytest.approx(ap)
    across = [float(g[1].get("x") or 0) for g in root.iter(f"{SVG}g") if len(g) and g[0].tag == f"{SVG}title"]
    scale = (across[0] - across[5]) / math.log(180 / 6)
    assert [(x - across[5]) / scale for x in across] == pytest.approx(
        [math.log(n / 6) for n in (180, 120, 60, 30, 12, 6)], abs=0.02
    )
    group = [mean_ap(r.counted.tally[-1], [0, 1]) for r in multilabel]  # type: ignore[union-attr]
    assert f"majority {sum(group) / len(group):.1f}, 2;" in (root.get("aria-label") or "")


def test_memory_panels_have_shares_of_memory_and_stream(
    multilabel: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(monkeypatch, "memory_panels")
    svg = DRAWN_OF_LABELS["memory"](multilabel)
    held, shown, _ = calls[0]
    assert re.findall(r"after task \d", svg) == [f"after task {i + 1}" for i in range(TASKS)]
    assert held == pytest.approx(np.full((TASKS, 6), 100 / 6)), "as much of each class"
    assert shown == pytest.approx(np.tile(np.array([60, 40, 20, 10, 4, 2]) / 1.36, (TASKS, 1)))
    assert "minority classes 33.3 percent of the memory's labels and 4.4 of the stream's." in label_of(svg)


def test_memory_panels_order_classes_by_final_frequency_and_omit_unseen_ones(
    multilabel: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(monkeypatch, "memory_panels")
    census = Census(4, ((3, 0, 0), (2, 2, 0)), ((5, 0, 0), (5, 9, 0)), (3, 5), (0, 1))
    first = multilabel[0]
    raw = {**first.raw, "census": census.to_json(), "classes": {"names": list("abc"), "groups": ["minority"] * 3}}
    record_figures.memory_panels([Record(first.config, 0, first.counted, {}, raw)], "Memory")
    held, shown, _ = calls[0]
    assert held.tolist() == [[0, 100], [50, 50]] and shown[1] == pytest.approx([900 / 14, 500 / 14])


def test_record_without_memory_has_no_memory_panels(multilabel: list[Record]) -> None:
    empty = {"census": Census(0, (), (), (), ()).to_json()}
    assert record_figures.has_memory(multilabel[0])
    assert not record_figures.has_memory(Record(multilabel[0].config, 0, multilabel[0].counted, {}, empty))


def test_figures_of_a_run_without_any_step_are_empty(multilabel: list[Record]) -> None:
    first = multilabel[0]
    raw = {**first.raw, "census": Census(4, ((0,) * 6,), ((0,) * 6,), (0,), (0,)).to_json()}
    record = Record(first.config, 0, first.counted, {}, raw)
    svg = record_figures.ap_by_group([record], "Classes")
    assert "their number: none." in label_of(svg) and "nan" not in svg
    assert "nan" not in record_figures.memory_panels([record], "Memory")
    groups = record_figures.group_bars({"bn": [[math.nan], []]}, ["majority", "minority"], "B", "y")
    assert "majority: bn none; minority: bn none." in groups and "nan" not in groups
