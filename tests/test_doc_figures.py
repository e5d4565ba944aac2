"""Figures and generated parts of the documentation are those of the records, and are readable."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ElementTree
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.image import imread
from tools import pages
from tools.doc_figures import FIGURES, rate_panels, situations, verdict_rates
from tools.svg import SCHEMES, scheme_colors

ROOT = Path(__file__).resolve().parents[1]
AGAIN = "make it again: make figures"
FILES = [(name, scheme) for name in FIGURES for scheme in SCHEMES]
PHONE, SMALLEST = 358, 9.5  # pixels: a figure on a screen of 390, and letters that can be read


def figure_path(name: str, scheme: str) -> Path:
    return ROOT / "docs" / "figures" / f"{name}-{scheme}.svg"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), FILES)
def test_figure_is_that_of_the_records(name: str, scheme: str) -> None:
    assert figure_path(name, scheme).read_text() == pages.figure_file(name, scheme), AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_of_page_are_those_of_the_records(page: Path) -> None:
    assert page.read_text() == pages.filled(page), AGAIN


@pytest.mark.slow
def test_social_preview_is_that_of_the_records() -> None:
    made = pages.preview_png()
    assert made == pages.preview_png(), "the same records give the same bytes"
    expected, current = (imread(BytesIO(data)) for data in (made, pages.PREVIEW.read_bytes()))
    assert current.shape[:2] == (640, 1280)
    assert np.abs(expected - current).mean() < 1e-3, AGAIN  # libraries round and compress differently


def test_every_figure_is_on_a_page() -> None:
    shown = "\n".join(page.read_text() for page in pages.pages())
    assert [name for name in FIGURES if f"<!-- figure: {name} -->" not in shown] == []


@pytest.mark.parametrize(("name", "scheme"), FILES)
def test_figure_has_colors_of_its_scheme_and_letters_for_a_phone(name: str, scheme: str) -> None:
    text = figure_path(name, scheme).read_text()
    root = ElementTree.fromstring(text)
    colors, other = (scheme_colors(one) for one in (scheme, *(set(SCHEMES) - {scheme})))
    assert colors["ink"] in text and colors["series-1"] in text
    assert other["ink"] not in text and "currentColor" not in text and "var(" not in text
    for label in root.iter("{http://www.w3.org/2000/svg}text"):
        size = re.search(r"font(?:-size)?:[^;]*?([\d.]+)px", label.get("style", ""))
        assert size and float(size[1]) * PHONE / float(root.get("width") or 0) >= SMALLEST, "".join(label.itertext())
    assert len(text) < 30_000 and len(root.get("aria-label") or "") > 40


def test_rates_are_means_over_the_recorded_seeds() -> None:
    bn, cn, memory, _ = rate_panels()["mini-ImageNet, DER++"]
    assert list(bn.points) == [0.003, 0.005, 0.01, 0.03] and list(cn.points) == [0.005, 0.01, 0.03]
    assert bn.seeds == {0.003: 5, 0.005: 21, 0.01: 5, 0.03: 5} and list(memory.points) == [0.005]
    seeds = {count for curves in rate_panels().values() for curve in curves for count in curve.seeds.values()}
    page = (ROOT / "docs" / "which-norm.md").read_text()
    assert f"the mean of {min(seeds)} to {max(seeds)} seeds" in page


@pytest.mark.slow
def test_situations_have_the_differences_of_the_page() -> None:
    page = (ROOT / "docs" / "results" / "evidence.md").read_text()
    for row in situations():
        assert f"{row.mean:+.2f} ({row.low:+.2f} to {row.high:+.2f})" in page, row


def test_page_states_the_seeds_that_a_verdict_needs() -> None:
    page = " ".join((ROOT / "docs" / "concepts" / "deciding.md").read_text().split())
    one, half = (min(n for n, rate in verdict_rates()[true].items() if rate >= 0.9) for true in ("1", "0.5"))
    assert f"For a difference of 1 point, expect {one} seeds; for half a point, {half}" in page


def test_site_shows_the_figure_of_its_scheme() -> None:
    """The hook turns each generated picture into two images, and leaves none."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    hook = runpy.run_path(str(ROOT / "docs" / "site" / "pictures.py"))
    for page in pages.pages():
        text = page.read_text()
        names = re.findall(r"<!-- figure: ([\w-]+) -->", text)
        shown = hook["with_images"](text)
        assert "<picture>" not in shown
        assert re.findall(r"figures/([\w-]+)-(light|dark)\.svg#only-(light|dark)\)", shown) == [
            (name, scheme, scheme) for name in names for scheme in SCHEMES
        ]


def test_readme_states_the_speed_of_the_benchmarks() -> None:
    """Counted again from the tables of the page."""
    train = (ROOT / "docs" / "benchmarks.md").read_text().partition("<!-- rows: train -->")[2].partition("<!-- end")[0]
    times = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) / ([\d.]+) = ", train)]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"CN is faster than BN in {sum(cn < bn for cn, bn in times)} of {len(times)} cases" in readme
    eager = (ROOT / "docs" / "benchmarks.md").read_text().partition("<!-- rows: eager -->")[2].partition("<!-- end")[0]
    ratios = re.findall(r"\| CN \| C\+\+ \| [\d.]+ \| ([\d.]+)", eager)
    assert f"took at most {max(ratios)} times as long with CN as with BN" in readme
