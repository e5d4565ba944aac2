"""Estimated times of runs: counted steps, and estimates by recorded times."""

from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.cost import CostModel, count_steps
from contnorm.bench.data.registry import SOURCES
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
    ("settings", "samples", "steps"),
    [
        (config(stream={"part": "validate"}), 50_000, 3 * 2500 / 10),
        (config(stream={"part": "all"}), 50_000, 20 * 2500 / 10),
        (config(stream={"tasks": 4, "train_per_task": 100}), 50_000, 40),
        (config(train={"max_steps": 7}), 50_000, 7),
        (config(train={"passes": 2}), 50_000, 2 * 4250),
        (config("permuted-mnist", "mnist", stream={"tasks": 3, "part": "all"}), 1000, 3 * 100),
        (config("cocoseq", "cocoseq", stream={"part": "all"}), 35_072, 3507.2),
    ],
)
def test_steps_are_counted_from_settings(settings: RunConfig, samples: int, steps: float) -> None:
    assert count_steps(settings, samples) == pytest.approx(steps)


@pytest.mark.parametrize("name", ["runs/split-cifar100-fresh-seeds.jsonl.gz", "runs/split-cifar100-panel.jsonl.gz"])
def test_counted_steps_are_those_of_records(name: str) -> None:
    records = [record for record in load_runs(RECORDS / name).records if record.raw.get("task_ends")]
    counts = SOURCES["cifar100"].published
    assert records and counts is not None
    assert all(count_steps(one.config, sum(counts.train)) == one.raw["task_ends"][-1] for one in records)


def test_most_similar_record_is_used(tmp_path: Path) -> None:
    bn, gn = config(norm={"name": "bn"}), config(norm={"name": "gn"})
    other = config("split-cifar10", "cifar10", norm={"name": "gn"})
    for settings, seconds, kind in ((bn, 3.0, "cuda"), (gn, 5.0, "cuda"), (other, 50.0, "cpu")):
        results = {"matrix": {"correct": [[1]], "total": [2]}, "device": {"kind": kind}, "task_ends": [4250]}
        Store(tmp_path).save(settings, 7, {**results, "seconds": {"train": seconds - 1, "evaluate": 1.0}})
    model = CostModel(tmp_path, "cuda")
    assert model.seconds(bn, 50_000) == pytest.approx(3) and model.seconds(gn, 50_000) == pytest.approx(5)
    assert model.seconds(config(norm={"name": "cn"}), 50_000) == pytest.approx(4), "the median of the other norms"
    deeper = config(model={"name": "resnet101"})
    assert model.seconds(deeper, 50_000) == CostModel(None, "cuda").seconds(deeper, 50_000), "no similar record"
    assert CostModel(tmp_path, "cpu").seconds(gn, 50_000) == CostModel(None, "cpu").seconds(gn, 50_000)


def test_estimate_without_records_orders_runs() -> None:
    cpu, gpu = CostModel(device="cpu"), CostModel(device="cuda")
    small, deep = config(), config(model={"name": "resnet50"})
    long = config(train={"passes": 2})
    assert gpu.seconds(small, 50_000) < gpu.seconds(long, 50_000) < cpu.seconds(deep, 50_000)
    assert gpu.seconds(small, 50_000) < gpu.seconds(deep, 50_000)
