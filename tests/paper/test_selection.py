"""Learning rates that were chosen: what is written is read again, and those of the package are of their records."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.records import Store
from contnorm.errors import UserError
from contnorm.paper.cells import cells_of
from contnorm.paper.recipe import find_recipe
from contnorm.paper.selection import (
    RateResult,
    SelectedRate,
    Selection,
    best_rate,
    find_selection,
    parse_selection,
    selection_text,
    with_selection,
)

RECORDS = Path(__file__).resolve().parents[2] / "docs" / "records"
GRID = (RateResult(0.01, 60.25, 1.5, 3), RateResult(0.1, 62.5, 0.5, 3), RateResult(0.3, 70.0, 0.1, 2, lost=1))
WHERE = {"stream": "split-cifar100", "strategy": "er", "norm": "brn", "schedule": "own"}
SELECTION = Selection("table2", (SelectedRate(WHERE, 0.1, "tf32", GRID),))
TEXT = selection_text(SELECTION)


def test_selection_round_trip() -> None:
    assert parse_selection(TEXT, "table2", "x.toml") == replace(SELECTION, path="x.toml")
    gone = Selection("t", (SelectedRate({}, 1e-7, "fp32", (RateResult.of(1e-7, [], lost=3),)),))
    (read,) = parse_selection(selection_text(gone), "t", "x").selected
    assert read.lr == 1e-7 and math.isnan(read.grid[0].mean) and read.grid[0].lost == 3


def test_selection_applies_to_matching_cells() -> None:
    """Batch renormalization with its published schedule, with ER: one cell of 32; the scaled one keeps the table's."""
    cells = cells_of(with_selection(find_recipe("table2"), SELECTION))
    got = [cell for cell in cells if cell.values["train"]["lr"] == 0.1]
    assert got == [cell for cell in cells if SELECTION.covers(cell)]
    assert [(c.place["stream"], c.place["strategy"], c.norm) for c in got] == [("split-cifar100", "er", "brn")]


def test_best_rate_has_no_diverged_seed() -> None:
    assert best_rate(GRID) == GRID[1] and best_rate(GRID[2:]) is None and best_rate(()) is None


def test_find_selection_uses_first_existing_file(tmp_path: Path) -> None:
    there = tmp_path / "b.toml"
    there.write_text(TEXT)
    found = find_selection("table2", [tmp_path / "a.toml", there])
    assert found is not None and found.path == str(there)
    assert find_selection("no such table", [tmp_path / "a.toml"]) is None


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"table2"', '"table9"', "'table9'"),
        ("precision", "precison", "selected 1 precison"),
        ("norm =", "nrom =", "selected 1 where nrom"),
        ("mean = 60.25", 'mean = "high"', "selected 1 grid 1 mean='high'"),
    ],
)
def test_mistake_in_selection_is_found(old: str, new: str, place: str) -> None:
    with pytest.raises(UserError, match=rf"x\.toml: .*{place}"):
        parse_selection(TEXT.replace(old, new, 1), "table2", "x.toml")


@pytest.mark.slow
def test_refined_selection_is_that_of_its_records() -> None:
    """The highest mean of five seeds on the validation tasks, of the rates that have five; the smaller rate on ties."""
    scores: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    lost: set[tuple[str, ...]] = set()
    for archive in ("coarse", "fine"):
        found = Store(RECORDS / f"split-cifar100-{archive}-grid.jsonl.gz").load_all()
        for record in found.records:
            assert record.config.stream.part == "validate"
            scores[run_of(record.config)][record.config.train.lr].append(record.score("acc"))
        lost |= {(*run_of(run.config), str(run.config.train.lr)) for run in found.diverged}
    selection = find_selection("table2", refined=True)
    assert selection is not None and len(selection.selected) == len(scores) == 16
    for chosen in selection.selected:
        of = chosen.where
        key = (of["strategy"], of["norm"], "published" if of["schedule"] == "own" else of["schedule"])
        means = {lr: fmean(values) for lr, values in scores[key].items() if len(values) == 5}
        means = {lr: mean for lr, mean in means.items() if (*key, str(lr)) not in lost}
        assert chosen.lr == min(means, key=lambda lr: (-means[lr], lr))
        assert {one.lr: one.mean for one in chosen.grid if one.lr in means} == pytest.approx(means)


@pytest.mark.slow
def test_selection_of_the_panel_is_that_of_its_records() -> None:
    """The paper's norms as in the refined selection of Table 2; the others by the highest mean of three seeds."""
    selection, table2 = find_selection("panel"), find_selection("table2", refined=True)
    assert selection is not None and table2 is not None
    kept = {(rate.where["strategy"], rate.where["norm"], rate.where["schedule"]): rate for rate in table2.selected}
    scores: dict[tuple[Any, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    others: dict[tuple[Any, ...], list[float]] = defaultdict(list)  # settings that are not in the grid of rates
    found = Store(RECORDS / "split-cifar100-panel-validation.jsonl.gz").load_all()
    for record in found.records:
        config = record.config
        assert config.stream.part == "validate"
        key = (config.strategy.name, config.norm.name, config.evaluate.moments, config.norm.freeze_after)
        if config.norm.options or config.evaluate.weights == "task" or config.evaluate.weights == "batch":
            others[(*key, config.norm.options, config.evaluate.weights)].append(record.score("acc"))
        else:
            scores[key][config.train.lr].append(record.score("acc"))
    new = 0
    for chosen in selection.selected:
        of = chosen.where
        moments, frozen = of.get("moments", "running"), of.get("freeze_after", "own")
        key = (of["strategy"], of["norm"], moments, None if frozen == "own" else frozen)
        if key not in scores:
            old = kept.pop((of["strategy"], of["norm"], of["schedule"]))
            assert (chosen.lr, str(chosen.grid)) == (old.lr, str(old.grid))  # as text, for NaN
            continue
        new += 1
        means = {lr: fmean(values) for lr, values in scores[key].items() if len(values) == 3}
        assert chosen.lr == min(means, key=lambda lr: (-means[lr], lr))
        assert {one.lr: one.mean for one in chosen.grid if not one.lost} == pytest.approx(means)
        best = means[chosen.lr] + 1e-9
        assert all(fmean(values) <= best for other, values in others.items() if other[:4] == key), "a rate alone"
    assert new == 22 and not kept


def run_of(config: RunConfig) -> tuple[str, ...]:
    return config.strategy.name, config.norm.name, config.norm.schedule
