"""The report: one self-contained HTML file with correct numbers that fits any browser, and other formats."""

from __future__ import annotations

import csv
import io
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from contnorm.bench.config.schema import from_dict
from contnorm.bench.records import Store
from contnorm.errors import UserError
from contnorm.paper.recipe import find_recipe
from contnorm.report import page_views
from contnorm.report import report as report_module
from contnorm.report.page import Page, RowGroup, SectionView, Table, TableCell, page_html
from contnorm.report.recipe_records import RecordFolders
from contnorm.report.report import FORMATS, PARTS, Report, collect_report, report_files, report_text, write_report
from tests.committed_records import RUNS, copy_run
from tests.report.record_samples import make_records, six_settings

pytestmark = pytest.mark.slow  # it opens pages in a browser


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return six_settings(tmp_path_factory.mktemp("six"))


@pytest.fixture(scope="module")
def report(runs: Path) -> Report:
    return collect_report(RecordFolders([runs]))


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return report_text(report, "html")


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of every kind: by time, class-incremental, with exact moments, of a deep network, and of curves."""
    root = tmp_path_factory.mktemp("runs")
    some = {
        "table3": lambda cell: True,
        "table9": lambda cell: cell.place["norm"] == "bn" and cell.place["tasks"] == 4,
        "table12": lambda cell: cell.norm == "bn cumulative",
        "figure2": lambda cell: "cifar" in cell.place["stream"],
        "figure3": lambda cell: True,
    }
    for name, only in some.items():
        make_records(find_recipe(name), root, only=only, layers=20 if name == "table12" else 2)
    return report_text(collect_report(RecordFolders([root])), "html")


def text_of(html: str) -> str:
    """What is read, on one line."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def section(html: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">.*?</section>', html, re.DOTALL)
    assert found, f"no section {name}"
    return found[0]


def test_page_has_no_external_resources(html: str, all_kinds: str) -> None:
    for page in (html, all_kinds):
        assert not re.findall(r"<script|<link|<img|<image|@import|url\((?!#)", page)
        assert not re.findall(r"""(?:src|href)=["'][^"'#]""", page)


def test_runs_in_no_table_are_counted_with_the_reason(tmp_path: Path) -> None:
    make_records(find_recipe("figure3"), tmp_path, seeds=2)
    assert "Not counted" not in report_text(collect_report(RecordFolders([tmp_path])), "md", "runs")
    others = ({"train": {"max_steps": 3}}, {"stream": {"part": "validate"}}, {"train": {"lr": 0.5}})
    for seed, more in enumerate((*others, others[0])):
        values = {"stream": {"name": "split-cifar100"}} | more
        Store(tmp_path).save(from_dict(values), seed, {"matrix": {"correct": [[5]], "total": [10]}})
    said = (
        "Not counted in any table: 4 of the 6 runs (2 stopped early, by --max-steps; 1 on validation tasks, by which "
        "settings are chosen; 1 with settings or in a precision that no table counts)."
    )
    report = collect_report(RecordFolders([tmp_path]))
    assert said in report_text(report, "md", "runs") and said in text_of(report_text(report, "html"))


def test_page_links_have_targets(all_kinds: str) -> None:
    targets = set(re.findall(r'<a href="#([^"]*)"', all_kinds))
    assert {"claims", "table3", "table4", "figure2", "not-run", "runs"} <= targets
    assert targets <= set(re.findall(r'<section id="([^"]*)"', all_kinds))


def test_page_scores_are_those_of_the_records(html: str) -> None:
    for text in ("72.79 ± 2.93", "78.59 ± 1.58", "65.97 ± 0.83"):
        assert text in html
    assert section(html, "runs").count("<details>") == 6


