"""The report: a self-contained HTML page that fits a phone and a screen, its figures, and Markdown files."""

import re
import shutil
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.figures import COLORS
from contnorm.bench.records import Store, load_runs
from contnorm.bench.text import spread
from contnorm.errors import UserError
from contnorm.paper.recipe import find_recipe
from contnorm.report import Report, collect_report, write_report
from contnorm.report import tables as figures
from contnorm.report.runs import run_details, score_tables
from contnorm.report.tables import MADE, Document, Table, html_page, markdown
from tests.committed_records import COCOSEQ
from tests.report.record_samples import make_records, six_settings

CURVES = {"bn": [[1.0, 2.5], [2.0, 3.0]], "cn": [[2.0, 3.0]]}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return six_settings(tmp_path_factory.mktemp("six"))


@pytest.fixture(scope="module")
def report(runs: Path) -> Report:
    return collect_report(runs, ["table1", "table2"])


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return report.html()


def test_page_has_no_external_resources_and_its_links_have_targets(html: str) -> None:
    assert not re.search(r"<(script|img|link|iframe)|@import|url\((?!#)", html)
    links, ids = re.findall(r'href="#([^"]+)"', html), re.findall(r'\bid="([^"]+)"', html)
    assert set(links) <= set(ids) and len(set(ids)) == len(ids)


def test_page_opens_with_the_headline_and_a_figure(html: str) -> None:
    main = html[html.index("<main>") :]
    assert main.index("Highest ACC") < main.index("<svg") < main.index("<table>")


def test_page_has_scores_claims_and_published_numbers(html: str, report: Report) -> None:
    text = " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())
    for group in report.runs.by_run().values():
        assert spread([record.score("acc") for record in group]).replace("+-", "±") in text
    assert "CN has the best ACC of all norms" in text and "67.48 ± 0.81" in text and "contnorm paper table2" in text


def test_details_repeat_the_run(report: Report) -> None:
    text = markdown(run_details(report.runs))
    (command,) = re.findall(r"Command: (contnorm run .*--norm bn.*--strategy er .*|.*er --norm bn.*)", text)[:1]
    assert "--stream" in command and "--seeds" in command and "Versions: contnorm" in text


def test_runs_are_sorted_and_diverged_ones_are_noted(tmp_path: Path) -> None:
    make_records(find_recipe("table10"), tmp_path, seeds=2, only=lambda cell: "cifar" in cell.place["stream"])
    config = load_runs(tmp_path).records[0].config
    Store(tmp_path).save_diverged(config, 9, "seed 9: the loss is nan.")
    (table,) = score_tables(load_runs(tmp_path))
    scores = [float(row[table.heads.index("ACC")].split()[0]) for row in table.rows]
    assert scores == sorted(scores, reverse=True) and {"lr", "mean over the stream"} <= set(table.heads)
    text = markdown(collect_report(tmp_path, ["table10"]).documents[-1])
    assert f"{config.hash}: 1 of 3 seeds diverged" in text


def test_multi_label_runs_have_a_table_by_group() -> None:
    (table,) = score_tables(load_runs(COCOSEQ))
    assert {row[table.heads.index("labels")] for row in table.rows} == {"overall", "majority", "moderate", "minority"}
    assert table.heads[-7:-1] == ["C-F1", "O-F1", "mAP", "FM C-F1", "FM O-F1", "FM mAP"] or "mAP" in table.heads


def test_markdown_has_one_file_per_table(report: Report, tmp_path: Path) -> None:
    files = write_report(report, tmp_path / "results")
    assert {file.name for file in files} == {"comparison.md", "claims.md", "tables.md"}
    assert all(file.read_text().startswith(MADE) for file in files)
    (alone,) = write_report(report, tmp_path / "report.md")
    texts = [file.read_text() for file in files]
    for document in report.documents:
        assert any(markdown(document) in text for text in texts) and markdown(document) in alone.read_text()
    with pytest.raises(UserError, match=r"use a name in \.html or \.md"):
        write_report(report, tmp_path / "report.pdf")


