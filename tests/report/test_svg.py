"""SVG of figures for the page: small, themed by the page, without anything that other elements could run into."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from importlib.resources import files

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import matplotlib

from contnorm.bench.figures import COLORS
from contnorm.report import figures
from contnorm.report.page import Page, RunView, page_html
from contnorm.report.svg import svg_of

SVG = "{http://www.w3.org/2000/svg}"
CURVES = {"bn": [[1.0, 2.5], [2.0, 3.0]], "cn": [[2.0, 3.0]]}


def curves() -> str:
    return svg_of(figures.curves_over_tasks(CURVES, "Curves", "percent"), "Curves.")


def test_svg_is_labelled_and_as_wide_as_its_place() -> None:
    root = ElementTree.fromstring(curves())
    assert (
        root.get("role") == "img" and root.get("aria-label") == "Curves." and root.get("viewBox", "").startswith("0 0 ")
    )
    assert root.get("width") is None and root.get("height") is None


def test_svg_takes_ink_and_series_colors_from_the_page() -> None:
    svg = curves()
    assert 'fill="currentColor"' in svg and "stroke: currentColor" in svg and "#000000" not in svg
    for number in (1, 2):
        assert f"var(--series-{number}, {COLORS[number - 1]})" in svg
    assert not re.search(r"[^,] #4477aa", svg), "only as a fallback"


def test_page_defines_every_series_color_in_light_dark_and_print() -> None:
    css = files("contnorm.report").joinpath("templates", "page.css").read_text(encoding="utf-8")
    palettes = [re.findall(r"--series-(\d): (#\w{6});", block) for block in re.split(r"@media", css)]
    light, dark, paper = [dict(palette) for palette in palettes if palette]
    assert light == paper == {str(number): color for number, color in enumerate(COLORS, 1)}
    assert dark.keys() == light.keys() and not set(dark.values()) & set(light.values())


def test_svg_does_not_depend_on_the_users_matplotlib_settings() -> None:
    plain = curves()
    changed = {
        "font.size": 30,
        "axes.spines.top": True,
        "svg.fonttype": "path",
        "lines.linewidth": 9,
        "axes.grid": True,
    }
    with matplotlib.rc_context(changed):
        assert curves() == plain
        assert matplotlib.rcParams["font.size"] == 30, "the user's settings are restored"


def test_svg_has_no_date_metadata_style_sheet_or_clip_path() -> None:
    svg = curves()
    for part in ("<?xml", "<!DOCTYPE", "<metadata", "<style", "clip-path", "clipPath", "xlink", "font-family", "<!--"):
        assert part not in svg
    assert svg == curves()


def test_svg_text_is_text_and_unchanged() -> None:
    """Numbers in attributes are shortened, those in text are not."""
    name = "lr 0.123456 <&> \"'$x^2$"
    svg = svg_of(figures.curves_over_tasks({name: [[1.0, 2.0]]}, "A title", "y"), "x")
    written = ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert name in written and "A title" in written
    assert not re.search(r'd="[^"]*\.\d{3}', svg)


def test_svg_ids_are_only_those_referenced() -> None:
    svg = curves()
    ids = re.findall(r' id="([^"]*)"', svg)
    assert ids and set(ids) == set(re.findall(r'(?:href="|url\()#([^")]*)', svg)) and len(ids) == len(set(ids))


def test_page_ids_of_equal_figures_differ() -> None:
    page = page_html(Page("t", "", runs=[RunView("a", "a", "", "", [], [curves(), curves()])]))
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 4
    assert set(re.findall(r'<use href="#([^"]*)"', page)) <= set(ids)


def test_tooltips_belong_to_the_markers_in_order() -> None:
    figure = figures.class_scatter({"bn": [(5.0, 20.0), (50.0, 30.0)], "cn": [(5.0, 25.0)]}, "Classes")
    svg = svg_of(figure, "x", {"series-0": ["a <b>", "c"], "series-1": ["d"]})
    root = ElementTree.fromstring(svg)
    marked = [g for g in root.iter(f"{SVG}g") if len(g) and g[0].tag == f"{SVG}title"]
    assert [g[0].text for g in marked] == ["a <b>", "c", "d"]
    assert all(g[1].tag == f"{SVG}use" for g in marked)
    across = [float(g[1].get("x", "")) for g in marked]
    assert across[0] == across[2] < across[1]


def test_narrow_figures_are_not_scaled_up() -> None:
    root = ElementTree.fromstring(svg_of(figures.accuracy_matrix_heatmap([[50.0]], "One task"), "x"))
    assert root.get("class") == "narrow" and root.get("style") == "width: 312px; min-width: 221px"
