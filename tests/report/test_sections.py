"""Results for the paper's tables: which records a cell uses, variants of settings, and missing runs."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from contnorm.bench.config.defaults import complete
from contnorm.bench.records import Store
from contnorm.bench.stats import Interval, summarize_differences
from contnorm.errors import UserError
from contnorm.paper.cells import cells_of, source_of
from contnorm.paper.claims import ClaimCase, ClaimResult
from contnorm.paper.format import spread
from contnorm.paper.published import find
from contnorm.paper.recipe import Claim, find_recipe, parse_recipe, recipe_names
from contnorm.paper.selection import RateResult, SelectedRate, Selection, covers, selection_text, with_selection
from contnorm.report.page_views import section_view
from contnorm.report.paper_tables import claims_csv, claims_sheet, section_sheet, tables_csv
from contnorm.report.recipe_records import RecordFolders, cells_with_records
from contnorm.report.sections import Section, least_favourable, sections_of
from contnorm.report.text_tables import TextDocument, TextTable, latex, markdown
from tests.report.record_samples import make_records, six_settings

CHOSEN = """
title = "a rate for each norm"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["er"]
norms = ["bn", { name = "cn", groups = 4 }]
[[selected]]
where = { norm = "cn" }
settings = { train = { lr = 0.1 } }
[[published]]
dataset = "split-mnist"
strategy = "er"
norm = "cn"
values = { acc = [75.0, 1.0, "smudged"] }
[[claims]]
says = "CN is over BN in ACC"
kind = "above"
score = "acc"
cells = { norm = "cn" }
than = { norm = "bn" }
"""


def only_section(name: str, root: Path) -> Section:
    (section,) = sections_of([name], RecordFolders([root]))[0]
    return section


def test_records_of_any_precision_are_used(tmp_path: Path) -> None:
    section = only_section("table2", six_settings(tmp_path))
    found = {
        (one.cell.place["stream"], one.cell.norm): len(one.records)
        for p in section.variants[0].parts
        for one in p.measured
        if one.records
    }
    assert found == {("split-cifar100", "bn"): 5, ("split-cifar100", "cn32"): 5}
    assert {record.config.train.precision for record in section.records} == {"tf32"}
    assert section.command == "contnorm paper table2 --device cuda --precision tf32"


def test_recipe_uses_the_precision_of_most_records(tmp_path: Path) -> None:
    recipe = find_recipe("table10")
    make_records(recipe, tmp_path, only=lambda cell: cell.place["stream"] == "split-cifar100", precision="tf32")
    make_records(recipe, tmp_path, seeds=4, only=lambda cell: cell.norm == "bn", precision="fp32")
    found = cells_with_records(recipe, RecordFolders([tmp_path]).of(recipe))
    kept = {
        (one.cell.place["stream"], one.cell.norm): {r.config.train.precision for r in one.records.values()}
        for one in found
    }
    assert kept["split-cifar100", "bn"] == {"tf32"} and kept["split-mini-imagenet", "bn"] == set()
    assert {str(numerics) for one in found for numerics in one.left_out} == {"fp32"}
    assert kept["split-mini-imagenet", "cn32"] == set()


def test_run_without_tasks_ahead_fills_a_cell_that_measures_them(tmp_path: Path) -> None:
    recipe = find_recipe("table4")
    cell = next(cell for cell in cells_of(recipe) if cell.place["norm"] == "bn")
    ahead = complete(cell.values, source_of(cell))
    assert ahead.evaluate.ahead
    short = replace(ahead, evaluate=replace(ahead.evaluate, ahead=False))
    counts = {"correct": [[8, None], [6, 9]], "total": [10, 10]}
    Store(tmp_path).save(short, 0, {"matrix": counts, "matrix_task": counts})
    section = only_section("table4", tmp_path)
    part = section.variants[0].parts[0]
    acc, fm = (line for line in part.lines if line.measured.cell.norm == "bn")
    assert [*acc.values, *fm.values] == [75.0, 20.0]
    (remark,) = [note for note in section.variants[0].remarks if "lower bound" in note]
    assert cell.label in remark and "cn" not in remark
    full = {"correct": [[8, 3], [6, 9]], "total": [10, 10]}
    Store(tmp_path).save(ahead, 0, {"matrix": full, "matrix_task": full})
    notes = only_section("table4", tmp_path).variants[0].remarks
    assert not any("lower bound" in note for note in notes), "the run that measured them is preferred"


def test_first_folder_wins_for_the_same_run(tmp_path: Path) -> None:
    recipe = find_recipe("figure3")
    make_records(recipe, tmp_path / "a", seeds=1)
    make_records(recipe, tmp_path / "b", seeds=2)
    path = next((tmp_path / "a").rglob("0.json"))
    record = Store(tmp_path / "a").load(path)
    found = {key: value for key, value in record.raw.items() if key not in ("schema", "config", "hash", "seed", "seal")}
    Store(tmp_path / "a").save(record.config, 0, {**found, "commit": "other"})
    (one,) = cells_with_records(recipe, RecordFolders([tmp_path / "a", tmp_path / "b"]).of(recipe))
    assert [record.raw["commit"] for record in one.records.values()] == ["other", "c0ffee"]


def test_timed_runs_are_read_from_the_folder_of_their_recipe(tmp_path: Path) -> None:
    make_records(find_recipe("table3"), tmp_path)
    folders = RecordFolders([tmp_path])
    (section,), _ = sections_of(["table3"], folders)
    assert not folders.records and len(folders.timed["table3"]) == 3 * 8, "stock layers and ours"
    lines = {line.measured.cell.norm: line for line in section.variants[0].parts[0].lines}
    bn, cn = (
        Store(tmp_path / "table3").find(f"{r.config.hash}")
        for r in (lines[n].measured.records[0] for n in ("bn", "cn32"))
    )
    times = [[record.raw["seconds"]["train"] for record in some] for some in (bn, cn)]
    assert lines["cn32"].values == pytest.approx([100 * (c / b - 1) for b, c in zip(*times, strict=True)])
    assert lines["cn32"].comparison is not None and lines["cn32"].comparison.how == "ours"
    assert set(lines["bn"].values) == {0.0} and lines["bn"].comparison is None, "no verdict on what can be no other"


def test_broken_record_is_reported_and_the_rest_is_used(tmp_path: Path) -> None:
    make_records(find_recipe("figure3"), tmp_path)
    path = sorted(tmp_path.rglob("*.json"))[0]
    path.write_text("{")
    folders = RecordFolders([tmp_path])
    assert len(folders.records) == 2 and str(path) in folders.problems[0]


@pytest.fixture
def chosen(tmp_path: Path) -> Section:
    (tmp_path / "mine.toml").write_text(CHOSEN)
    recipe = parse_recipe("mine", CHOSEN, "mine.toml")
    make_records(replace(recipe, selected=()), tmp_path / "runs")
    make_records(recipe, tmp_path / "runs", seeds=5, only=lambda cell: cell.norm == "cn4")
    return only_section(str(tmp_path / "mine.toml"), tmp_path / "runs")


def test_chosen_settings_are_a_second_variant(chosen: Section) -> None:
    same, best = chosen.variants
    rates = [
        [{r.config.train.lr for r in one.records.values()} for one in variant.parts[0].measured]
        for variant in (same, best)
    ]
    assert rates == [[{0.03}, {0.03}], [{0.03}, {0.1}]]
    assert (same.title, best.title) == (
        "The same settings for all norms",
        "Each norm with the settings the recipe has for it",
    ), "a recipe's own [[selected]] was written by hand, not chosen on validation tasks"
    assert [variant.decided[0].cases[0].seeds for variant in (same, best)] == [3, 3], "pairs are the seeds both have"
    assert len(best.parts[0].lines[1].values) == 5


def test_tuned_settings_are_a_second_variant(tmp_path: Path) -> None:
    """Cells that nothing was chosen for are in the first table alone; the whole grid is told."""
    recipe = find_recipe("table10")
    where = {"stream": "split-cifar100", "strategy": "single", "norm": "cn", "groups": 32}
    grid = (
        RateResult(0.03, 60.0, 1.0, 3),
        RateResult(0.1, 62.0, 1.0, 3),
        RateResult(0.3, math.nan, math.nan, 0, diverged=3),
    )
    selection = Selection("table10", (SelectedRate(where, 0.1, "fp32", grid),))
    (tmp_path / "selected").mkdir()
    (tmp_path / "selected" / "table10.toml").write_text(selection_text(selection))
    make_records(recipe, tmp_path, only=lambda cell: "cifar" in cell.place["stream"])
    make_records(with_selection(recipe, selection), tmp_path, seeds=2, only=lambda cell: covers(selection, cell))
    section = only_section("table10", tmp_path)
    same, best = section.variants
    assert len(same.parts) == 2
    assert [(part.title, len(part.measured)) for part in best.parts] == [("split-cifar100, single", 1)]
    text = markdown(section_sheet(section))
    assert "| cn32, lr 0.03 | ACC | 3 |" in text and "| cn32, lr 0.1 | ACC | 2 |" in text
    assert "| split-cifar100 single cn 32 | fp32 | 60.00 +- 1.00 | [62.00 +- 1.00] | 3 lost |" in text
    assert best.title == "Each norm with the settings chosen on the validation tasks"
    assert "lost a seed, because its loss was no longer finite, does not count" in text
    assert best.remarks[-1] == "Left out: the 7 cells for which no learning rate was chosen."
    assert not any("Left out" in text for text in same.remarks)


def test_diverged_cell_is_not_shown_as_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CHOSEN)
    recipe = parse_recipe("mine", CHOSEN, "mine.toml")
    make_records(recipe, tmp_path / "runs", only=lambda cell: cell.norm == "bn")
    (lost,) = [complete(cell.values, source_of(cell)) for cell in cells_of(recipe) if cell.norm == "cn4"]
    Store(tmp_path / "runs").save_diverged(lost, 0, "seed 0: the loss is nan.")
    section = only_section(str(tmp_path / "mine.toml"), tmp_path / "runs")
    text = markdown(section_sheet(section))
    assert "| cn4, lr 0.1 | ACC | 0 | diverged | 75.00 +- 1.00 ? |" in text
    assert "- split-mnist er cn4: its only seed diverged. seed 0: the loss is nan." in text.splitlines()
    assert "not run" not in text.lower(), "one cell has records, the other was lost"
    rows = section_view(section).tables[0].groups[0].rows
    assert [(row[2].text, row[2].kind) for row in rows][1] == ("diverged", "not")


def test_table_with_only_diverged_cells_is_shown(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CHOSEN)
    for cell in cells_of(parse_recipe("mine", CHOSEN, "mine.toml")):
        Store(tmp_path / "runs").save_diverged(complete(cell.values, source_of(cell)), 1, "seed 1: the loss is nan.")
    section = only_section(str(tmp_path / "mine.toml"), tmp_path / "runs")
    text = markdown(section_sheet(section))
    assert text.count("| diverged |") == 2 and text.count("its only seed diverged") == 2
    assert section_view(section).tables[0].groups[0].rows[0][2].text == "diverged"


@pytest.mark.parametrize(
    ("was_run", "left"), [("same", "same settings for all"), ("chosen", "the settings the recipe has")]
)
def test_variant_without_runs_is_left_out(was_run: str, left: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CHOSEN)
    recipe = parse_recipe("mine", CHOSEN, "mine.toml")
    make_records(recipe if was_run == "chosen" else replace(recipe, selected=()), tmp_path / "runs")
    (variant,) = only_section(str(tmp_path / "mine.toml"), tmp_path / "runs").variants
    assert left in variant.title and all(one.records for part in variant.parts for one in part.measured)


def test_text_table_has_our_score_the_papers_and_the_verdict(chosen: Section) -> None:
    text = markdown(section_sheet(chosen))
    line = chosen.variants[1].parts[0].lines[1]
    assert line.comparison is not None and line.comparison.interval is not None
    ours = spread([record.score("acc") for record in line.measured.records.values()])
    verdict = f"{line.comparison.difference:+.2f} | {line.comparison.interval} | {line.comparison.verdict}"
    row = f"| cn4, lr 0.1 | ACC | 5 | {ours} | 75.00 +- 1.00 ? | {verdict} |"
    assert row in text.splitlines()
    assert "split-mnist er cn4 ACC: smudged" in text
    assert "each norm with the settings the recipe has for it" in text
    assert row.replace("+-", r"$\pm$").replace(" | ", " & ").strip("| ") + r" \\" in latex(section_sheet(chosen))


def test_csv_rows_are_not_rounded(chosen: Section) -> None:
    rows = list(csv.DictReader(io.StringIO(tables_csv([chosen]))))
    assert len(rows) == 4
    line, last = chosen.variants[1].parts[0].lines[1], rows[-1]
    assert (
        line.comparison is not None
        and float(last["mean"]) == line.comparison.mean
        and float(last["difference"]) == line.comparison.difference
    )
    assert (last["norm"], last["groups"], last["doubt"], last["verdict"]) == (
        "cn",
        "4",
        "smudged",
        line.comparison.verdict,
    )
    cases = list(csv.DictReader(io.StringIO(claims_csv([chosen]))))
    pair = chosen.variants[0].decided[0].cases[0].paired
    assert pair is not None and float(cases[0]["difference"]) == pair.mean and cases[0]["pairs"] == "3"


def test_missing_runs_are_listed(tmp_path: Path) -> None:
    make_records(
        find_recipe("table10"),
        tmp_path,
        only=lambda cell: cell.norm in ("bn", "cn32") and "cifar" in cell.place["stream"],
    )
    sections, unrun = sections_of(recipe_names(), RecordFolders([tmp_path]))
    assert [section.recipe.name for section in sections] == ["table10"]
    ours = {"panel", "panel-batch", "panel-cifar10", "panel-forward"}
    tables = {f"table{i}" for i in (1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 13, 14)}
    assert {one.name for one in unrun} == tables | {"figure2", "figure3"} | ours
    text = markdown(section_sheet(sections[0]))
    (number,) = find(table="10", dataset="split-cifar100", norm="gn", metric="fm")
    assert f"| gn32 | FM | 0 | not run | {number.mean:.2f} +- {number.std:.2f} | - | - | - |" in text
    assert "- split-mini-imagenet, single: bn, brn, gn32, cn32" in text
    assert "UNDECIDED, of what is run (exploratory: 0 seeds): without replay GN forgets less than BN (FM)" in text
    claims = markdown(claims_sheet(sections, unrun, linked=True))
    assert "[Table 10](table10.md)" in claims and "- Table 5: Long-tailed" in claims and "multi-label streams" in claims


@pytest.mark.parametrize(
    ("kind", "means", "worst"),
    [("above", [2.0, 1.0, 3.0], 1), ("under", [-2.0, -1.0, -3.0], 1), ("near", [0.2, 0.1, -0.3], 2)],
)
def test_least_favourable_case_supports_its_claim_least(kind: str, means: list[float], worst: int) -> None:
    cases = []
    for mean in means:
        pair = summarize_differences([mean, mean + 0.01])
        cases.append(ClaimCase(str(mean), 2, "holds", pair, pair.t))
    none = ClaimCase("nothing", 0, "undecided", None, None)
    claim = Claim("x", kind, "acc")  # type: ignore[arg-type]
    assert least_favourable(ClaimResult(claim, "holds", tuple(cases))) is cases[worst]
    assert least_favourable(ClaimResult(claim, "undecided", (*cases, none))) is none
    refuted = ClaimCase("refuted", 2, "does not hold", None, Interval(1.1, 2.0))
    assert least_favourable(ClaimResult(claim, "does not hold", (*cases, none, refuted))) is refuted


def test_special_characters_do_not_break_text_tables() -> None:
    sheet = TextDocument("x", "A_b", [TextTable("part", ["a|b"], [["bn* | 5 % & {x}"]])])
    assert r"| bn\* \| 5 % & {x} |" in markdown(sheet)
    assert r"bn* | 5 \% \& \{x\} \\" in latex(sheet)


def test_unknown_recipe_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown recipe 'tabel2'"):
        sections_of(["tabel2"], RecordFolders([tmp_path]))
