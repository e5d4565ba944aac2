"""Estimated times of runs: counted steps, the cost of groups, and estimates of committed records."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.cost import CostModel, Timing, count_steps, recorded_timings
from contnorm.bench.engine.execute import plan_groups
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import Store, load_runs

RECORDS = Path(__file__).resolve().parent.parent.parent / "docs" / "records"


def config(name: str = "split-cifar100", source: str = "cifar100", /, **values: Any) -> RunConfig:
    base: dict[str, Any] = {
        "stream": {"name": name, "source": source, "part": "learn"},
        "train": {"batch": 10, "replay": 10},
        "model": {"name": "resnet18", "width": 64, "stem": "pool"},
    }
    for group, content in values.items():
        base[group] = {**base.get(group, {}), **content}
    return from_dict(base)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (config(), 17 * 2500 / 10),
        (config(stream={"part": "validate"}), 3 * 2500 / 10),
        (config(stream={"part": "all"}), 20 * 2500 / 10),
        (config(stream={"tasks": 4, "train_per_task": 100}), 40),
        (config(train={"max_steps": 7}), 7),
        (config(train={"passes": 2}), 2 * 4250),
        (config("split-cifar10", "cifar10", train={"batch": 32}, stream={"part": "all"}), 50000 / 32),
        (config("cocoseq", "cocoseq", stream={"part": "all"}), 35072 / 10),
    ],
)
def test_steps_are_counted_from_settings(settings: RunConfig, steps: float) -> None:
    assert count_steps(settings) == pytest.approx(steps)


@pytest.mark.parametrize("name", ["runs/split-cifar100-fresh-seeds.jsonl.gz", "runs/split-cifar100-panel.jsonl.gz"])
def test_counted_steps_are_those_of_records(name: str) -> None:
    records = [record for record in load_runs(RECORDS / name).records if record.raw.get("task_ends")]
    assert records
    assert all(count_steps(record.config) == record.raw["task_ends"][-1] for record in records)


def test_times_of_groups_are_fitted() -> None:
    """Groups of n runs take 4 + 2 n seconds; the share of a run follows for sizes that were not recorded."""
    timings = [Timing(config(), 4250, (4 + 2 * n) / n, n, "cuda") for n in (1, 2, 8, 100_000)]
    model = CostModel(timings[:2] + [timings[3]] * 3, "cuda")
    for n in (1, 4, 16):
        assert model.seconds(config(), n) == pytest.approx((4 + 2 * n) / n, rel=0.01)
    assert model.group_seconds([config()] * 4) == pytest.approx(4 + 2 * 4, rel=0.01)


def test_most_similar_record_is_used() -> None:
    bn, gn = config(norm={"name": "bn"}), config(norm={"name": "gn"})
    timings = [Timing(bn, 4250, 3.0, 1, "cuda"), Timing(gn, 4250, 5.0, 1, "cuda"), Timing(gn, 4250, 50.0, 1, "cpu")]
    model = CostModel(timings, "cuda")
    assert model.seconds(bn) == pytest.approx(3) and model.seconds(gn) == pytest.approx(5)
    assert model.seconds(config(norm={"name": "cn"})) == pytest.approx(4), "the median of the other norms"
    deeper = replace(bn, model=replace(bn.model, name="resnet101"))
    assert model.seconds(deeper) == pytest.approx(4 * 7.8 / 1.8), "by the operations of the networks"
    assert CostModel(timings, "cpu").seconds(gn) == pytest.approx(50), "times on other devices are not used"


def test_estimate_without_records_orders_runs() -> None:
    cpu, gpu = CostModel((), "cpu"), CostModel((), "cuda")
    small, deep = config(), config(model={"name": "resnet50"})
    long = config(stream={"tasks": 40, "train_per_task": 2500})
    assert gpu.seconds(small) < gpu.seconds(long) < cpu.seconds(deep)
    assert gpu.seconds(small) < gpu.seconds(deep)


def test_units_are_planned_longest_first_by_records(tmp_path: Path) -> None:
    """Two settings of equal size; the folder has a record that says that GN takes longer."""
    bn, gn = config(norm={"name": "bn"}), config(norm={"name": "gn"})
    for settings, seconds in ((bn, 5.0), (gn, 9.0)):
        results = {"matrix": {"correct": [[1]], "total": [2]}, "device": {"kind": "cpu"}, "task_ends": [4250]}
        Store(tmp_path).save(settings, 7, {**results, "seconds": {"train": seconds, "evaluate": 0.0}})
    assert len(recorded_timings(tmp_path)) == 2
    place = RunOptions(runs=tmp_path, data_root=Path("data"))
    jobs = [Run(settings, seed) for settings in (bn, gn) for seed in range(2)]
    assert [group[0].config.norm.name for group in plan_groups(jobs, place)] == ["gn", "gn", "bn", "bn"]
