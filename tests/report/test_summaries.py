"""Summaries of records: the same with and without an index, which ignores changed records."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.records import Store, seal_of
from contnorm.errors import UserError
from contnorm.report import summaries
from contnorm.report.summaries import INDEX, Summary, find_summaries, summaries_under, summarize
from tests.committed_records import COCOSEQ, RUNS, copy_run

TABLES = RUNS / "tables.jsonl.gz"
ALL_KINDS = {"7ab8938428eb": TABLES, "634f63758def": TABLES, "068799b86d97": COCOSEQ}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few records of all kinds, in a folder that gets an index all the same, however new its files are."""
    monkeypatch.setattr(summaries, "MIN_RECORDS", 1)
    monkeypatch.setattr(summaries, "MIN_AGE_NS", -(10**12))
    for run, archive in ALL_KINDS.items():
        copy_run(run, tmp_path / "runs", archive)
    return tmp_path / "runs"


def refuse(*_: object) -> None:
    raise AssertionError("a record was read again")


def plain(found: list[Summary]) -> str:
    """With what is not a number, which is not equal to itself."""
    return json.dumps([[one.config.hash, one.seed, one.sealed, one.scores, one.source, one.file] for one in found])


def test_index_gives_the_same_summaries_as_the_records(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = summaries_under(runs)
    assert len(read.records) == 14 and list(read.diverged) == ["634f63758def"]
    assert plain(read.records) == plain([summarize(record) for record in Store(runs).load_all().records])
    monkeypatch.setattr(summaries, "summarize", refuse)
    again = summaries_under(runs)
    assert plain(again.records) == plain(read.records) and again.diverged == read.diverged
    assert [one.config for one in again.records] == [one.config for one in read.records]
    assert [one.shape for one in again.records] == [one.shape for one in read.records]
    assert plain(find_summaries(Store(runs.parent), str(runs)).records) == plain(read.records)


def test_changed_record_is_read_again(runs: Path) -> None:
    """Also one of the same size and time: a file system notes when a file was changed, whatever its time says."""
    first = summaries_under(runs)
    path = runs / "7ab8938428eb" / "0.json"
    old, text = path.stat(), path.read_text()
    correct = json.loads(text)["matrix"]["correct"][-1][0]
    changed = text.replace(f"{correct},", f"{correct - 1},", 1)
    assert len(changed) == len(text) and changed != text
    time.sleep(0.02)  # longer than the step of a file system's clock
    path.write_text(changed)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    second = summaries_under(runs)
    assert plain(second.records) != plain(first.records)
    assert plain(second.records) == plain([summarize(record) for record in Store(runs).load_all().records])
    path.write_text("{")
    third = summaries_under(runs)
    assert len(third.records) == 13 and "0.json" in third.problems[0]
    path.unlink()
    assert len(summaries_under(runs).records) == 13 and summaries_under(runs).problems == []


def test_new_record_is_not_indexed_yet(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could be changed again within the same step of the clock."""
    monkeypatch.setattr(summaries, "MIN_AGE_NS", 3600 * 10**9)
    summaries_under(runs)
    assert not (runs / INDEX).exists()


@pytest.mark.parametrize("spoil", ["", "{}", "no checksum\n{}", "cut", "changed", "other code"])
def test_broken_index_is_rebuilt(runs: Path, spoil: str) -> None:
    read = plain(summaries_under(runs).records)
    index = runs / INDEX
    good = index.read_text()
    body = good.partition("\n")[2]
    other = {**json.loads(body), "code": []}
    spoiled = {"cut": good[:-20], "changed": good.replace("7ab8938428eb/0.json", "7ab8938428eb/9.json")}
    if spoil == "other code":
        text = json.dumps(other)
        index.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    else:
        index.write_text(spoiled.get(spoil, spoil))
    assert plain(summaries_under(runs).records) == read
    assert index.read_text() == good


def test_read_only_folder_has_no_index(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(summaries, "write_atomically", full)
    assert len(summaries_under(runs).records) == 14 and not (runs / INDEX).exists()


def test_few_records_have_no_index(tmp_path: Path) -> None:
    copy_run("7ab8938428eb", tmp_path)
    assert len(summaries_under(tmp_path).records) == 5 and not (tmp_path / INDEX).exists()


def test_inconsistent_record_from_the_index_is_reported(runs: Path) -> None:
    config, store = RunConfig(), Store(runs)
    for seed in range(3):
        size = 1 if seed == 2 else 2
        rows = [[5] * size for _ in range(size)]
        store.save(config, seed, {"matrix": {"correct": rows, "total": [10] * size}})
    for _ in range(2):
        found = summaries_under(runs)
        assert [one.seed for one in found.records if one.config == config] == [0, 1]
        assert len(found.problems) == 1 and "2.json" in found.problems[0]


def test_folder_without_finished_runs_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="no finished run"):
        find_summaries(Store(tmp_path), str(tmp_path / "runs"))


def test_summaries_distinguish_sealed_and_unsealed_records(tmp_path: Path) -> None:
    store, config = Store(tmp_path), from_dict({"train": {"lr": 0.5}})
    for seed in (0, 1):
        path = store.save(config, seed, {"matrix": {"correct": [[5]], "total": [10]}})
    raw = json.loads(path.read_text())
    assert raw["seal"] == seal_of(raw)
    del raw["seal"]
    path.write_text(json.dumps(raw | {"schema": 1}))
    assert [one.sealed for one in summaries_under(tmp_path).records] == [True, False]
