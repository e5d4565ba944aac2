"""The site in a real browser, opened from disk: navigation, search, notebooks, widths and console messages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test builds the site, or waits until it is built

PHONE, DESKTOP = 390, 1440
PATIENCE = 120_000  # milliseconds; on a busy machine a page takes long
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BROKEN_IMAGES = "[...document.images].filter(i => i.complete && i.naturalWidth === 0).map(i => i.src)"
SEARCH = "input[data-md-component=search-query]"
HIT = ".md-search-result__link"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here: apt-get install -y chromium")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def opened(browser: Any, path: Path, width: int, scheme: str = "light") -> Iterator[Any]:
    """Open a page; at the end, there must be no error of the console and no request to another host."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PATIENCE)
    messages: list[str] = []
    page.on("console", lambda message: message.type == "error" and messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("requestfailed", lambda request: "ABORTED" in request.failure or messages.append(request.url))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or messages.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert not messages


def search(page: Any, words: str) -> list[str]:
    """Type words into the search and return the addresses of the hits."""
    page.click(SEARCH)
    page.wait_for_selector(".md-search-result__meta:has-text('Type to start searching')")
    page.type(SEARCH, words)
    page.wait_for_selector(f"{HIT} mark", state="attached")
    return [link.get_attribute("href") for link in page.query_selector_all(HIT)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mini-ImageNet", "faq.html"),
        ("timm", "integrations/timm.html"),
        ("how to add a memory", "faq.html"),  # with a word of nearly every page
        ("how many seeds", "concepts/deciding.html"),
        ("FM mammoth", "glossary.html"),
    ],
)
def test_search_from_disk_finds(site: Path, browser: Any, words: str, expected: str) -> None:
    with opened(browser, site / "howto" / "sweeps.html", DESKTOP) as page:
        hits = search(page, words)
        assert any(f"/{expected}" in hit for hit in hits), hits[:10]
        page.click(f"{HIT}[href*='/{expected}']")
        page.wait_for_url(f"**/{expected}*")


def test_notebook_page_shows_code_output_and_figure(site: Path, browser: Any) -> None:
    figures = sorted((site / "tutorials").glob("*.png")) + sorted((site / "tutorials").glob("*.svg"))
    assert figures, "no tutorial has a figure"
    notebook = next(page for page in (site / "tutorials").glob("*.html") if figures[0].name in page.read_text())
    with opened(browser, notebook, DESKTOP) as page:
        assert page.query_selector(".highlight code .kn"), "highlighted code"
        assert page.query_selector(".output"), "printed output"
        image = page.query_selector(f"img[src='{figures[0].name}']")
        image.scroll_into_view_if_needed()
        page.wait_for_function("image => image.complete", arg=image)
        assert image.evaluate("image => image.naturalWidth") > 100 and image.get_attribute("alt")
        assert image.bounding_box()["width"] <= page.query_selector("article").bounding_box()["width"]
        assert page.query_selector("a[download][href$='.ipynb']")


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_no_page_is_wider_than_the_window(site: Path, browser: Any, width: int) -> None:
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    if width == DESKTOP:
        pages = [path for path in pages if path.parent != site / "project"][::4]
    problems = {}
    with opened(browser, pages[0], width) as page:
        for path in pages:
            page.goto(path.as_uri())
            overflow, broken = page.evaluate(OVERFLOW), page.evaluate(BROKEN_IMAGES)
            if overflow > 0 or broken:
                problems[str(path.relative_to(site))] = (overflow, broken)
    assert not problems


def test_wide_table_scrolls_inside_its_box(site: Path, browser: Any) -> None:
    with opened(browser, site / "reference" / "settings.html", PHONE) as page:
        box = page.wait_for_selector(".md-typeset__table")
        scroll = page.query_selector(".md-typeset__scrollwrap")
        inside = box.evaluate("table => table.getBoundingClientRect().width")
        assert inside > PHONE > scroll.bounding_box()["width"] - 1
        assert scroll.evaluate("e => { e.scrollLeft = 100; return e.scrollLeft }") > 0
