"""Records of one run in several precisions: which count, beside what, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.metrics.accuracy_matrix import AccuracyMatrix
from contnorm.bench.records import Record
from contnorm.paper.cells import Cell, cells_of
from contnorm.paper.precisions import computed, measured_cells, precision_remarks
from contnorm.paper.recipe_file import find_recipe
from contnorm.paper.series import Measured

FP32, TF32, LOOSE = ("fp32", True), ("tf32", True), ("tf32", False)
CELLS = {cell.norm: cell for cell in cells_of(find_recipe("table3"))}


def seeds(how: tuple[str, bool], count: int, seconds: float = 1.0) -> dict[int, Record]:
    config = computed(RunConfig(), how)
    matrix = AccuracyMatrix([[1]], [2])
    return {seed: Record(config, seed, matrix, {}, {"seconds": {"train": seconds}}) for seed in range(count)}


def counted(measured: list[Measured]) -> list[tuple[str, int]]:
    return [(next(iter(one.records.values())).config.train.precision, len(one.records)) for one in measured]


def test_a_time_is_set_beside_one_of_the_same_precision() -> None:
    """BN in both, CN in TF32 alone: half the time of BN in float32, and as much as BN in TF32."""
    cells: list[Cell] = [CELLS["bn"], CELLS["cn32"], CELLS["gn32"]]
    bn = {FP32: seeds(FP32, 3, 10.0), TF32: seeds(TF32, 3, 5.0)}
    found = measured_cells(cells, [bn, {TF32: seeds(TF32, 3, 5.0)}, {FP32: seeds(FP32, 5, 20.0)}])
    assert counted(found) == [("fp32", 3), ("tf32", 3), ("fp32", 5)]
    times = {one.cell.norm: list(one.values("extra_time").values()) for one in found}
    assert times == {"bn": [0.0] * 3, "cn32": [0.0] * 3, "gn32": [100.0] * 3}
    assert found[0].baseline is found[0].records, "of BN itself there is nothing to judge"


def test_what_is_left_out_is_counted_and_told() -> None:
    cells = [CELLS["bn"], CELLS["cn32"]]
    runs = [{FP32: seeds(FP32, 1), TF32: seeds(TF32, 2), LOOSE: seeds(LOOSE, 2)}, {TF32: seeds(TF32, 5)}]
    found = measured_cells(cells, runs)
    assert counted(found) == [("tf32", 2), ("tf32", 5)]
    assert precision_remarks(found) == [
        "In tf32, where the recipe has fp32: all that is run.",
        "split-cifar100 er bn: 1 seed in fp32 and 2 seeds in tf32, not deterministic are not counted, since a mean is "
        "of one precision and most of what is there is in tf32.",
    ]


def test_of_as_many_the_more_exact_counts_and_the_recipes_own_is_not_told() -> None:
    found = measured_cells([CELLS["bn"]], [{TF32: seeds(TF32, 2), FP32: seeds(FP32, 2)}])
    assert counted(found) == [("fp32", 2)] and [text[:20] for text in precision_remarks(found)] == [
        "split-cifar100 er bn"
    ]
    alone = [replace(one, left_out={}) for one in found]
    assert precision_remarks(alone) == [] and precision_remarks([Measured(CELLS["bn"], {})]) == []
    own = replace(CELLS["bn"], values={**CELLS["bn"].values, "train": {"precision": "tf32"}})
    assert precision_remarks(measured_cells([own], [{TF32: seeds(TF32, 2)}])) == []