def test_table_has_our_score_the_papers_and_a_verdict(html: str) -> None:
    written = text_of(section(html, "table2"))
    assert "7.26 ± 1.03 paper 7.29 ± 1.59 -0.03 (-2.04 to +1.98) agrees" in written
    assert "71.94 ± 0.95 paper 74.27 ± 0.36 -2.33 (-3.49 to -1.18) below" in written
    assert "not run paper 63.42 ± 0.92" in written, "a cell that was not run still shows the paper's"
    assert "forgetting (fm)" in written and "Forgetting is fm. The paper's FM" in written
    assert "contnorm paper table2 --device cuda --precision tf32" in written
    doubtful = text_of(section(html, "table1"))
    assert "paper 15.13 ?" in doubtful and "? permuted-mnist single bn* FM: with this row's ACC and LA" in doubtful


def test_claims_are_summarized_at_the_top(html: str, report: Report) -> None:
    written = text_of(section(html, "claims"))
    assert html.index('id="claims"') < html.index('id="table1"')
    claims = [decided for one in report.sections if not one.recipe.ours for _, decided in one.claims]
    outcomes = [one.outcome if any(case.seeds for case in one.cases) else "not run" for one in claims]
    counts = [outcomes.count(outcome) for outcome in ("holds", "does not hold", "undecided", "not run")]
    assert (
        "{} hold {} do not hold {} undecided {} not run".format(*counts) in written
        and counts[0] >= 4
        and counts[3] >= 5
    )
    undecided, measured = counts[2], len(outcomes) - counts[3]
    assert f"{undecided} of {measured} claims are undecided: 0 of 0 by fresh seeds in stages" in written
    assert (
        "holds 2 of 2 cases hold; exploratory: 5 seeds exact moments give ACC back to BN acc Table 1 "
        "permuted-mnist er bn* against bn +0.54 +0.03 to +1.05 +1.32 5" in written
    )
    assert "CN has the best ACC of all norms acc, the same settings for all norms, of what is run Table 2" in written


def test_page_has_every_kind_of_table_and_figure(all_kinds: str) -> None:
    assert "time over BN, %" in section(all_kinds, "table3") and "truncated, not rounded" in section(
        all_kinds, "table3"
    )
    four = text_of(section(all_kinds, "table4"))
    assert "split-cifar10, derpp, buffer 5120, class-incremental" in four and "forgetting (fm_mammoth)" in four
    assert "Not run: 30 rows" in four and "split-tiny-imagenet, derpp, buffer 5120, task-incremental" in four
    labels = re.findall(r'<svg[^>]*aria-label="([^"]*)"', all_kinds)
    for begin in (
        "Accuracy, mean over seeds. 3 tasks; ",
        "split-cifar10, derpp, buffer 5120, task-incremental. At the end: bn ",
        "permuted-mnist, single. At the end: bn, mean of layer 1 ",
        "Drift of running moments from exact ones. At the end: mean ",
        "Forgotten since each task was learned (fm_first). Of ",
        "split-cifar100, er, 4 tasks, bn: forgotten since each task was learned (fm_first). Of ",
        "CN takes at most 3.73 % longer than BN. Means: split-cifar100 er cn32 ",
    ):
        assert any(label.startswith(begin) for label in labels), begin


def test_run_details_have_settings_versions_and_device(all_kinds: str) -> None:
    written = text_of(section(all_kinds, "runs"))
    assert (
        "device a card (cuda, 1 threads)" in written
        and "contnorm 0.1.0, torch 2.11.0" in written
        and "c0ffee" in written
    )
    assert "split-cifar100 er sn, timed for table3" in written
    assert "contnorm run --stream split-cifar100 --strategy er --norm bn --seeds 3 --device cuda" in written