def test_report_of_other_runs_has_no_tables_of_the_paper(tmp_path: Path) -> None:
    make_records(find_recipe("figure3"), tmp_path / "all", seeds=1)
    record = load_runs(tmp_path / "all").records[0]
    matrix = {"correct": [[5]], "total": [10]}
    from_here = Store(tmp_path / "own")
    from_here.save(type(record.config)(), 0, {"matrix": matrix})
    assert collect_report(tmp_path / "own").sections == []
    with pytest.raises(UserError, match="no such file or folder"):
        collect_report(tmp_path / "other")


def test_hostile_text_is_escaped() -> None:
    hostile = "<script>alert(1)</script>\x1b[2J\u202e](http://x) `a` *b* $c$ a|b"
    document = Document("a", hostile, [Table(hostile, [hostile], [[hostile]], [hostile], lead=hostile)], [hostile])
    page = html_page(hostile, [hostile], [document], [(hostile, hostile)] * 2)
    assert "<script" not in page and "\x1b" not in page and "\\x1b[2J\\u202e" in page
    text = markdown(document)
    assert (
        "<script" not in text and "](http" not in text and "\x1b" not in text and "`a`" not in text.replace("\\`", "")
    )
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}) == 1


# --- Figures ---------------------------------------------------------------------------------------------------------


def test_figure_is_labelled_themed_and_deterministic() -> None:
    svg = figures.curves_over_tasks(CURVES, "Curves", "percent")
    root = ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    assert root.get("aria-label") == "Curves. At the end: bn 2.75, cn 3.00." and root.get("width") is None
    assert f"var(--series-2, {COLORS[1]})" in svg and "#000000" not in svg
    assert svg == figures.curves_over_tasks(CURVES, "Curves", "percent")
    assert {text.text for text in root.iter(f"{SVG}text")} >= {"Curves", "percent", "bn", "cn"}


@pytest.mark.parametrize("curve", [[50.0], [50.0, 50.0], [0.0, 0.0, 100.0]])
def test_any_curve_can_be_drawn(curve: list[float]) -> None:
    assert figures.curves_over_tasks({"a $name$ <b>": [curve]}, "T", "y").count("&lt;b&gt;") >= 1


def test_rates_and_differences_are_described() -> None:
    svg = figures.score_by_rate({"bn": [(0.01, 60.0, 1.0), (0.1, 64.0, 0.0)]}, "ACC", "percent")
    assert "Highest: bn 64.00 at 0.1." in svg and ">0.01</text>" in svg
    svg = figures.paired_differences({"cn minus bn": [1.0, 2.0], "one": [0.5]}, "Pairs", "points")
    assert "Means: cn minus bn +1.50; one +0.50." in svg


def test_page_defines_every_series_color() -> None:
    css = (Path(figures.__file__).parent / "templates" / "page.css").read_text()
    light, dark = (dict(re.findall(r"--series-(\d): (#\w{6});", part)) for part in css.split("@media")[:2])
    assert light == {str(number): color for number, color in enumerate(COLORS, 1)} and dark.keys() == light.keys()


# --- In a browser ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_page_fits_a_phone_a_screen_and_paper(html: str, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if (browser_path := shutil.which("chromium")) is None:
        pytest.skip("no chromium here: apt-get install -y chromium")
    (tmp_path / "page.html").write_text(html)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        messages: list[Any] = []
        page.on("console", lambda message: messages.append(message.text))
        page.goto((tmp_path / "page.html").as_uri())
        for width in (390, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            tops = page.evaluate("[...document.querySelectorAll('main svg')].map(s => s.getBoundingClientRect().top)")
            assert tops[0] < 900, "a figure is on the first screen"
            scales = page.evaluate("[...document.querySelectorAll('details[open] svg, h3 ~ .figures svg')]"
                                   ".filter(s => s.checkVisibility()).map(s => s.getScreenCTM().a)")  # fmt: skip
            assert scales and min(scales) * 12 >= 9.5, "text of figures is readable"
            lr = page.evaluate("[...document.querySelectorAll('main th')].find(h => h.textContent == 'lr')"
                               ".getBoundingClientRect().right")  # fmt: skip
            assert lr < width
        page.emulate_media(media="print", color_scheme="dark")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == "rgb(255, 255, 255)" and not messages
        browser.close()
