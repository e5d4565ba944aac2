"""Tables of the paper in the report: which records a cell uses, variants of settings, fresh seeds and claims."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.defaults import complete
from contnorm.bench.config.schema import merge_settings
from contnorm.bench.records import Store, load_runs
from contnorm.bench.text import spread
from contnorm.paper.cells import RecipeCell, cells_of
from contnorm.paper.recipe import find_published, find_recipe, parse_recipe
from contnorm.paper.selection import CHOSEN as CHOSEN_TITLE
from contnorm.paper.selection import (
    FRESH,
    ONE_FOR_ALL,
    RateResult,
    SelectedRate,
    Selection,
    find_selection,
    selection_text,
    with_selection,
)
from contnorm.paper.tables import compare_published, lines_of
from contnorm.report import collect_report
from contnorm.report.paper import Section, claims_document, section_document, sections_of, table_title
from contnorm.report.tables import markdown
from tests.report.record_samples import make_records, six_settings

ACC = {"bn": 60.0, "cn": 66.0, "gn": 50.0}

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
    (section,) = sections_of([name], load_runs(root), [root])
    return section


def text_of(section: Section) -> str:
    return markdown(section_document(section))


def test_records_of_any_precision_are_used(tmp_path: Path) -> None:
    section = only_section("table2", six_settings(tmp_path))
    (variant,) = section.variants
    found = {(one.cell.place["stream"], one.cell.norm): len(one.records) for one in variant.cells if one.records}
    assert found == {("split-cifar100", "bn"): 5, ("split-cifar100", "cn32"): 5}
    assert {record.config.train.precision for record in section.records} == {"tf32"}
    assert section.command == "contnorm paper table2 --device cuda --precision tf32"


def test_run_without_tasks_ahead_fills_a_cell_that_measures_them(tmp_path: Path) -> None:
    cell = next(cell for cell in cells_of(find_recipe("table4")) if cell.place["norm"] == "bn")
    ahead = complete(cell.values, cell.source)
    assert ahead.evaluate.ahead
    counts = {"correct": [[8, None], [6, 9]], "total": [10, 10]}
    short = replace(ahead, evaluate=replace(ahead.evaluate, ahead=False))
    Store(tmp_path).save(short, 0, {"matrix": counts, "matrix_task": counts})
    text = text_of(only_section("table4", tmp_path))
    assert "| bn | ACC | 1 | 75.00 |" in text and "| bn | fm_mammoth | 1 | 20.00 |" in text
    assert re.search(rf"lower bound: {cell.label}, [^,]* bn\.", text)


@pytest.fixture
def chosen(tmp_path: Path) -> Section:
    (tmp_path / "mine.toml").write_text(CHOSEN)
    recipe = parse_recipe("mine", CHOSEN, "mine.toml")
    make_records(replace(recipe, selected=()), tmp_path / "runs")
    make_records(recipe, tmp_path / "runs", seeds=5, only=lambda cell: cell.norm == "cn4")
    return only_section(str(tmp_path / "mine.toml"), tmp_path / "runs")


def test_chosen_settings_are_a_second_variant(chosen: Section) -> None:
    same, best = chosen.variants
    rates = [[{r.config.train.lr for r in one.records.values()} for one in v.cells] for v in (same, best)]
    assert rates == [[{0.03}, {0.03}], [{0.03}, {0.1}]]
    assert (same.title, best.title) == (
        "The same settings for all norms",
        "Each norm with the settings the recipe has for it",
    ), "a recipe's own [[selected]] was written by hand, not chosen on validation tasks"
    assert [variant.claims[0].cases[0].seeds for variant in (same, best)] == [3, 3], "pairs are the seeds both have"
    assert len(best.cells[1].records) == 5


def test_tuned_settings_are_a_second_variant(tmp_path: Path) -> None:
    """Cells that nothing was chosen for are in the first table alone; the whole grid is told."""
    recipe = find_recipe("table10")
    where = {"stream": "split-cifar100", "strategy": "single", "norm": "cn", "groups": 32}
    grid = (
        RateResult(0.03, 60.0, 1.0, 3),
        RateResult(0.1, 62.0, 1.0, 3),
        RateResult(0.3, math.nan, math.nan, 0, lost=3),
    )
    selection = Selection("table10", (SelectedRate(where, 0.1, "fp32", grid),))
    (tmp_path / "selected").mkdir()
    (tmp_path / "selected" / "table10.toml").write_text(selection_text(selection))
    make_records(recipe, tmp_path, only=lambda cell: "cifar" in cell.place["stream"])
    make_records(with_selection(recipe, selection), tmp_path, seeds=2, only=lambda cell: selection.covers(cell))
    section = only_section("table10", tmp_path)
    same, best = section.variants
    assert [(one.cell.place["stream"], one.cell.norm) for one in best.cells] == [("split-cifar100", "cn32")]
    assert same.unchosen == 0
    text = text_of(section)
    assert "| cn32, lr 0.03 | ACC | 3 |" in text and "| cn32, lr 0.1 | ACC | 2 |" in text
    assert "| split-cifar100 single cn 32 | fp32 | 60.00 +- 1.00 | [62.00 +- 1.00] | 3 lost |" in text
    assert best.title == "Each norm with the settings chosen on the validation tasks"
    assert "lost a seed, because its loss was no longer finite, does not count" in text
    assert text.count("Left out: the 7 cells for which no learning rate was chosen.") == 1


def test_diverged_cell_is_not_shown_as_not_run(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CHOSEN)
    recipe = parse_recipe("mine", CHOSEN, "mine.toml")
    make_records(recipe, tmp_path / "runs", only=lambda cell: cell.norm == "bn")
    (lost,) = [complete(cell.values, cell.source) for cell in cells_of(recipe) if cell.norm == "cn4"]
    Store(tmp_path / "runs").save_diverged(lost, 0, "seed 0: the loss is nan.")
    section = only_section(str(tmp_path / "mine.toml"), tmp_path / "runs")
    text = text_of(section)
    assert "| cn4, lr 0.1 | ACC | 0 | diverged | 75.00 +- 1.00 ? |" in text
    assert "- split-mnist er cn4: its only seed diverged. seed 0: the loss is nan." in text.splitlines()
    assert "not run" not in text.lower(), "one cell has records, the other was lost"


@pytest.mark.parametrize(
    ("was_run", "left"), [("same", "same settings for all"), ("chosen", "the settings the recipe has")]
)
def test_variant_without_runs_is_left_out(was_run: str, left: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CHOSEN)
    recipe = parse_recipe("mine", CHOSEN, "mine.toml")
    make_records(recipe if was_run == "chosen" else replace(recipe, selected=()), tmp_path / "runs")
    (variant,) = only_section(str(tmp_path / "mine.toml"), tmp_path / "runs").variants
    assert left in variant.title and all(one.records for one in variant.cells)


def test_text_table_has_our_score_the_papers_and_the_verdict(chosen: Section) -> None:
    text = text_of(chosen)
    scores = [record.score("acc") for record in chosen.variants[1].cells[1].records.values()]
    comparison = compare_published(scores, 75.0, 1.0)
    verdict = f"{comparison.difference:+.2f} | {comparison.interval} | {comparison.verdict}"
    row = f"| cn4, lr 0.1 | ACC | 5 | {spread(scores)} | 75.00 +- 1.00 ? | {verdict} |"
    assert row in text.splitlines()
    assert "split-mnist er cn4 ACC: smudged" in text
    assert "each norm with the settings the recipe has for it" in text


def test_missing_runs_are_listed(tmp_path: Path) -> None:
    make_records(
        find_recipe("table10"),
        tmp_path,
        only=lambda cell: cell.norm in ("bn", "cn32") and "cifar" in cell.place["stream"],
    )
    sections = sections_of((), load_runs(tmp_path))
    assert [section.recipe.name for section in sections] == ["table10"]
    text = text_of(sections[0])
    (number,) = find_published(table="10", dataset="split-cifar100", norm="gn", metric="fm")
    assert f"| gn32 | FM | 0 | not run | {number.mean:.2f} +- {number.std:.2f} | - | - | - |" in text
    assert "- split-mini-imagenet, single: bn, brn, gn32, cn32" in text
    assert "UNDECIDED, of what is run (exploratory: 0 seeds): without replay GN forgets less than BN (FM)" in text


def save(root: Path, cell: RecipeCell, seeds: range, shift: float = 0.0) -> None:
    """Records of a cell: its norm's ACC and a little more with each seed; all else is equal."""
    store = Store(root)
    config = complete(merge_settings(cell.values, {"train": {"precision": "tf32"}}), cell.source)
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
        save(root, cell, range(100, 116), shift=1.0)
    return root