def test_diverged_seeds_are_listed_with_their_run(tmp_path: Path) -> None:
    """Below the scores and with the run; the command that makes it again asks for all seeds, and counts no gap."""
    name = "634f63758def"
    copy_run(name, tmp_path)
    assert (tmp_path / name / "3.lost.json").is_file()
    report = collect_report(RecordFolders([tmp_path]), ["table2"])
    said = "1 of 5 seeds diverged and is not counted. seed 3: the loss is nan at step 1140"
    page = unescape(report_text(report, "html"))
    assert f"{name}: {said}" in page and f"<dt>diverged</dt><dd>{said}" in page
    assert "--norm brn --seeds 5 --device cuda" in page and "<dd>0, 1, 2, 4</dd>" in page
    assert f"{name}: {said}" in report_text(report, "md", "runs")


def test_folded_runs_show_what_distinguishes_them(html: str, tmp_path: Path) -> None:
    """By their settings, which titles do not show, and the moments they were evaluated with."""
    summaries = re.findall(r"<summary>(.*?)</summary>", html)
    assert any("single bn " in one and "evaluate.moments=oracle" in one for one in summaries)
    assert any("split-cifar100 er cn32" in one and "train.precision=tf32" in one for one in summaries)


def test_notes_of_a_folded_table_are_folded() -> None:
    table = Table("RateResult", ["norm"], [RowGroup("", [[TableCell("bn")]])], ["of a few"], folded=True)
    section = SectionView("table2", "Table 2", [], [table], [], "contnorm paper table2")
    page = page_html(Page("t", "", [], [section], [], [], []))
    assert re.search(r"<details>\s*<summary>RateResult</summary>.*of a few.*</details>", page, re.DOTALL)


def test_command_names_a_source_that_is_not_the_default(tmp_path: Path) -> None:
    config = from_dict({"stream": {"name": "permuted-mnist", "source": "digits"}})
    Store(tmp_path).save(config, 0, {"matrix": {"correct": [[50]], "total": [100]}})
    written = text_of(report_text(collect_report(RecordFolders([tmp_path])), "html"))
    assert "--norm bn --seeds 1" in written and "--set stream.source=digits" in written


def test_csv_of_runs_has_both_evaluations_and_differing_settings(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(report_text(report, "csv"))))
    both = {row["moments"] for row in rows if row["run"] == "be94d42372be"}
    assert both == {"running", "oracle"}
    assert {row["settings"] for row in rows if row["run"] == "85d5f7c04f8c"} == {"train.precision=tf32"}


def test_command_repeats_the_run(html: str) -> None:
    start = "contnorm run --stream split-cifar100 --strategy er --norm cn --seeds 5 --device cuda"
    assert f"{start} --set train.precision=tf32" in html
    assert (
        "contnorm run --stream permuted-mnist --strategy single --norm bn --seeds 5 --set evaluate.moments=oracle"
        in html
    )


def test_page_escapes_html_in_cells() -> None:
    table = Table("<b>", ["a"], [RowGroup("", [[TableCell("<script>alert(1)</script>", "& more", "", "agrees")]])])
    html = page_html(Page("x", "y", scores=[table]))
    assert "<script>" not in html and "&lt;script&gt;" in html
    assert 'class="agrees"' in html and '<span class="verdict">agrees</span>' in html, "written in words too"


def test_other_formats_have_the_same_scores(report: Report, runs: Path) -> None:
    assert "| permuted-mnist | single | bn | running | 5 | 72.79 +- 2.93 |" in report_text(report, "md")
    assert r"65.97 $\pm$ 0.83" in report_text(report, "latex")
    assert report_text(report, "latex", "runs").count(r"\\") == 11
    rows = list(csv.DictReader(report_text(report, "csv").splitlines()))
    assert len(rows) == 6 * 5 + 4 * 5, "the four runs of Table 1 were evaluated twice"
    one = next(r for r in rows if r["run"] == "85d5f7c04f8c" and r["seed"] == "0")
    assert float(one["acc"]) == next(r for r in Store(runs).find("85d5f7c04f8c") if r.seed == 0).score("acc")


