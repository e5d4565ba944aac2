"""The page of runs: whole in one file, right in its numbers, and fit for a browser of any width."""

from __future__ import annotations

import csv
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("jinja2", reason="jinja2 is not installed")

from contnorm.cli.reporting import FORMATS, report
from contnorm.errors import UserError
from contnorm.report.page import Cell, Page, Table, page_html
from contnorm.results import Record, Store

STORE = Store(Path(__file__).resolve().parents[2] / "docs" / "records" / "runs")


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return list(STORE)


@pytest.fixture(scope="module")
def html(records: list[Record]) -> str:
    return report(records, "html")


def test_the_page_needs_nothing_from_outside(html: str) -> None:
    assert not re.findall(r"<script|<link|<img|@import|url\((?!#)", html)
    addresses = set(re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", html))
    assert all(address.startswith("data:image/png") for address in addresses), "heat maps carry their pixels"


def test_scores_on_the_page_are_those_of_the_records(html: str) -> None:
    for text in ("72.79 +- 2.93", "78.59 +- 1.58", "66.45 +- 1.19"):
        assert text in html
    assert html.count("<details>") == 6


def test_a_run_can_be_made_again_from_its_command(html: str) -> None:
    assert "contnorm run --stream split-cifar100 --strategy er --norm cn --seeds 5 --set train.precision=tf32" in html
    assert (
        "contnorm run --stream permuted-mnist --strategy single --norm bn --seeds 5 --set evaluate.moments=oracle"
        in html
    )


def test_what_people_typed_can_not_break_the_page() -> None:
    table = Table("<b>", ["a"], [[Cell("<script>alert(1)</script>", "& more", "agrees")]])
    html = page_html(Page("x", "y", [table]))
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert 'class="agrees"' in html and '<span class="verdict">agrees</span>' in html, "told in words too"


def test_other_formats_hold_the_same_scores(records: list[Record]) -> None:
    assert "| permuted-mnist | single | bn | running | 5 | 72.79 +- 2.93 |" in report(records, "md")
    assert r"66.45 $\pm$ 1.19" in report(records, "latex") and report(records, "latex").count(r"\\") == 11
    rows = list(csv.DictReader(report(records, "csv").splitlines()))
    assert len(rows) == 30
    one = next(r for r in rows if r["run"] == "85d5f7c04f8c" and r["seed"] == "0")
    assert float(one["acc"]) == next(r for r in STORE.find("85d5f7c04f8c") if r.seed == 0).score("acc")
    with pytest.raises(UserError, match=r"unknown format 'pdf'\. There are: html, md, latex, csv"):
        report(records, "pdf")
    assert set(FORMATS) == {"html", "md", "latex", "csv"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_in_a_browser_nothing_is_wrong_or_cut(html: str, tmp_path: Path, width: int, scheme: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no chromium here: apt-get install -y chromium")
    path = tmp_path / "report.html"
    path.write_text(html)
    said: list[str] = []
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        flat = page.evaluate(
            "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height < 50).length"
        )
        ground, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        browser.close()
    assert not said and overflow <= 0 and flat == 0
    assert (_brightness(ground) > _brightness(ink)) == (scheme == "light")


def _brightness(colour: str) -> int:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])