@pytest.fixture(scope="module")
def section(runs: Path) -> Section:
    return only_section("table2", runs)


def test_fresh_seeds_do_not_change_the_table_of_the_others(section: Section) -> None:
    one, fresh = section.variants
    assert one.title == ONE_FOR_ALL and fresh.title == f"{FRESH}, {CHOSEN_TITLE[0].lower()}{CHOSEN_TITLE[1:]}"
    shown = {m.cell.norm: sorted(m.records) for m in one.cells if m.records}
    assert shown == {"bn": [0, 1, 2, 3, 4], "cn32": [0, 1, 2, 3, 4]}
    shown = {m.cell.norm: sorted(m.records) for m in fresh.cells if m.records}
    assert shown == {norm: list(range(100, 116)) for norm in ("bn", "gn32", "cn32")}


def test_claims_are_listed_once_for_each_choice_of_settings(section: Section) -> None:
    listed = [(result.claim.says, result.evidence) for _, result in section.claims if result.measured]
    evidence = [evidence for says, evidence in listed if says == "CN has the best ACC of all norms"]
    assert evidence == ["exploratory", "staged"], "at the recipe's rate, and at the selected rates"
    by_claim = {result.claim.says: result for _, result in section.claims if result.evidence == "staged"}
    result = by_claim["BN learns new tasks better than GN (LA)"]
    assert result.outcome == "holds" and result.evidence_text == "staged: 16 seeds"
    assert result.not_run