def test_part_is_contained_in_the_whole_report(report: Report) -> None:
    whole = report_text(report, "md")
    for part, begin in (("claims", "# What the paper claims"), ("tables", "# Table 1: "), ("runs", "# Runs")):
        text = report_text(report, "md", part)
        assert text.startswith(begin) and text in whole
    assert report_text(report, "csv", "tables").startswith("recipe,settings,stream,")
    assert report_text(report, "csv", "claims").startswith("recipe,settings,claim,")


def test_report_of_named_tables_has_only_these(runs: Path) -> None:
    written = report_text(collect_report(RecordFolders([runs]), ["table9"]), "md", "tables")
    assert written.startswith("# Table 9") and "Table 2" not in written


@pytest.mark.parametrize(
    ("form", "part", "said"),
    [
        ("pdf", "all", r"unknown format 'pdf'\. There are: html, md, latex, csv"),
        ("md", "claim", r"unknown part 'claim'\. Did you mean 'claims'"),
    ],
)
def test_unknown_format_or_part_is_rejected(report: Report, form: str, part: str, said: str) -> None:
    for made in (report_text, report_files):
        with pytest.raises(UserError, match=said):
            made(report, form, part)
    assert set(FORMATS) == {"html", "md", "latex", "csv"} and PARTS[0] == "all"


def test_folder_gets_one_file_per_table(report: Report, tmp_path: Path) -> None:
    written = write_report(report, tmp_path / "tables", form="md")
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {"comparison.md", "claims.md", "runs.md", *(f"{one.recipe.name}.md" for one in report.sections)}
    write_report(report, tmp_path / "tables", form="latex", part="tables")
    assert (tmp_path / "tables" / "table2.tex").is_file() and not (tmp_path / "tables" / "claims.tex").exists()
    write_report(report, tmp_path / "rows", form="csv")
    rows = {"comparison.csv", "tables.csv", "claims.csv", "runs.csv"}
    assert {path.name for path in (tmp_path / "rows").iterdir()} == rows
    write_report(report, tmp_path / "one.md", form="md", part="claims")
    assert (tmp_path / "one.md").read_text().startswith("# What the paper claims")
    assert sorted(written) == sorted(tmp_path / "tables" / name for name in names) and report.runs == 30


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_page_fits_the_browser(html: str, tmp_path: Path, width: int, scheme: str) -> None:
    seen = page_problems(html, tmp_path, width, scheme)
    assert not seen["messages"] and seen["overflow"] <= 0 and seen["flat"] == 0 and seen["broken"] == 0
    assert (_brightness(seen["ground"]) > _brightness(seen["ink"])) == (scheme == "light")
    assert seen["unseen"] == [], "every section is really there"


@pytest.mark.parametrize("width", [390, 1440])
def test_page_of_every_kind_of_table_fits_the_browser(all_kinds: str, tmp_path: Path, width: int) -> None:
    seen = page_problems(all_kinds, tmp_path, width, "light")
    assert not seen["messages"] and seen["overflow"] <= 0 and seen["flat"] == 0 and seen["unseen"] == []


@pytest.mark.parametrize("width", [390, 1440])
def test_page_of_committed_records_fits_the_browser(tmp_path: Path, width: int) -> None:
    seen = page_problems(report_text(collect_report(RecordFolders([RUNS])), "html"), tmp_path, width, "light")
    assert not seen["messages"] and seen["overflow"] <= 0 and seen["flat"] == 0 and seen["unseen"] == []


def test_narrow_page_shows_headings_with_values(html: str, tmp_path: Path) -> None:
    with opened(html, tmp_path, 390, "light") as page:
        beyond = page.evaluate(
            "[...document.querySelectorAll('td')].filter(c => c.getBoundingClientRect().right > 391).length"
        )
        heads = page.evaluate("getComputedStyle(document.querySelector('#table2 td'), '::before').content")
    assert beyond == 0 and "norm" in heads


