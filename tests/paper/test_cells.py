"""Records of the cells of a table: its precision, what is left out, and which seeds diverged."""

from collections.abc import Mapping
from typing import Any

import pytest

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import DIVERGED, Record, Runs, make_record
from contnorm.paper.cells import (
    MeasuredCell,
    Numerics,
    RecipeCell,
    RecordIndex,
    baseline_of,
    cells_of,
    training_seconds,
    with_numerics,
)
from contnorm.paper.recipe import View, find_recipe
from contnorm.paper.tables import precision_remarks

FP32, TF32, LOOSE = Numerics("fp32", True), Numerics("tf32", True), Numerics("tf32", False)
CELLS = {cell.norm: cell for cell in cells_of(find_recipe("table3"))}
EVERY = range(100)


def seeds(numerics: Numerics, count: int, seconds: float = 1.0, **more: Any) -> list[tuple[Numerics, dict[str, Any]]]:
    content = {"matrix": {"correct": [[1]], "total": [2]}, "seconds": {"train": seconds}}
    return [(numerics, more or content)] * count


def measure(runs: Mapping[str, list[Any]], numerics: Numerics | None = None) -> list[MeasuredCell]:
    """Measure cells by norm; each gets settings of its own, as in a recipe."""
    configs: dict[RecipeCell, RunConfig] = {}
    records: list[Record] = []
    for number, (norm, parts) in enumerate(runs.items(), 1):
        config = configs[CELLS[norm]] = from_dict({"train": {"batch": number}})
        for part in parts:
            for seed, (of, content) in enumerate(part):
                records.append(make_record(with_numerics(config, of), seed, content))
    return RecordIndex(Runs.of(records)).measure(configs, EVERY, numerics)


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
            "bn": [seeds(FP32, 3, 10.0), seeds(TF32, 3, 5.0)],
            "cn32": [seeds(TF32, 3, 5.0)],
            "gn32": [seeds(FP32, 5, 20.0)],
        }
    )
    assert shown(measured) == [("fp32", 3), ("fp32", 5)] and measured[1].empty_text == "not run"
    times = {one.cell.norm: list(one.values("extra_time").values()) for one in measured}
    assert times == {"bn": [0.0] * 3, "cn32": [], "gn32": [100.0] * 3}
    assert measured[0].baseline is measured[0].records, "the time of BN over BN needs no verdict"


def test_chosen_precision_overrides_most_seeds() -> None:
    measured = measure({"bn": [seeds(FP32, 3), seeds(TF32, 1)]}, TF32)
    assert shown(measured) == [("tf32", 1)] and measured[0].left_out == {FP32: 3}


def test_footer_names_precision_and_records_left_out() -> None:
    measured = measure(
        {
            "bn": [seeds(FP32, 1), seeds(TF32, 2), seeds(LOOSE, 2)],
            "cn32": [seeds(TF32, 5)],
            "gn32": [seeds(FP32, 3)],
        }
    )
    assert shown(measured) == [("tf32", 2), ("tf32", 5)]
    precision, *others = precision_remarks(measured)
    assert precision == "Precision: tf32 (the recipe has fp32)."
    exact, loose = sorted(others, key=lambda text: "deterministic" in text)
    assert "bn (1 seed)" in exact and "gn32 (3 seeds)" in exact and "--precision fp32`" in exact
    assert "bn (2 seeds)" in loose and "--precision tf32 --set train.deterministic=false" in loose


def test_tie_uses_recipe_precision() -> None:
    measured = measure({"bn": [seeds(TF32, 2), seeds(FP32, 2)]})
    assert shown(measured) == [("fp32", 2)] and measured[0].left_out == {TF32: 2}
    assert precision_remarks(measured)[0] == "Precision: fp32."


def test_diverged_seeds_are_those_of_the_table_precision() -> None:
    lost = {"status": DIVERGED, "reason": "the loss is nan."}
    both = measure({"bn": [seeds(FP32, 3), seeds(TF32, 1, **lost)], "cn32": [seeds(FP32, 2, **lost)]})
    assert [dict(one.diverged) for one in both] == [{}, dict.fromkeys(range(2), "the loss is nan.")]
    assert [one.empty_text for one in both] == ["not run", "diverged"]


def test_index_ignores_the_hash_of_weights_that_is_not_asked_for() -> None:
    content = {"matrix": {"correct": [[1]], "total": [2]}}
    weights = {"weights": "file.pt", "weights_hash": "abc"}
    record = make_record(from_dict({"model": weights}), 0, content)
    index = RecordIndex(Runs([record]))
    for model, found in (({"weights": "file.pt"}, 1), (weights, 1), ({**weights, "weights_hash": "def"}, 0)):
        assert len(index.records(from_dict({"model": model}), EVERY)) == found


def test_run_without_tasks_ahead_stands_for_one_with_them() -> None:
    plain, ahead = (from_dict({"evaluate": {"ahead": value}}) for value in (False, True))
    content = {"matrix": {"correct": [[1]], "total": [2]}}
    cell = CELLS["bn"]
    index = RecordIndex(Runs([make_record(plain, 0, content)]))
    assert len(index.measure({cell: ahead}, EVERY)[0].records) == 1 and not index.records(ahead, EVERY)
    index = RecordIndex(Runs([make_record(plain, 0, content), make_record(ahead, 3, content)]))
    assert list(index.measure({cell: ahead}, EVERY)[0].records) == [3], "the run that measured them is preferred"


def test_curves_and_views() -> None:
    matrix = {"correct": [[9, None], [7, 7]], "total": [10, 10]}
    one = MeasuredCell(CELLS["bn"], {0: make_record(RunConfig(), 0, {"matrix": matrix})})
    assert one.curves("acc_so_far")[0] == pytest.approx([90.0, 70.0]) and one.values("fm") == pytest.approx({0: 20.0})
    hidden = MeasuredCell(RecipeCell(one.cell.place, {}, View("matrix_task")), one.records)
    assert hidden.values("acc") == {} and hidden.curves("acc_so_far") == {}


def test_time_baseline_is_plain_bn() -> None:
    found = {cell.norm: base and base.norm for cell in CELLS.values() for base in [baseline_of(cell, CELLS.values())]}
    norms = ["bn", "gn32", "sn", "cn32"]
    assert found == dict.fromkeys(norms, "bn") | dict.fromkeys([f"{norm} stock" for norm in norms], "bn stock")


def test_training_time_excludes_warm_up_tasks() -> None:
    def timed(**seconds: object) -> Record:
        return make_record(RunConfig(), 0, {"matrix": {"correct": [[1]], "total": [1]}, "seconds": seconds})

    assert training_seconds(timed(train=111.0, train_by_task=[60.0, 40.0, 5.0, 6.0])) == 11.0
    assert training_seconds(timed(train=9.0, train_by_task=[5.0, 4.0])) == 9.0  # there is nothing after them