def test_exploratory_claims_stay_below_the_first_stage(tmp_path: Path) -> None:
    """With seven fresh seeds no stage is reached: the claims are those of the exploratory seeds."""
    recipe = find_recipe("table10")
    bn_cn = [c for c in cells_of(recipe) if c.place["stream"] == "split-cifar100" and c.place["norm"] in ("bn", "cn")]
    for cell in bn_cn:
        save(tmp_path, cell, range(5))
        save(tmp_path, cell, range(100, 115))
    section = only_section("table10", tmp_path)
    measured = [result for _, result in section.claims if result.measured]
    assert [result.evidence for result in measured] == ["exploratory"] and measured[0].outcome == "undecided"
    for cell in bn_cn:
        save(tmp_path, cell, range(115, 116))
    section = only_section("table10", tmp_path)
    assert [result.evidence for _, result in section.claims if result.measured] == ["staged"]
    assert section.command.splitlines() == [
        "contnorm paper table10 --precision tf32",
        "contnorm paper table10 --precision tf32 --until-decided",
    ]


def test_undecided_claims_are_counted_at_the_top(section: Section) -> None:
    text = markdown(claims_document([section]))
    results = [result for _, result in section.claims if result.measured]
    undecided = sum(result.outcome == "undecided" for result in results)
    staged = [result for result in results if result.evidence == "staged"]
    assert undecided and staged and f"\n- {undecided} of {len(results)} claims are undecided: " in text
    assert "| holds, of what is run | BN learns new tasks better than GN (LA) |" in text


def test_section_has_staged_cases_and_both_grids(section: Section) -> None:
    text = text_of(section)
    assert "## HOLDS, of what is run (staged: 16 seeds): BN learns new tasks better than GN (LA) (la)" in text
    assert "| case | difference | interval | seeds | outcome |" in text
    assert re.search(r"\| split-cifar100 er bn against gn32 \| \+10\.00 \| .* \| 16 \| holds \(higher\) \|", text)
    assert "## Learning rates tried on the validation tasks, in a refined grid, for the fresh seeds" in text
    assert text.count("```bash") == 2 and "--until-decided" in text and text.count("## Learning rates tried") == 2


def test_table_of_our_own_has_questions_and_selected_rates_only(runs: Path) -> None:
    report = collect_report(runs, ["panel"])
    (section,) = report.sections
    assert table_title(section.recipe).startswith("Panel: ") and section.recipe.ours
    assert [variant.title for variant in section.variants if variant.run] == [
        f"{FRESH}, {CHOSEN_TITLE[0].lower()}{CHOSEN_TITLE[1:]}"
    ]
    text = markdown(claims_document(report.sections))
    assert "## Questions of our own" in text and "claims are undecided" not in text
    assert re.search(r"\| holds, of what is run \| Is CN over BN in ACC\? \|", text)


def test_timed_runs_are_read_from_the_folder_of_their_recipe(tmp_path: Path) -> None:
    make_records(find_recipe("table3"), tmp_path)
    section = only_section("table3", tmp_path)
    lines = {one.cell.norm: line for one in section.variants[0].cells for line in lines_of(section.recipe, one)}
    bn, cn = ([record.seconds["train"] for record in lines[norm].measured.records.values()] for norm in ("bn", "cn32"))
    assert lines["cn32"].values == pytest.approx([100 * (c / b - 1) for b, c in zip(bn, cn, strict=True)])
    assert set(lines["bn"].values) == {0.0} and lines["bn"].comparison is None, "no verdict on what can be no other"
