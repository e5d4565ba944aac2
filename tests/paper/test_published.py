"""The paper's numbers, a few of each table read off its source by eye, and how many there are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from contnorm.errors import UserError
from contnorm.paper.published import data_rows, find, numbers_of_row, published

CIFAR100, MINI = "split-cifar100", "split-mini-imagenet"


def test_published_cells_are_unique_and_complete() -> None:
    counts = Counter(cell.table for cell in published())
    assert counts == {
        "1": 20, "2": 84, "3": 8, "4": 72, "5": 48, "6": 48, "8": 24, "9": 12, "10": 24, "11": 144, "12": 18,
        "13": 48, "14": 48,
    }  # fmt: skip
    places = Counter(replace(cell, mean=None, std=None, flag="") for cell in published())
    assert max(places.values()) == 1


@pytest.mark.parametrize(
    ("where", "mean", "std"),
    [
        ({"table": "1", "strategy": "single", "moments": "running", "metric": "acc"}, 72.81, None),
        ({"table": "1", "strategy": "er", "moments": "oracle", "metric": "la"}, 88.46, None),
        ({"table": "1", "strategy": "single", "metric": "drift_var_2"}, 7.74, None),
        ({"table": "2", "dataset": CIFAR100, "strategy": "er", "norm": "none", "metric": "la"}, 57.26, 0.64),
        ({"table": "2", "dataset": MINI, "strategy": "derpp", "norm": "brn", "metric": "fm"}, 6.66, 1.84),
        ({"table": "2", "dataset": CIFAR100, "strategy": "derpp", "norm": "cn", "metric": "acc"}, 69.13, 0.56),
        ({"table": "3", "norm": "cn", "metric": "seconds"}, 1642, None),
        ({"table": "3", "norm": "sn", "metric": "extra_time"}, 28.61, None),
        (
            {"table": "4", "dataset": "split-cifar10", "norm": "cn", "groups": 32, "buffer": 2560, "setting": "class",
             "metric": "fm"}, 21.6, 5.6,
        ),
        (
            {"table": "11", "dataset": "split-tiny-imagenet", "norm": "cn", "groups": 32, "buffer": 5120,
             "setting": "task", "metric": "acc"}, 54.9, 1.5,
        ),
        ({"table": "5", "dataset": "cocoseq", "norm": "cn", "split": "minority", "metric": "c_f1"}, 35.7, None),
        ({"table": "10", "dataset": MINI, "norm": "brn", "metric": "fm"}, 25.77, 2.04),
        ({"table": "12", "momentum": "cumulative", "metric": "acc"}, 35.86, 0.90),
        ({"table": "12", "momentum": None, "metric": "acc"}, 64.97, 1.09),
    ],
)  # fmt: skip
def test_published_numbers_equal_the_paper(where: dict[str, Any], mean: float, std: float | None) -> None:
    (cell,) = find(**where)
    assert cell.mean == mean
    if where["table"] != "5":  # there the deviations come from another table
        assert cell.std == std


def test_published_tables_with_shared_rows_agree() -> None:
    for cell in find(table="4"):
        where = {name: getattr(cell, name) for name in ("dataset", "norm", "groups", "buffer", "setting", "metric")}
        (same,) = find(table="11", **where)
        assert (same.mean, same.std) == (cell.mean, cell.std)


def test_published_doubtful_cells_are_flagged() -> None:
    (copied,) = find(table="2", dataset=MINI, strategy="derpp", norm="brn", metric="fm")
    assert "no less than 9.73" in copied.flag
    # Learned less kept can't be more than (T - 1) / T of what is forgotten: where a row breaks that, its FM is flagged.
    tasks = {"1": 5, "2": 17, "9": 4, "10": 17, "12": 17}
    for cell in (c for table in tasks for c in find(table=table, metric="fm")):
        where = {
            name: getattr(cell, name)
            for name in ("table", "dataset", "strategy", "norm", "momentum", "moments", "groups")
        }
        (acc,), (la,) = find(**where, metric="acc"), find(**where, metric="la")
        assert acc.mean is not None and la.mean is not None and cell.mean is not None
        share = (tasks[cell.table] - 1) / tasks[cell.table]
        if la.mean - acc.mean > share * cell.mean + 0.03:
            assert cell.flag, cell


def test_data_rows_equal_table_7() -> None:
    rows = {row.stream: row for row in data_rows()}
    assert len(rows) == 7
    tiny = rows["split-tiny-imagenet"]
    assert (tiny.tasks, tiny.shape, tiny.train, tiny.test, tiny.classes) == (10, (3, 64, 64), 100_000, 10_000, 200)
    assert rows["permuted-mnist"].test == 50_000 and "3x32x32" in rows["split-cifar100"].flag


def test_mistake_is_a_one_line_error() -> None:
    with pytest.raises(UserError, match=r"unknown field of a published number 'metrik'\. Did you mean 'metric'"):
        find(metrik="acc")
    row = {"dataset": "a", "strategy": "er", "norm": "bn"}
    with pytest.raises(UserError, match=r"own\.toml: the key 'values' is missing"):
        numbers_of_row(row, "own.toml")
    with pytest.raises(UserError, match=r"own\.toml: unknown key 'grups'. Did you mean 'groups'"):
        numbers_of_row({**row, "grups": 3, "values": {}}, "own.toml")
    with pytest.raises(UserError, match=r"values\.acc='high' must be \[mean\]"):
        numbers_of_row({**row, "values": {"acc": "high"}}, "own.toml")
