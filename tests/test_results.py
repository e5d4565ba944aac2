"""Records: written whole or not at all, found by the beginning of a hash, refused when they are none."""

import json
import math
import os
from pathlib import Path

import pytest

from contnorm.config import NormConfig, RunConfig, from_dict
from contnorm.errors import UserError
from contnorm.results import SCHEMA, Store, spread_over_seeds, write_atomically

FOUND = {"matrix": {"correct": [[5, None], [4, 6]], "total": [10, 10]}, "drift": {}, "seconds": {}}


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    store, config = Store(tmp_path), RunConfig()
    for seed in (3, 1):
        assert not store.has(config, seed)
        store.save(config, seed, FOUND)
    (record, other) = store.find(config.hash[:4])
    assert (record.seed, other.seed) == (1, 3) and record.config == config
    assert record.score("acc") == 50 and [r.seed for r in store] == [1, 3]
    raw = json.loads(store.path(config, 1).read_text())
    assert raw["schema"] == SCHEMA and raw["hash"] == config.hash


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, b"old")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask(), "readable by whom the user lets read"


def _umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no record of a run"),
        ("{}", "is no record of a run .without config, matrix"),
        ("[]", "is no record of a run .no JSON object"),
        ("caf\xe9", "is no record of a run .'utf-8' codec"),
        (json.dumps({"schema": "x"}), "is no record of a run .schema='x' is no whole number"),
        (json.dumps({"schema": 1, "config": {}}), "is no record of a run .without matrix, seed"),
        (json.dumps({"schema": 1, "config": [], "seed": 0, **FOUND}), "is no record of a run"),
        (json.dumps({"schema": 1, "config": {}, "seed": "x", **FOUND}), "is no record of a run .invalid literal"),
        (json.dumps({"schema": 1, "config": {}, "seed": 0, "matrix": {"correct": [[11]], "total": [10]}}), "11 right"),
        (json.dumps({"schema": 1, "config": {}, "seed": 0, "matrix": 3}), "is no record of a run"),
        (json.dumps({"schema": 1, "config": {}, "seed": 0, **FOUND, "matrix_running": {}}), "is no record of a run"),
        (json.dumps({"schema": 99}), "is a record of version 99.*Upgrade contnorm"),
    ],
)
def test_what_is_no_record_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "0.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=said) as told:
        Store(tmp_path).load(path)
    assert str(told.value).startswith(f"{path}: ") and "\n" not in str(told.value)


def test_a_broken_record_keeps_no_other_back(tmp_path: Path) -> None:
    store, config = Store(tmp_path), RunConfig()
    for seed in (0, 1, 10, 2):
        store.save(config, seed, FOUND)
    store.path(config, 1).write_text("{")
    for found in (store.readable(), store.search(config.hash[:4]), store.search(str(tmp_path))):
        assert [record.seed for record in found.records] == [0, 2, 10]
        assert len(found.problems) == 1 and "1.json: is no record" in found.problems[0]
        assert found.problems[0].endswith("Delete it, and it can be run again.")
    with pytest.raises(UserError, match=r"1\.json: is no record of a run"):
        store.find(config.hash)


def test_a_folder_of_runs_is_searched_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    configs = [RunConfig(), RunConfig(norm=NormConfig("cn"))]
    for config in configs:
        store.save(config, 0, FOUND)
    found = Store(tmp_path / "elsewhere").search(str(tmp_path / "runs"))
    assert {record.config.hash for record in found.records} == {config.hash for config in configs}
    assert len(Store(tmp_path).search(str(tmp_path / "runs" / configs[0].hash)).records) == 1
    with pytest.raises(UserError, match=r"holds 2 runs: \w+, \w+\. Say which"):
        store.find(str(tmp_path / "runs"))


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run 'abc'"):
        Store(tmp_path).find("abc")


def test_seeds_that_were_lost_are_found_beside_the_records(tmp_path: Path) -> None:
    """A seed that came through after all is not among them; a note that is broken still is."""
    config, other, store = RunConfig(), from_dict({"train": {"lr": 0.5}}), Store(tmp_path)
    store.save(config, 0, FOUND)
    store.note_lost(config, 0, "seed 0: an old note.")
    store.note_lost(config, 10, "seed 10: the loss is nan.")
    store.note_lost(config, 2, "seed 2: the loss is inf.").write_text("{")
    store.note_lost(other, 1, "seed 1: the loss is inf.")
    lost = {2: "", 10: "seed 10: the loss is nan."}
    assert store.readable().lost == {config.hash: lost, other.hash: {1: "seed 1: the loss is inf."}}
    assert store.find_one(config.hash).lost == {config.hash: lost} and list(lost) == [2, 10]


def test_a_run_that_was_lost_whole_is_told_so(tmp_path: Path) -> None:
    """By its hash, by its folder and by the note itself: not that there is no such run."""
    store = Store(tmp_path)
    note = store.note_lost(RunConfig(), 1, "seed 1: the loss is nan.")
    for given in (RunConfig().hash, str(note.parent)):
        with pytest.raises(UserError, match=r"has no scores, for each of its seeds was lost\. seed 1: the loss is nan"):
            store.find(given)
    with pytest.raises(UserError, match=r"1\.lost\.json: is a note of a run that was lost.* seed 1: the loss is nan"):
        store.find(str(note))


def test_spread() -> None:
    assert spread_over_seeds([1.0, 2.0, 6.0]) == pytest.approx((3.0, 7**0.5))
    assert all(map(math.isnan, spread_over_seeds([math.nan, math.nan]))), "forgetting, where there is one task"
