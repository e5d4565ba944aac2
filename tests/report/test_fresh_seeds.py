"""Fresh seeds in the report: a table of their own, staged claims in place of exploratory ones, and their number."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import merge_settings
from contnorm.bench.records import Store
from contnorm.paper.cells import RecipeCell, cells_of, source_of
from contnorm.paper.recipe import find_recipe
from contnorm.paper.selection import find_selection, with_selection
from contnorm.report.page_views import claim_rows, section_view
from contnorm.report.paper_tables import claims_csv, claims_sheet, section_sheet, undecided_text
from contnorm.report.recipe_records import RecordFolders
from contnorm.report.report import collect_report, report_text
from contnorm.report.sections import CHOSEN, FRESH, ONE_FOR_ALL, Section, sections_of
from contnorm.report.text_tables import latex, markdown

pytest.importorskip("jinja2", reason="jinja2 is not installed")

ACC = {"bn": 60.0, "cn": 66.0, "gn": 50.0}


def save(root: Path, cell: RecipeCell, seeds: range, shift: float = 0.0) -> None:
    """Records of a cell: its norm's ACC and a little more with each seed; all else is equal."""
    store = Store(root)
    config = complete(merge_settings(cell.values, {"train": {"precision": "tf32"}}), source_of(cell))
    for seed in seeds:
        correct = round(1000 * (ACC[cell.place["norm"]] + shift + 0.02 * (seed * seed % 7)))
        matrix = {"correct": [[correct, None], [correct - 1000, correct]], "total": [100_000] * 2, "before": None}
        content: dict[str, Any] = {"matrix": matrix, "parameters": 10, "drift": {"by_task": []}}
        store.save(config, seed, {**content, "source": {"name": "cifar100", "fingerprint": "f00d"}})


def cells(recipe: Any, *norms: str) -> list[RecipeCell]:
    of = {"stream": "split-cifar100", "strategy": "er"}
    found = [cell for cell in cells_of(recipe) if all(cell.place[key] == value for key, value in of.items())]
    return [cell for cell in found if cell.place["norm"] in norms]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Table 2: BN and CN with five seeds at the recipe's rate; BN, CN and GN with fresh ones at the selected rates."""
    root = tmp_path_factory.mktemp("runs")
    recipe = find_recipe("table2")
    refined = find_selection("table2", refined=True)
    assert refined is not None
    for cell in cells(recipe, "bn", "cn"):
        save(root, cell, range(5))
    for cell in cells(with_selection(recipe, refined), "bn", "cn", "gn"):
        save(root, cell, range(100, 108), shift=1.0)
    return root


@pytest.fixture(scope="module")
def section(runs: Path) -> Section:
    (found,) = sections_of(["table2"], RecordFolders([runs]))[0]
    return found


def test_fresh_seeds_do_not_change_the_table_of_the_others(section: Section) -> None:
    one, fresh = section.variants
    assert one.title == ONE_FOR_ALL and fresh.title == f"{FRESH}, {CHOSEN[0].lower()}{CHOSEN[1:]}"
    shown = {m.cell.norm: sorted(m.records) for part in one.parts for m in part.measured if m.records}
    assert shown == {"bn": [0, 1, 2, 3, 4], "cn32": [0, 1, 2, 3, 4]}
    shown = {m.cell.norm: sorted(m.records) for part in fresh.parts for m in part.measured if m.records}
    assert shown == {norm: list(range(100, 108)) for norm in ("bn", "gn32", "cn32")}


def test_claims_are_listed_once_for_each_choice_of_settings(section: Section) -> None:
    listed = [(result.claim.says, result.evidence) for _, result in section.claims if result.measured]
    over_bn = [evidence for says, evidence in listed if says == "CN is over BN in ACC"]
    assert over_bn == ["exploratory", "staged"], "at the recipe's rate, and at the selected rates"
    by_claim = {result.claim.says: result for _, result in section.claims if result.evidence == "staged"}
    result = by_claim["CN is over BN in ACC"]
    assert result.outcome == "holds" and result.evidence_text == "staged: 8 seeds"
    assert len(result.not_run) == 3, "DER++, and both strategies on mini-ImageNet"


