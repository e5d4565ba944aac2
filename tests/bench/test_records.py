"""Records in a runs folder: writing, loading, searching, seals, and checks of identity."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from contnorm.atomic_files import write_atomically
from contnorm.bench.config.schema import NormConfig, RunConfig, from_dict
from contnorm.bench.records import SCHEMA, Store, seal_of, spread_over_seeds
from contnorm.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

RESULTS = {"matrix": {"correct": [[5, None], [4, 6]], "total": [10, 10]}, "drift": {}, "seconds": {}}


def test_saved_record_loads_with_equal_content(tmp_path: Path) -> None:
    store, config = Store(tmp_path), RunConfig()
    for seed in (3, 1):
        assert not store.has(config, seed)
        store.save(config, seed, RESULTS)
    (record, other) = store.find(config.hash[:4])
    assert (record.seed, other.seed) == (1, 3) and record.config == config
    assert record.score("acc") == 50 and [r.seed for r in store] == [1, 3]
    raw = json.loads(store.path(config, 1).read_text())
    assert raw["schema"] == SCHEMA and raw["hash"] == config.hash


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("content", "message"),
    [
        ("{", "is not a valid record"),
        ("{}", "is not a valid record .without config, matrix, schema, seed, status"),
        ("[]", "is not a valid record .not a JSON object"),
        ("caf\xe9", "is not a valid record .'utf-8' codec"),
        (json.dumps({"schema": "x"}), "is not a valid record .schema='x' must be a whole number"),
        (json.dumps({"schema": 1, "config": {}}), "is not a valid record .without matrix, seed"),
        (json.dumps({"schema": 1, "config": [], "seed": 0, **RESULTS}), "is not a valid record"),
        (json.dumps({"schema": 1, "config": {}, "seed": "x", **RESULTS}), "is not a valid record .seed='x' must be"),
        (json.dumps({"schema": 1, "config": {}, "seed": 0, "matrix": {"correct": [[11]], "total": [10]}}), "11 right"),
        (json.dumps({"schema": 1, "config": {}, "seed": 0, "matrix": 3}), "is not a valid record"),
        (json.dumps({"schema": 1, "config": {}, "seed": 0, **RESULTS, "matrix_running": {}}), "is not a valid record"),
        (json.dumps({"schema": 99}), "is a record of schema 99.*Upgrade contnorm"),
    ],
)
def test_invalid_file_is_named_in_the_error(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "0.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message) as raised:
        Store(tmp_path).load(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


def test_invalid_record_does_not_hide_others(tmp_path: Path) -> None:
    store, config = Store(tmp_path), RunConfig()
    for seed in (0, 1, 10, 2):
        store.save(config, seed, RESULTS)
    store.path(config, 1).write_text("{")
    for loaded in (store.load_all(), store.search(config.hash[:4]), store.search(str(tmp_path))):
        assert [record.seed for record in loaded.records] == [0, 2, 10]
        assert len(loaded.problems) == 1 and "1.json: is not a valid record" in loaded.problems[0]
        assert loaded.problems[0].endswith("Delete it to run it again.")
    with pytest.raises(UserError, match=r"1\.json: is not a valid record"):
        store.find(config.hash)


def test_search_in_a_folder_of_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    configs = [RunConfig(), RunConfig(norm=NormConfig("cn"))]
    for config in configs:
        store.save(config, 0, RESULTS)
    loaded = Store(tmp_path / "elsewhere").search(str(tmp_path / "runs"))
    assert {record.config.hash for record in loaded.records} == {config.hash for config in configs}
    assert len(Store(tmp_path).search(str(tmp_path / "runs" / configs[0].hash)).records) == 1
    with pytest.raises(UserError, match=r"2 runs: \w+, \w+\."):
        store.find(str(tmp_path / "runs"))


def test_search_for_a_missing_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished run 'abc'"):
        Store(tmp_path).find("abc")


def write_note(store: Store, config: RunConfig, seed: int, reason: str, schema: int = 2) -> Path:
    """A divergence note as schemas 1 and 2 wrote it, instead of a record."""
    identity = {} if schema == 1 else {"hash": config.hash, "seed": seed}
    content = {"schema": schema, **identity, "lost": reason}
    path = store.path(config, seed).with_name(f"{seed}.lost.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content if schema == 1 else content | {"seal": seal_of(content)}))
    return path


def save_diverged(store: Store, config: RunConfig, seed: int, reason: str) -> Path:
    return store.save_diverged(config, seed, reason, {"commit": "c0ffee"})


def note_1(store: Store, config: RunConfig, seed: int, reason: str) -> Path:
    return write_note(store, config, seed, reason, schema=1)


@pytest.mark.parametrize("save", [save_diverged, write_note, note_1])
def test_diverged_seeds_are_listed_apart_from_records(tmp_path: Path, save: Any) -> None:
    """A seed that finished after all is not among them."""
    config, other, store = RunConfig(), from_dict({"train": {"lr": 0.5}}), Store(tmp_path)
    save(store, config, 0, "seed 0: an earlier try.")
    store.save(config, 0, RESULTS)
    save(store, config, 10, "seed 10: the loss is nan.")
    save(store, config, 2, "seed 2: the loss is inf.")
    save(store, other, 1, "seed 1: the loss is inf.")
    expected = {2: "seed 2: the loss is inf.", 10: "seed 10: the loss is nan."}
    loaded = store.load_all()
    assert loaded.problems == [] and [record.seed for record in loaded.records] == [0]
    assert loaded.diverged == {config.hash: expected, other.hash: {1: "seed 1: the loss is inf."}}
    assert store.find_one(config.hash).diverged == {config.hash: expected} and list(expected) == [2, 10]
    assert store.diverged_seeds(config) == expected and list(store.diverged_seeds(config)) == [2, 10]
    assert store.seeds(config, range(11)) == {0} and not store.is_diverged(config, 0) and store.is_diverged(config, 2)
    assert [record.seed for record in store] == [0]


def test_diverged_record_is_sealed_and_has_status_reason_and_environment(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save_diverged(RunConfig(), 1, "seed 1: the loss is nan. " + "x" * 5000, {"commit": "c0ffee"})
    raw = json.loads(path.read_text())
    assert path == store.path(RunConfig(), 1) and raw["seal"] == seal_of(raw) and raw["commit"] == "c0ffee"
    assert (raw["schema"], raw["status"], len(raw["reason"])) == (3, "diverged", 2000) and "matrix" not in raw
    (run,) = store.load_all().diverged_runs
    assert (run.config, run.hash, run.seed, run.status) == (RunConfig(), RunConfig().hash, 1, "diverged")
    with pytest.raises(UserError, match=r"1\.json: has no scores.* diverged\. seed 1: the loss is nan"):
        store.load(path)


def test_diverged_record_does_not_replace_a_finished_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(RunConfig(), 1, RESULTS)
    assert json.loads(path.read_text())["status"] == "finished"
    store.save_diverged(RunConfig(), 1, "seed 1: the loss is nan.")
    assert store.has(RunConfig(), 1) and store.load(path).status == "finished"


@pytest.mark.parametrize("values", [{"status": "ok"}, {"reason": 3}, {"reason": "changed"}, {"hash": "x"}])
def test_invalid_diverged_record_is_a_problem(tmp_path: Path, values: dict[str, object]) -> None:
    """As an invalid record of a finished run, it counts as recorded until it is deleted."""
    store = Store(tmp_path)
    path = store.save_diverged(RunConfig(), 1, "seed 1: the loss is nan.")
    (_changed if values == {"reason": "changed"} else _reseal)(path, **values)
    loaded = store.load_all()
    assert loaded.diverged == {} and len(loaded.problems) == 1 and loaded.problems[0].startswith(f"{path}: ")
    assert store.has(RunConfig(), 1) and not store.is_diverged(RunConfig(), 1)


def test_unreadable_divergence_note_counts_as_diverged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_note(store, RunConfig(), 2, "seed 2: the loss is inf.").write_text("{")
    loaded = store.load_all()
    assert loaded.diverged == {RunConfig().hash: {2: ""}} and len(loaded.problems) == 1
    assert "2.lost.json" in loaded.problems[0]


@pytest.mark.parametrize("save", [save_diverged, write_note, note_1])
def test_search_for_a_diverged_run_gives_the_reason(tmp_path: Path, save: Any) -> None:
    """By its hash, by its folder and by its file."""
    store = Store(tmp_path)
    path = save(store, RunConfig(), 1, "seed 1: the loss is nan.")
    for query in (RunConfig().hash, str(path.parent), str(path)):
        with pytest.raises(UserError, match=r"has no scores.* diverged\. seed 1: the loss is nan"):
            store.find(query)


def test_spread_over_seeds() -> None:
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


def test_record_is_sealed_unless_of_schema_1(tmp_path: Path) -> None:
    store, config = Store(tmp_path), RunConfig()
    path = store.save(config, 0, {**RESULTS, "parts": (1, 2), "by_task": {1: "a", 10: "b", 2: "c"}})
    assert store.load(path).sealed
    _unsealed(path)
    assert not store.load(path).sealed and store.load_all().problems == []


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
def test_changed_record_does_not_match_its_seal(tmp_path: Path, values: dict[str, object]) -> None:
    store = Store(tmp_path)
    for seed in (0, 1):
        _changed(path := store.save(RunConfig(), seed, RESULTS), **(values if seed else {}))
    assert [record.seed for record in store.load_all().records] == [0]
    with pytest.raises(UserError, match=r"1\.json: .*seal"):
        store.load(path)


def test_record_without_its_seal_is_invalid(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(RunConfig(), 0, RESULTS)
    _unsealed(path, schema=SCHEMA)
    with pytest.raises(UserError, match="without seal"):
        store.load(path)


@pytest.mark.parametrize("write", [_reseal, _unsealed])
def test_settings_with_another_hash_are_invalid(tmp_path: Path, write: Any) -> None:
    store, other = Store(tmp_path), from_dict({"train": {"lr": 0.5}})
    path = store.save(RunConfig(), 0, RESULTS)
    write(path, config=other.as_dict())
    with pytest.raises(UserError, match=f"its hash is '{RunConfig().hash}', but that of its settings is {other.hash}"):
        store.load(path)
    write(path, config=RunConfig().as_dict(), hash=None)
    with pytest.raises(UserError, match="its hash is None"):
        store.load(path)


@pytest.mark.parametrize("write", [_reseal, _unsealed])
def test_record_with_wrong_folder_or_file_name_is_invalid(tmp_path: Path, write: Any) -> None:
    store, other = Store(tmp_path), from_dict({"train": {"lr": 0.5}})
    write(path := store.save(RunConfig(), 0, RESULTS))
    moved = [store.path(other, 0), store.path(RunConfig(), 7), path.with_name("00.json"), tmp_path / "mine" / "0.json"]
    for place in moved:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(path.read_bytes())
    loaded = store.load_all()
    assert [record.path for record in loaded.records] == [path]
    assert len(loaded.problems) == 4 and all(
        any(str(place) in message for message in loaded.problems) for place in moved
    )


def test_copy_outside_a_runs_folder_may_have_any_name(tmp_path: Path) -> None:
    """Its names are checked under a folder of runs; its seal and its hash everywhere."""
    store = Store(tmp_path / "runs")
    path = store.save(RunConfig(), 3, RESULTS)
    copies = [tmp_path / "copy.json", tmp_path / "best" / "0.json", path.parent / "copy.json"]
    for place in copies:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(path.read_bytes())
        assert [record.seed for record in store.search(str(place)).records] == [3]
    assert [record.seed for record in store.search(str(tmp_path / "best")).records] == [3]
    _changed(copies[0], seed=4)
    with pytest.raises(UserError, match="does not match its seal"):
        store.search(str(copies[0]))


def test_linked_and_current_folder_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Store(tmp_path / "runs").save(RunConfig(), 0, RESULTS)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "first").symlink_to(path.parent)
    assert len(Store(tmp_path / "links").load_all().records) == 1
    monkeypatch.chdir(path.parent)
    assert len(Store(tmp_path).search(".").records) == 1


def test_divergence_note_of_another_run_is_ignored(tmp_path: Path) -> None:
    store, other = Store(tmp_path), from_dict({"train": {"lr": 0.5}})
    note = write_note(store, RunConfig(), 1, "seed 1: the loss is nan.")
    copied = store.path(other, 2).with_name("2.lost.json")
    copied.parent.mkdir()
    copied.write_bytes(note.read_bytes())
    _changed(write_note(store, RunConfig(), 3, "seed 3: the loss is nan."), lost="another reason")
    loaded = store.load_all()
    assert loaded.diverged == {RunConfig().hash: {1: "seed 1: the loss is nan.", 3: ""}}
    assert store.diverged_seeds(other) == {}
    assert len(loaded.problems) == 2 and any(str(copied) in problem for problem in loaded.problems)


def test_seeds_with_different_shapes_are_dropped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        store.save(RunConfig(), seed, RESULTS)
    store.save(RunConfig(), 3, {"matrix": {"correct": [[5]], "total": [10]}})
    drift = [{"norm1": {"mean": 0.1, "var": 0.2}}]
    for seed, rows in ((4, drift), (5, drift), (6, drift * 2)):
        store.save(RunConfig(), seed, {**RESULTS, "drift": {"by_task": rows}})
    loaded = store.load_all()
    assert [record.seed for record in loaded.records] == [0, 1, 2, 4, 5]
    assert "3.json" in loaded.problems[0] and "accuracies of 1 tasks" in loaded.problems[0]
    assert "6.json" in loaded.problems[1] and "drift" in loaded.problems[1]


def test_seeds_with_max_steps_may_reach_different_tasks(tmp_path: Path) -> None:
    store, config = Store(tmp_path), from_dict({"train": {"max_steps": 3}})
    for seed, tasks in enumerate((1, 2, 2)):
        rows = [[5] * tasks for _ in range(tasks)]
        store.save(
            config, seed, {"matrix": {"correct": rows, "total": [10] * tasks}, "reached": {"tasks": tasks, "of": 5}}
        )
    assert len(store.load_all().records) == 3 and store.load_all().problems == []


def test_concurrent_writes_use_different_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two hosts, or in two containers, that write to one folder."""
    path, plain = tmp_path / "a.json", os.fsync

    def write_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", plain)
        write_atomically(path, b"of the other")

    monkeypatch.setattr(os, "fsync", write_meanwhile)
    write_atomically(path, b"mine")
    assert path.read_bytes() == b"mine" and list(tmp_path.iterdir()) == [path]


def test_atomic_write_does_not_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.txt"
    other.write_text("content")
    monkeypatch.setattr("contnorm.atomic_files.secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".run.json.guessed").symlink_to(other)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "run.json", b"{}")
    assert other.read_text() == "content" and not (tmp_path / "run.json").exists()
