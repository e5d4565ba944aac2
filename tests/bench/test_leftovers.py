"""Leftovers of runs: what is listed and removed, and what never is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from contnorm.bench import clean, discard
from contnorm.bench.config.schema import RunConfig, from_dict
from contnorm.bench.engine.lock import RunLock
from contnorm.bench.records import Store
from contnorm.bench.unfinished import unfinished_runs
from contnorm.errors import UserError

CONFIG = from_dict({"norm": {"name": "cn"}, "train": {"lr": 0.1}})


def unfinished(runs: Path, config: RunConfig = CONFIG, seed: int = 0, note: bool = True, steps: int = 0) -> Path:
    """Folder of an unfinished run as a killed process leaves it."""
    folder = runs / config.hash / f"{seed}.unfinished"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / "lock.json").write_text('{"host": "a", "pid": 1}')
    if note:
        (folder / "run.json").write_text(json.dumps({"schema": 3, "config": config.as_dict(), "seed": seed}))
    for step in range(1, steps + 1):
        (folder / "checkpoints" / f"{step}.json").write_text("{}")
        (folder / "checkpoints" / f"{step}.safetensors").write_bytes(b"x" * 1000)
    (folder / "checkpoints" / ".9.json.0a1b2c3d").write_text("{")
    return folder


def record(runs: Path, seed: int = 0) -> Path:
    return Store(runs).save(CONFIG, seed, {"matrix": {"correct": [[1]], "total": [2]}})


def draft(path: Path, age: float = 7200) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{")
    os.utime(path, (time.time() - age,) * 2)
    return path


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_leftovers_are_removed_and_records_stay(tmp_path: Path) -> None:
    path = record(tmp_path)
    weights = path.with_suffix(".safetensors")
    weights.write_bytes(b"w")
    recorded = unfinished(tmp_path, seed=0, steps=2)
    empty = unfinished(tmp_path, seed=3, note=False)
    old = draft(path.parent / ".5.json.12ab34cd")
    index = draft(tmp_path / "..index.json.12ab34cd")
    archive = draft(tmp_path / ".all.jsonl.gz.12ab34cd")
    bare = tmp_path / "0123456789ab"
    bare.mkdir()
    listed = clean(tmp_path)
    expected = {recorded, empty, old, index, archive, bare}
    assert {one.path for one in listed.removable} == expected and not listed.removed and not listed.problems
    (largest,) = (one for one in listed.removable if one.path == recorded)
    assert "recorded" in largest.kind and largest.size >= 2000 and time.time() - largest.modified < 100
    assert all(path.exists() for path in expected), "nothing is removed without being asked to"
    done = clean(tmp_path, dry_run=False)
    assert set(done.removed) == expected and not done.problems
    assert files(tmp_path) == {path.parent.name, f"{path.parent.name}/0.json", f"{path.parent.name}/0.safetensors"}


def test_stopped_runs_stay_unless_named(tmp_path: Path) -> None:
    folders = [unfinished(tmp_path, seed=1, steps=3), unfinished(tmp_path, seed=2, note=False, steps=1)]
    started = unfinished(tmp_path, seed=4)
    listed = clean(tmp_path, dry_run=False)
    assert [one.path for one in listed.stopped] == [*folders, started] and not listed.removed
    assert [one.run.step for one in listed.stopped if one.run] == [3, 1, 0]
    assert all(folder.is_dir() for folder in folders)
    assert len(clean(tmp_path, stopped=True, dry_run=False).removed) == 3
    assert files(tmp_path) == set(), "the empty run folder is removed too"


def test_running_run_is_not_touched(tmp_path: Path) -> None:
    record(tmp_path)
    folder = unfinished(tmp_path, steps=1)
    before = files(tmp_path)
    lock = RunLock(folder / "lock")
    assert lock.acquire()
    listed = clean(tmp_path, stopped=True, dry_run=False)
    assert [one.path for one in listed.running] == [folder] and str(os.getpid()) in listed.running[0].kind
    assert not listed.removed and files(tmp_path) >= before
    lock.release()
    assert clean(tmp_path, dry_run=False).removed == [folder]


def test_run_that_starts_after_listing_is_not_touched(tmp_path: Path) -> None:
    folder = unfinished(tmp_path, steps=1)
    listed = clean(tmp_path)
    lock = RunLock(folder / "lock")
    assert lock.acquire()
    listed.remove(stopped=True)
    assert not listed.removed and "executes the run now" in listed.problems[0] and folder.is_dir()
    lock.release()


def test_run_that_changed_after_listing_is_not_removed(tmp_path: Path) -> None:
    folder = unfinished(tmp_path, note=False)
    listed = clean(tmp_path)
    (folder / "checkpoints" / "5.json").write_text("{}")
    listed.remove()
    assert not listed.removed and "has changed" in listed.problems[0] and folder.is_dir()


def test_checkpoints_of_a_damaged_record_stay(tmp_path: Path) -> None:
    path = record(tmp_path)
    folder = unfinished(tmp_path, steps=1)
    path.write_text(path.read_text()[:-30])
    listed = clean(tmp_path, dry_run=False)
    assert not listed.removed and [one.path for one in listed.stopped] == [folder]


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints/mine.bin", "checkpoints/deeper", "lock.d"])
def test_folder_with_foreign_files_stays(tmp_path: Path, name: str) -> None:
    record(tmp_path)
    folder = unfinished(tmp_path, steps=1)
    (folder / name).mkdir() if name.endswith(("deeper", ".d")) else (folder / name).write_text("mine")
    before = files(tmp_path)
    listed = clean(tmp_path, dry_run=False)
    assert name in listed.problems[0] and not listed.removed and files(tmp_path) == before


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    record(elsewhere)
    target = unfinished(elsewhere, steps=1)
    runs = tmp_path / "runs"
    record(runs)
    (runs / CONFIG.hash / "0.unfinished").symlink_to(target)
    (runs / "other").symlink_to(elsewhere)
    assert not clean(runs, stopped=True, dry_run=False).removed and target.is_dir()
    inside = unfinished(runs, seed=7, steps=1)
    (inside / "run.json").unlink()
    (inside / "run.json").symlink_to(target / "run.json")
    assert not clean(runs, stopped=True, dry_run=False).removed and inside.is_dir()


def test_other_files_are_no_leftovers(tmp_path: Path) -> None:
    for name in ("a/0.unfinished/run.json", ".hidden/0123456789ab/0.unfinished/lock", "notes/.a.json.12ab34cd"):
        draft(tmp_path / name)
    draft(tmp_path / CONFIG.hash / ".5.json.12ab34cd", age=10)
    draft(tmp_path / CONFIG.hash / ".5.txt.12ab34cd")
    draft(tmp_path / CONFIG.hash / "5.lost.json")
    (tmp_path / "empty").mkdir()
    before = files(tmp_path)
    listed = clean(tmp_path, stopped=True, dry_run=False)
    assert not listed.removable and not listed.stopped and files(tmp_path) == before


def test_subfolders_and_single_runs_are_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "table3")
    folder = unfinished(tmp_path / "table3", steps=1)
    assert [one.path for one in clean(tmp_path).removable] == [folder]
    monkeypatch.chdir(folder.parent)
    assert len(clean(".").removable) == len(clean("0.unfinished").removable) == 1
    assert clean("0.unfinished", dry_run=False).removed and not folder.exists()


def test_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        clean(tmp_path / "nothing")


def test_unfinished_runs_are_listed_with_their_settings(tmp_path: Path) -> None:
    record(tmp_path, seed=0)
    unfinished(tmp_path, seed=0, steps=1)
    unfinished(tmp_path, seed=1, steps=4)
    unfinished(tmp_path, seed=2, note=False)
    broken = unfinished(tmp_path, seed=3, steps=2)
    (broken / "run.json").write_text("{")
    lock = RunLock(broken / "lock")
    assert lock.acquire()
    runs = unfinished_runs(tmp_path)
    lock.release()
    assert [(run.seed, run.step, run.status) for run in runs] == [(1, 4, "stopped"), (3, 2, "running")]
    assert runs[0].config == CONFIG and runs[0].hash == CONFIG.hash and runs[1].config is None
    assert [run.seed for run in unfinished_runs(tmp_path / CONFIG.hash)] == [1, 3]


def test_discard_removes_the_given_seeds_and_keeps_records(tmp_path: Path) -> None:
    path = record(tmp_path, seed=4)
    other = unfinished(tmp_path, from_dict({"norm": {"name": "bn"}}), seed=0, steps=1)
    folders = [unfinished(tmp_path, seed=seed, steps=2) for seed in (0, 1, 10)]
    assert discard(tmp_path, CONFIG, seeds=[0, 1]).removed == folders[:2]
    assert folders[2].is_dir() and other.is_dir() and path.is_file(), "seed 10 is not seed 1"
    assert discard(tmp_path, CONFIG.hash).removed == folders[2:]
    assert path.is_file() and other.is_dir()


def test_discard_with_records_removes_records_and_weights(tmp_path: Path) -> None:
    path, kept = record(tmp_path, seed=0), record(tmp_path, seed=1)
    path.with_suffix(".safetensors").write_bytes(b"w")
    path.with_name("notes.txt").write_text("mine")
    unfinished(tmp_path, seed=0, steps=1)
    assert not discard(tmp_path, CONFIG, seeds=[0], records=True).problems
    assert files(tmp_path) == {path.parent.name, f"{path.parent.name}/1.json", f"{path.parent.name}/notes.txt"}
    assert kept.is_file()


def test_discard_keeps_a_run_that_a_process_executes(tmp_path: Path) -> None:
    folder, path = unfinished(tmp_path, steps=1), record(tmp_path)
    lock = RunLock(folder / "lock")
    assert lock.acquire()
    discarded = discard(tmp_path, CONFIG, records=True)
    assert [one.path for one in discarded.running] == [folder] and not discarded.removed and path.is_file()
    lock.release()


def test_discard_of_settings_that_are_no_hash(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"settings='\.\.'.*hash"):
        discard(tmp_path, "..")
    assert not discard(tmp_path, CONFIG).removed


def test_discard_takes_a_list_of_seeds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"seeds=0: use a list of seeds"):
        discard(tmp_path, CONFIG, seeds=0)  # type: ignore[arg-type]
