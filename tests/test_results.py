"""Records: written whole or not at all, found by the beginning of a hash, refused when they are none."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.schema import NormConfig, RunConfig, from_dict
from contnorm.bench.files import write_atomically
from contnorm.bench.records import SCHEMA, Store, seal_of, spread_over_seeds
from contnorm.errors import UserError

ROOT = Path(__file__).resolve().parents[1]

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
        (json.dumps({"schema": 1, "config": {}, "seed": "x", **FOUND}), "is no record of a run .seed='x' must be"),
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


def _changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _reseal(path: Path, **values: object) -> None:
    raw = json.loads(path.read_text()) | values
    path.write_text(json.dumps(raw | {"seal": seal_of(raw)}))


def _unsealed(path: Path, **values: object) -> None:
    """As schema 1 wrote it."""
    raw = {key: value for key, value in json.loads(path.read_text()).items() if key != "seal"}
    path.write_text(json.dumps(raw | {"schema": 1} | values))


def test_a_record_is_sealed_and_one_of_schema_1_loads_as_unsealed(tmp_path: Path) -> None:
    store, config = Store(tmp_path), RunConfig()
    path = store.save(config, 0, {**FOUND, "parts": (1, 2), "by_task": {1: "a", 10: "b", 2: "c"}})
    assert store.load(path).sealed
    _unsealed(path)
    assert not store.load(path).sealed and store.readable().problems == []


@pytest.mark.parametrize(
    "values",
    [
        {"matrix": {"correct": [[6, None], [4, 6]], "total": [10, 10]}},
        {"drift": {"by_task": []}},
        {"commit": "other"},
        {"seal": "0" * 64},
        {"seal": None},
    ],
)
def test_a_record_that_was_changed_does_not_match_its_seal(tmp_path: Path, values: dict[str, object]) -> None:
    store = Store(tmp_path)
    for seed in (0, 1):
        _changed(path := store.save(RunConfig(), seed, FOUND), **(values if seed else {}))
    assert [record.seed for record in store.readable().records] == [0]
    with pytest.raises(UserError, match=r"1\.json: .*seal"):
        store.load(path)


def test_a_sealed_record_without_its_seal_is_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(RunConfig(), 0, FOUND)
    _unsealed(path, schema=SCHEMA)
    with pytest.raises(UserError, match="without seal"):
        store.load(path)


@pytest.mark.parametrize("write", [_reseal, _unsealed])
def test_settings_that_do_not_have_the_records_hash_are_named(tmp_path: Path, write: Any) -> None:
    store, other = Store(tmp_path), from_dict({"train": {"lr": 0.5}})
    path = store.save(RunConfig(), 0, FOUND)
    write(path, config=other.as_dict())
    with pytest.raises(UserError, match=f"its hash is '{RunConfig().hash}', but that of its settings is {other.hash}"):
        store.load(path)
    write(path, config=RunConfig().as_dict(), hash=None)
    with pytest.raises(UserError, match="its hash is None"):
        store.load(path)


@pytest.mark.parametrize("write", [_reseal, _unsealed])
def test_a_record_is_in_the_folder_of_its_run_under_the_name_of_its_seed(tmp_path: Path, write: Any) -> None:
    store, other = Store(tmp_path), from_dict({"train": {"lr": 0.5}})
    write(path := store.save(RunConfig(), 0, FOUND))
    moved = [store.path(other, 0), store.path(RunConfig(), 7), path.with_name("00.json"), tmp_path / "mine" / "0.json"]
    for place in moved:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(path.read_bytes())
    found = store.readable()
    assert [record.path for record in found.records] == [path]
    assert len(found.problems) == 4 and all(any(str(place) in said for said in found.problems) for place in moved)


def test_a_copy_of_a_record_may_lie_anywhere(tmp_path: Path) -> None:
    """Its names are checked under a folder of runs; its seal and its hash everywhere."""
    store = Store(tmp_path / "runs")
    path = store.save(RunConfig(), 3, FOUND)
    copies = [tmp_path / "copy.json", tmp_path / "best" / "0.json", path.parent / "copy.json"]
    for place in copies:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(path.read_bytes())
        assert [record.seed for record in store.search(str(place)).records] == [3]
    assert [record.seed for record in store.search(str(tmp_path / "best")).records] == [3]
    _changed(copies[0], seed=4)
    with pytest.raises(UserError, match="does not match its seal"):
        store.search(str(copies[0]))


def test_a_folder_that_is_a_link_or_here_has_the_name_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Store(tmp_path / "runs").save(RunConfig(), 0, FOUND)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "first").symlink_to(path.parent)
    assert len(Store(tmp_path / "links").readable().records) == 1
    monkeypatch.chdir(path.parent)
    assert len(Store(tmp_path).search(".").records) == 1


def test_a_note_of_a_diverged_run_is_sealed_and_of_its_run(tmp_path: Path) -> None:
    store, other = Store(tmp_path), from_dict({"train": {"lr": 0.5}})
    note = store.note_lost(RunConfig(), 1, "seed 1: the loss is nan.")
    copied = store.path(other, 2).with_name("2.lost.json")
    copied.parent.mkdir()
    copied.write_bytes(note.read_bytes())
    _changed(store.note_lost(RunConfig(), 3, "seed 3: the loss is nan."), lost="another reason")
    found = store.readable()
    assert found.lost == {RunConfig().hash: {1: "seed 1: the loss is nan.", 3: ""}}
    assert store.all_lost(other) == {}
    assert len(found.problems) == 2 and any(str(copied) in said for said in found.problems)


def test_committed_records_are_whole() -> None:
    """They are of schema 1: not sealed, but with the hash, the folder and the name of their settings and seed."""
    roots = [path for path in (ROOT / "docs" / "records").iterdir() if path.is_dir()]
    found = [Store(root).readable() for root in roots]
    assert sum(len(one.records) for one in found) > 500
    assert [problem for one in found for problem in one.problems] == []


def test_seeds_of_one_run_have_the_same_tasks(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        store.save(RunConfig(), seed, FOUND)
    store.save(RunConfig(), 3, {"matrix": {"correct": [[5]], "total": [10]}})
    drift = [{"norm1": {"mean": 0.1, "var": 0.2}}]
    for seed, rows in ((4, drift), (5, drift), (6, drift * 2)):
        store.save(RunConfig(), seed, {**FOUND, "drift": {"by_task": rows}})
    found = store.readable()
    assert [record.seed for record in found.records] == [0, 1, 2, 4, 5]
    assert "3.json" in found.problems[0] and "accuracies of 1 tasks" in found.problems[0]
    assert "6.json" in found.problems[1] and "drift" in found.problems[1]


def test_seeds_of_a_run_whose_steps_are_capped_may_reach_different_tasks(tmp_path: Path) -> None:
    store, config = Store(tmp_path), from_dict({"train": {"max_steps": 3}})
    for seed, tasks in enumerate((1, 2, 2)):
        rows = [[5] * tasks for _ in range(tasks)]
        store.save(
            config, seed, {"matrix": {"correct": rows, "total": [10] * tasks}, "reached": {"tasks": tasks, "of": 5}}
        )
    assert len(store.readable().records) == 3 and store.readable().problems == []


def test_processes_with_the_same_number_do_not_share_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two hosts, or in two containers, that write to one folder."""
    path, plain = tmp_path / "a.json", os.fsync

    def write_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", plain)
        write_atomically(path, b"of the other")

    monkeypatch.setattr(os, "fsync", write_meanwhile)
    write_atomically(path, b"mine")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.txt"
    other.write_text("content")
    monkeypatch.setattr("contnorm.bench.files.secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".run.json.guessed").symlink_to(other)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "run.json", b"{}")
    assert other.read_text() == "content" and not (tmp_path / "run.json").exists()