def test_narrow_page_has_readable_figure_text(html: str, tmp_path: Path) -> None:
    """They are of 12 units of the drawing; drawn to the width of the screen they would be of 7 pixels."""
    scales = "[...document.querySelectorAll('.figures svg')].map(s => s.getScreenCTM().a)"
    with opened(html, tmp_path, 390, "light") as page:
        found = page.evaluate(scales)
    assert found and min(found) * 12 >= 10


def test_printed_page_is_unfolded_and_dark_on_white(html: str, tmp_path: Path) -> None:
    with opened(html, tmp_path, 800, "dark", unfold=False) as page:
        page.emulate_media(media="print", color_scheme="dark")
        hidden = page.evaluate(
            "[...document.querySelectorAll('#runs details pre')].filter(p => !p.checkVisibility()).length"
        )
        ground, ink = page.evaluate(GROUND_AND_INK)
        pages = page.pdf(format="A4").count(b"/Type /Page\n")
    assert hidden == 0 and _brightness(ground) > _brightness(ink) and pages > 3


GROUND_AND_INK = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
SEEN = """() => ({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  flat: [...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().height < 50).length,
  broken: [...document.querySelectorAll('img, image')].filter(i => i.naturalWidth === 0).length,
  unseen: [...document.querySelectorAll('section')].filter(s => s.getBoundingClientRect().height < 60).map(s => s.id),
})"""


def page_problems(html: str, folder: Path, width: int, scheme: str) -> dict[str, Any]:
    """What a reader would find wrong, with everything unfolded."""
    with opened(html, folder, width, scheme) as page:
        ground, ink = page.evaluate(GROUND_AND_INK)
        return {**page.evaluate(SEEN), "ground": ground, "ink": ink, "messages": page.messages}


@contextmanager
def opened(html: str, folder: Path, width: int, scheme: str, unfold: bool = True) -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no chromium here: apt-get install -y chromium")
    path = folder / "report.html"
    path.write_text(html)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.messages = []
        page.on("console", lambda message: page.messages.append(message.text))
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.goto(path.as_uri())
        if unfold:
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        yield page
        browser.close()


def _brightness(colour: str) -> int:
    return sum(int(part) for part in re.findall(r"\d+", colour)[:3])


def test_large_page_folds_settings_and_notes_omissions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit is said where it cuts something; each row that is left has its score."""
    store = Store(tmp_path)
    for number in range(12):
        config = from_dict({"stream": {"name": "split-mnist", "source": "mnist"}, "train": {"lr": 0.01 * (number + 1)}})
        store.save(config, 0, {"matrix": {"correct": [[50 + number, None], [40 + number] * 2], "total": [100] * 2}})
    whole = report_text(collect_report(RecordFolders([tmp_path]), ["figure3"]), "html")
    assert text_of(whole).count("Command that repeats this run:") == 12 and "left out" not in whole
    assert (
        "split-mnist, single: accuracy after each task, the 9 highest of 12 settings" in whole and "single bn" in whole
    )
    limits = {"MOST_OPEN": 5, "MOST_ROWS": 10, "MOST_VIEWS": 8, "FIGURE_BYTES": 5000}
    for name, value in limits.items():
        monkeypatch.setattr(page_views, name, value)
    monkeypatch.setattr(report_module, "MOST_OPEN", 5)
    small = report_text(collect_report(RecordFolders([tmp_path]), ["figure3"]), "html")
    written = text_of(small)
    assert len(small) < 0.7 * len(whole)
    assert "<summary>split-mnist: 10 rows</summary>" in small and "2 more rows are left out of this page" in written
    assert "split-mnist 12 51.00 single bn" in written, "the setting with the highest score"
    runs = section(small, "runs")
    assert "<summary>8 settings</summary>" in runs and runs.count("Command that repeats this run:") == 8
    assert "4 settings are left out here" in text_of(runs)
    drawn = runs.count("<svg")
    assert 0 < drawn < 8 and f"Figures are drawn of the first {drawn} of 12 settings" in text_of(runs)
    assert small.count("<details>") == small.count("</details>")
