"""Precision of a table: which one it uses, and what its footer says about it and about the records left out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import Record, make_record
from contnorm.errors import UserError
from contnorm.paper.cells import RecipeCell, cells_of
from contnorm.paper.measured import MeasuredCell, Numerics, Seeds, measure_cells, with_numerics
from contnorm.paper.recipe import find_recipe, parse_recipe
from contnorm.paper.tables import precision_remarks

FP32, TF32, LOOSE = Numerics("fp32", True), Numerics("tf32", True), Numerics("tf32", False)
CELLS = {cell.norm: cell for cell in cells_of(find_recipe("table3"))}
Runs = Mapping[str, Mapping[Numerics, Seeds]]


def seeds(numerics: Numerics, count: int, seconds: float = 1.0) -> dict[int, Record]:
    config = with_numerics(RunConfig(), numerics)
    results = {"matrix": {"correct": [[1]], "total": [2]}, "seconds": {"train": seconds}}
    return {seed: make_record(config, seed, results) for seed in range(count)}


def measure(
    runs: Runs, diverged: Mapping[Numerics, Mapping[int, str]] | None = None, numerics: Numerics | None = None
) -> list[MeasuredCell]:
    """Measure cells by norm; each gets settings of its own, as in a recipe."""
    configs: dict[RecipeCell, RunConfig] = {}
    by_config: dict[RunConfig, Mapping[Numerics, Seeds]] = {}
    for number, (norm, records) in enumerate(runs.items(), 1):
        config = from_dict({"train": {"batch": number}})
        configs[CELLS[norm]], by_config[config] = config, records
    notes = diverged or {}
    return measure_cells(
        configs,
        by_config.__getitem__,
        lambda config: notes.get(Numerics(config.train.precision, config.train.deterministic), {}),
        numerics,
    )


def shown(measured: list[MeasuredCell]) -> list[tuple[str, int]]:
    return [
        (record.config.train.precision, len(one.records))
        for one in measured
        for record in list(one.records.values())[:1]
    ]


def test_table_uses_precision_with_most_seeds() -> None:
    """BN in both, CN in TF32, GN in float32: the table is in float32, and CN is not in it."""
    measured = measure(
        {
            "bn": {FP32: seeds(FP32, 3, 10.0), TF32: seeds(TF32, 3, 5.0)},
            "cn32": {TF32: seeds(TF32, 3, 5.0)},
            "gn32": {FP32: seeds(FP32, 5, 20.0)},
        }
    )
    assert shown(measured) == [("fp32", 3), ("fp32", 5)] and measured[1].empty_text == "not run"
    times = {one.cell.norm: list(one.values("extra_time").values()) for one in measured}
    assert times == {"bn": [0.0] * 3, "cn32": [], "gn32": [100.0] * 3}
    assert measured[0].baseline is measured[0].records, "the time of BN over BN needs no verdict"


def test_chosen_precision_overrides_most_seeds() -> None:
    measured = measure({"bn": {FP32: seeds(FP32, 3), TF32: seeds(TF32, 1)}}, numerics=TF32)
    assert shown(measured) == [("tf32", 1)] and measured[0].left_out == {FP32: 3}


def test_footer_names_precision_and_records_left_out() -> None:
    measured = measure(
        {
            "bn": {FP32: seeds(FP32, 1), TF32: seeds(TF32, 2), LOOSE: seeds(LOOSE, 2)},
            "cn32": {TF32: seeds(TF32, 5)},
            "gn32": {FP32: seeds(FP32, 3)},
        }
    )
    assert shown(measured) == [("tf32", 2), ("tf32", 5)]
    precision, exact, loose = precision_remarks(measured)
    assert precision == "Precision: tf32 (the recipe has fp32)."
    assert "fp32" in exact and "bn (1 seed)" in exact and "gn32 (3 seeds)" in exact and "--precision fp32`" in exact
    assert "bn (2 seeds)" in loose and "--precision tf32 --set train.deterministic=false" in loose


def test_footer_names_a_few_of_many_rows_left_out() -> None:
    norms = list(CELLS)
    measured = measure({norm: {FP32: seeds(FP32, 1), TF32: seeds(TF32, 2)} for norm in norms})
    assert len(norms) == 8 and " and 2 more rows" in precision_remarks(measured)[1]


def test_tie_uses_recipe_precision() -> None:
    measured = measure({"bn": {TF32: seeds(TF32, 2), FP32: seeds(FP32, 2)}})
    assert shown(measured) == [("fp32", 2)] and measured[0].left_out == {TF32: 2}
    assert precision_remarks(measured)[0] == "Precision: fp32."


def test_no_records_have_no_precision_remark() -> None:
    assert precision_remarks([MeasuredCell(CELLS["bn"], {})]) == [] and measure({}) == []


def test_diverged_seeds_are_those_of_the_table_precision() -> None:
    notes = {TF32: {0: "seed 0: the loss is nan.", 1: "seed 1: the loss is nan."}, FP32: {7: "of another precision"}}
    both = measure({"bn": {FP32: seeds(FP32, 2)}, "cn32": {}}, notes)
    assert [one.diverged for one in both] == [{7: "of another precision"}] * 2
    only_diverged = measure({"bn": {}}, notes)
    assert list(only_diverged[0].diverged) == [0, 1] and only_diverged[0].empty_text == "diverged"


MIXED = """
title = "mixed"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["single"]
norms = ["bn"]
"""


def test_recipe_with_several_precisions_is_rejected() -> None:
    second = MIXED[MIXED.index("[[runs]]") :] + 'settings = { train = { precision = "tf32" } }\n'
    with pytest.raises(UserError, match=r"own\.toml: .*train\.precision: .*fp32.*tf32.*\[settings\]"):
        parse_recipe("own", MIXED + second, "own.toml")
    selected = '[[selected]]\nwhere = { norm = "bn" }\nsettings = { train = { deterministic = false } }\n'
    with pytest.raises(UserError, match=r"own\.toml: selected 1: sets train\.deterministic"):
        parse_recipe("own", MIXED + selected, "own.toml")
    tf32 = parse_recipe("own", MIXED + 'settings = { train = { precision = "tf32" } }\n', "own.toml")
    measured = [MeasuredCell(cell, seeds(TF32, 2)) for cell in cells_of(tf32)]
    assert precision_remarks(measured) == ["Precision: tf32."]
