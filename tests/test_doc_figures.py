"""Figures and generated parts of the documentation are those of the records."""

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from tools import pages
from tools.doc_figures import FIGURES, rate_panels, verdict_rates
from tools.svg import SCHEMES

ROOT = Path(__file__).resolve().parents[1]
AGAIN = "make it again: make figures"
FILES = [(name, scheme) for name in FIGURES for scheme in SCHEMES]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), FILES)
def test_figure_is_that_of_the_records(name: str, scheme: str) -> None:
    path = ROOT / "docs" / "figures" / f"{name}-{scheme}.svg"
    assert path.read_text() == pages.figure_file(name, scheme), AGAIN


@pytest.mark.slow
@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_of_page_are_those_of_the_records(page: Path) -> None:
    assert page.read_text() == pages.filled(page), AGAIN


def test_rates_are_means_over_the_recorded_seeds() -> None:
    bn, cn, memory, _ = rate_panels()["mini-ImageNet, DER++"]
    assert list(bn.points) == [0.003, 0.005, 0.01, 0.03] and list(cn.points) == [0.005, 0.01, 0.03]
    assert bn.seeds == {0.003: 5, 0.005: 21, 0.01: 5, 0.03: 5} and list(memory.points) == [0.005]
    seeds = {count for curves in rate_panels().values() for curve in curves for count in curve.seeds.values()}
    page = (ROOT / "docs" / "which-norm.md").read_text()
    assert f"the mean of {min(seeds)} to {max(seeds)} seeds" in page


def test_page_states_the_seeds_that_a_verdict_needs() -> None:
    page = " ".join((ROOT / "docs" / "concepts" / "deciding.md").read_text().split())
    one, half = (min(n for n, rate in verdict_rates()[true].items() if rate >= 0.9) for true in ("1", "0.5"))
    assert f"For a difference of 1 point, expect {one} seeds; for half a point, {half}" in page


def test_readme_states_the_speed_of_the_benchmarks() -> None:
    """Counted again from the tables of the page."""
    train = (ROOT / "docs" / "benchmarks.md").read_text().partition("<!-- rows: train -->")[2].partition("<!-- end")[0]
    times = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) / ([\d.]+) = ", train)]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"CN is faster than BN in {sum(cn < bn for cn, bn in times)} of {len(times)} cases" in readme
    eager = (ROOT / "docs" / "benchmarks.md").read_text().partition("<!-- rows: eager -->")[2].partition("<!-- end")[0]
    ratios = re.findall(r"\| CN \| C\+\+ \| [\d.]+ \| ([\d.]+)", eager)
    assert f"took at most {max(ratios)} times as long with CN as with BN" in readme