def test_exploratory_claims_stay_below_the_first_stage(tmp_path: Path) -> None:
    """With seven fresh seeds no stage is reached: the claims are those of the exploratory seeds."""
    recipe = find_recipe("table10")
    bn_cn = [c for c in cells_of(recipe) if c.place["stream"] == "split-cifar100" and c.place["norm"] in ("bn", "cn")]
    for cell in bn_cn:
        save(tmp_path, cell, range(5))
        save(tmp_path, cell, range(100, 107))
    (section,) = sections_of(["table10"], RecordFolders([tmp_path]))[0]
    measured = [result for _, result in section.claims if result.measured]
    assert [result.evidence for result in measured] == ["exploratory"] and measured[0].outcome == "holds"
    for cell in bn_cn:
        save(tmp_path, cell, range(107, 108))
    (section,) = sections_of(["table10"], RecordFolders([tmp_path]))[0]
    assert [result.evidence for _, result in section.claims if result.measured] == ["staged"]
    assert section.command.splitlines() == [
        "contnorm paper table10 --precision tf32",
        "contnorm paper table10 --precision tf32 --until-decided",
    ]


def test_undecided_claims_are_counted_at_the_top(section: Section) -> None:
    text = markdown(claims_sheet([section], []))
    results = [result for _, result in section.claims if result.measured]
    undecided = sum(result.outcome == "undecided" for result in results)
    staged = [result for result in results if result.evidence == "staged"]
    assert undecided and staged and f"\n{undecided} of {len(results)} claims are undecided: " in text
    assert undecided_text([section], ours=True).startswith("0 of 0 questions")
    assert re.search(r"\| holds, of what is run \| CN is over BN in ACC \|.*\| staged: 8 seeds \| 1 of 1 \|", text)


@pytest.mark.slow
def test_section_has_staged_cases_and_both_grids(section: Section) -> None:
    sheet = section_sheet(section)
    text = markdown(sheet)
    assert "## HOLDS, of what is run (staged: 8 seeds): CN is over BN in ACC (acc) (fresh seeds, from 100 on" in text
    assert "| case | difference | staged interval | effect | seeds | outcome |" in text
    assert re.search(r"\| split-cifar100 er cn32 against bn \| \+6\.00 \| .* \| 8 \| holds \(higher\) \|", text)
    assert "## Learning rates tried on the validation tasks, in a refined grid, for the fresh seeds" in text
    assert text.count("```bash") == 2 and "--until-decided" in latex(sheet)
    titles = [table.title for table in section_view(section).tables]
    assert sum(title.startswith("Learning rates tried") for title in titles) == 2


def test_csv_of_claims_has_evidence_and_notes(section: Section) -> None:
    rows = list(csv.DictReader(io.StringIO(claims_csv([section]))))
    staged = [row for row in rows if row["evidence"] == "staged" and row["claim"] == "CN is over BN in ACC"]
    assert [(row["verdict"], row["pairs"], row["case_outcome"]) for row in staged] == [("higher", "8", "holds")]


@pytest.mark.slow
def test_page_has_claims_with_evidence(runs: Path, section: Section) -> None:
    html = report_text(collect_report(runs, ["table2"]), "html")
    assert undecided_text([section]) in html and "staged: 8 seeds" in html and "exploratory: 5 seeds" in html
    assert "<pre>contnorm paper table2 --precision tf32 --until-decided</pre>" in html
    assert {row.evidence for row in claim_rows(section) if row.measured} >= {"staged: 8 seeds", "exploratory: 5 seeds"}


def test_table_of_our_own_has_questions_and_selected_rates_only(runs: Path) -> None:
    report = collect_report(runs, ["panel"])
    (section,) = report.sections
    assert section.title.startswith("Panel: ") and section.recipe.ours
    assert [variant.title for variant in section.variants if variant.run] == [
        f"{FRESH}, {CHOSEN[0].lower()}{CHOSEN[1:]}"
    ]
    text = markdown(claims_sheet(report.sections, []))
    assert "No run belongs to a claim of the paper." in text and "## Questions of our own" in text
    assert re.search(r"\| holds, of what is run \| Is CN over BN in ACC\? \|", text)
    html = report_text(report, "html")
    assert 'id="questions"' in html and 'id="claims"' not in html and "not in the paper" not in html
