"""The page of records: its table has every field of the committed records and of new ones, with the right type."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.reference.record import FIELDS, field_keys, matches
from torch import nn

from contnorm import bench
from tests.datasets import small_long_tail, small_mini_imagenet

ROOT = Path(__file__).resolve().parents[2]
ARCHIVES = sorted((ROOT / "docs" / "records").rglob("*.jsonl.gz"))


def check(record: Mapping[str, Any]) -> set[str]:
    """Check that the fields of a record are in the table with their types; returns their keys."""
    found = dict(field_keys(record))
    for key, value in found.items():
        assert key in FIELDS, f"the table of records lacks {key}"
        assert matches(value, FIELDS[key].type), f"{key}: {str(value)[:60]} is not {FIELDS[key].type}"
        wanted = FIELDS[key].where
        diverged = record.get("status") == "diverged"
        assert wanted == "all" or wanted.startswith("diverged") == diverged, key
    return set(found)


@pytest.mark.slow
def test_table_has_fields_of_committed_records() -> None:
    seen: set[str] = set()
    for archive in ARCHIVES:
        with gzip.open(archive, "rt", encoding="utf-8") as file:
            for line in file:
                seen |= check(json.loads(line))
    assert {"seconds.all", "census.held", "renorm.corrected_share"} <= seen


def arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (40, 1, 6, 6), dtype=np.uint8)
    return x, np.arange(40) % 4, x, np.arange(40) % 4


@pytest.mark.slow
def test_table_has_fields_of_new_records(tmp_path: Path) -> None:
    """Runs that together write every field, except those of earlier versions."""
    stream = bench.Stream.from_arrays(*arrays(), tasks=2, scenario="class")
    common: dict[str, Any] = {"lanes": 1}
    seen: set[str] = set()
    experiments: list[dict[str, Any]] = [
        {"norm": "bn", "settings": {"evaluate.moments": "oracle", "evaluate.ahead": True}},
        {"norm": "brn", "settings": {"train.max_steps": 1}},
        {"norm": "cn", "settings": {"norm.groups": "auto"}},
    ]
    for options in experiments:
        seen |= check(bench.run(stream, **common, **options).records[0].raw)
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    seen |= check(bench.run(stream, model=module, norm="bn", **common).records[0].raw)
    runs = tmp_path / "runs"
    with pytest.raises(bench.DivergedError):
        bench.run(stream, norm="none", lr=1e30, runs=runs, **common)
    (record,) = runs.glob("*/0.json")
    seen |= check(json.loads(record.read_text()))

    small_mini_imagenet(tmp_path, per_class=3)
    mini = bench.load_stream("split-mini-imagenet", root=tmp_path, allow_missing=True, tasks=1)
    seen |= check(bench.run(mini, norm="bn", settings={"train.max_steps": 1, "model.width": 4}, lanes=1).records[0].raw)
    tail = bench.load_stream("cocoseq", root=small_long_tail(tmp_path, "cocoseq"))
    settings = {"model.width": 4, "evaluate.moments": "oracle", "train.max_steps": 3}
    seen |= check(bench.run(tail, strategy="prs", norm="bn", settings=settings, lanes=1).records[0].raw)

    earlier = {"seconds.all"}
    memory = {"matrix_memory", "matrix_task_memory", "labels_memory"}  # with --memory-moments
    elsewhere = {"source.extra_images", "convolutions", *memory}  # convolutions on a GPU
    assert FIELDS.keys() - seen <= earlier | elsewhere, sorted(FIELDS.keys() - seen)
