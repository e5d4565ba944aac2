"""Multi-label runs in the report: in tables, in the list of runs, and in every format."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from contnorm.bench.config.defaults import complete
from contnorm.bench.metrics.accuracy_matrix import score
from contnorm.paper.cells import cells_of, source_of
from contnorm.paper.published import find
from contnorm.paper.recipe import find_recipe
from contnorm.report.recipe_records import RecordFolders
from contnorm.report.report import Report, collect_report, report_text
from tests.report.record_samples import make_records, six_settings
from tests.report.test_page import page_problems, section, text_of

pytestmark = pytest.mark.slow  # its fixtures run and render

MINI = str(Path(__file__).resolve().parents[2] / "examples" / "cocoseq_mini.toml")
PART = {"images": 1520, "published_images": 41438}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """COCOseq of Tables 5, 6, 13 and 14, which share their runs, the half of Table 8, and a part; and of one label."""
    root = six_settings(tmp_path_factory.mktemp("runs"))
    for name in ("table5", "table8"):
        make_records(find_recipe(name), root, only=lambda cell: cell.place["stream"] == "cocoseq")
    make_records(find_recipe(MINI), root, source=PART, only=lambda cell: cell.place["norm"] in ("bn", "cn"))
    return collect_report(RecordFolders([root]), ["table5", "table6", "table8", "table13", "table14", MINI])


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return report_text(report, "html")


def test_memory_of_a_strategy_is_part_of_its_settings() -> None:
    kinds = {
        cell.place["strategy"]: complete(cell.values, source_of(cell)).memory.kind
        for cell in cells_of(find_recipe(MINI))
    }
    assert kinds == {"prs": "prs", "crs": "reservoir"}
    assert complete({"stream": {"name": "cocoseq"}, "strategy": {"name": "PRS"}}, "cocoseq").strategy.name == "prs"


def test_multilabel_tables_have_verdicts_by_group(html: str) -> None:
    shown_text = text_of(section(html, "table5"))
    for group in ("majority", "moderate", "minority", "all"):
        assert f"cocoseq, prs, buffer 2000, {group} classes" in shown_text
    [paper] = find(table="5", dataset="cocoseq", norm="bn", split="majority", metric="c_f1")
    ours, verdict = r"majority classes bn 3 [\d.]+ ± [\d.]+", r"\S+ \(.*?\) (?:agrees|above|below)"
    assert re.search(rf"{ours} paper {paper.mean:.2f} ± {paper.std:.2f} {verdict}", shown_text), (
        "found though the hash of the weights is filled in"
    )
    assert "FM is normalized" in section(html, "table6")


def test_table_of_deviations_has_no_figures(html: str) -> None:
    shown_text = section(html, "table13")
    assert re.search(r"paper ± \d", text_of(shown_text)) and "by group" not in shown_text
    assert "classes in the memory and in the stream" in section(html, "table5")
    assert "classes in the memory and in the stream" not in shown_text


def test_partial_stream_has_claims_and_no_verdict(html: str, report: Report) -> None:
    shown_text = text_of(section(html, "cocoseq_mini"))
    assert "Our runs used 1,520 of the 41,438 published images of cocoseq" in shown_text
    assert not re.search(r'class="(?:agrees|above|below)', section(html, "cocoseq_mini"))
    outcomes = [
        decided.outcome
        for one in report.sections
        if one.recipe.name == "cocoseq_mini"
        for way in one.variants
        for decided in way.decided
    ]
    assert len(outcomes) == 3 and "PRS is over a reservoir in mAP of minority classes" in shown_text


def test_partial_stream_is_not_compared_with_published_numbers(tmp_path: Path) -> None:
    make_records(find_recipe("table5"), tmp_path, source=PART, only=lambda cell: cell.place["stream"] == "cocoseq")
    shown_text = section(report_text(collect_report(RecordFolders([tmp_path]), ["table5"]), "html"), "table5")
    assert "so their numbers have no verdict" in shown_text and "paper 64.20" in text_of(shown_text)
    assert not re.search(r'class="(?:agrees|above|below)', shown_text)


def test_section_has_figures_of_groups_classes_and_memory(html: str) -> None:
    labels = re.findall(r'aria-label="([^"]*)"', section(html, "cocoseq_mini"))
    for strategy in ("prs", "crs"):
        where = f"cocoseq, {strategy}, buffer 100"
        for begin in (
            f"{where}, mAP. overall: bn ",
            f"{where}, FM C-F1. overall: bn ",
            f"{where}: average precision by class frequency. Mean of the classes, and their number: bn ",
            f"{where}: classes in the memory and in the stream. At the end: majority classes 33.3 percent",
        ):
            assert sum(label.startswith(begin) for label in labels) == 1, begin


def test_cells_without_runs_have_the_scores_of_their_stream(report: Report) -> None:
    [eight] = [one for one in report.sections if one.recipe.name == "table8"]
    scores = {
        (line.measured.cell.place["stream"], line.score) for part in eight.variants[0].parts for line in part.lines
    }
    assert ("cocoseq", "map") in scores and ("cocoseq", "acc") not in scores
    assert ("split-mini-imagenet", "acc") in scores and ("split-mini-imagenet", "map") not in scores


def test_multilabel_runs_have_a_separate_table(html: str, report: Report) -> None:
    shown_text = text_of(html)
    assert (
        "Scores of all runs: one label per image" in shown_text
        and "Scores of all runs: several labels per image" in shown_text
    )
    runs = section(html, "runs")
    assert "Scores by group of classes, at the end" in runs and "Average precision by class frequency" in runs
    assert "mAP on task" in runs and "accuracy on task" in runs
    written = report_text(report, "md", "runs")
    assert "| moments | seeds | labels | C-F1 | O-F1 | mAP | FM C-F1 | FM O-F1 | FM mAP | settings | run |" in written
    assert len(re.findall(r"\| minority \|", written)) == len(re.findall(r"\| overall \|", written)) == 9


def test_csv_rows_have_the_scores_of_the_records(report: Report) -> None:
    rows = list(csv.DictReader(report_text(report, "csv").splitlines()))
    groups = report.groups
    for row in rows:
        record = next(r for r in groups[row["run"]] if r.seed == int(row["seed"]))
        if record.multi_label:
            assert float(row["fm_map"]) == record.score("fm_map", row["labels"]) and row["acc"] == ""
        else:
            matrix = record.evaluated[row["moments"]]
            assert float(row["acc"]) == score(matrix, "acc") and row["map"] == row["labels"] == ""
    assert report_text(report, "latex").count("minority") > 10


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_multilabel_page_fits_the_browser(html: str, tmp_path: Path, width: int, scheme: str) -> None:
    seen = page_problems(html, tmp_path, width, scheme)
    assert not seen["messages"] and seen["overflow"] <= 0 and seen["flat"] == 0 and seen["unseen"] == []
