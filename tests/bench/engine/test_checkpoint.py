"""Checkpoints: one checksum over tensors and progress, two on disk, and the older one where the newest is broken."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from contnorm.bench.engine.events import Finished
from contnorm.bench.engine.scheduler import resolve

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source, load_source
from contnorm.bench.engine import loop
from contnorm.bench.engine.checkpoint import Checkpoints, Packed, packed
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.trainer import Trainer
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return load_source("mnist", small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    root = small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)
    stream = {"name": "permuted-mnist", "train_per_task": 60, "tasks": 3}
    return resolve({"stream": stream, "norm": {"name": "cn"}, "strategy": {"name": "er"}}, root)


def write(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(packed({"weight": torch.full((3,), float(step))}), {"done": step, "tally": {"rows": [step]}})


def edit_progress(folder: Path, step: int) -> None:
    path = folder / f"{step}.json"
    path.write_text(path.read_text().replace(f'"done": {step}', f'"done": {step - 1}'))


def edit_tally(folder: Path, step: int) -> None:
    path = folder / f"{step}.json"
    path.write_text(path.read_text().replace(f'"rows": [{step}', f'"rows": [{step + 1}'))


def edit_tensor(folder: Path, step: int) -> None:
    path = folder / f"{step}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(ending: str) -> Callable[[Path, int], None]:
    def harm(folder: Path, step: int) -> None:
        path = folder / f"{step}.{ending}"
        path.write_bytes(path.read_bytes()[:-7])

    return harm


def take_tensors_of_the_other(folder: Path, step: int) -> None:
    older = min(folder.glob("*.safetensors"), key=lambda path: int(path.stem))
    (folder / f"{step}.safetensors").write_bytes(older.read_bytes())


def nest(folder: Path, step: int) -> None:
    (folder / f"{step}.json").write_text("[" * 100_000)


HARMS = [edit_progress, edit_tally, edit_tensor, cut("json"), cut("safetensors"), take_tensors_of_the_other, nest]


@pytest.mark.parametrize("harm", HARMS)
def test_changed_checkpoint_is_not_used(tmp_path: Path, harm: Callable[[Path, int], None]) -> None:
    write(Checkpoints(tmp_path), 10, 20)
    harm(tmp_path, 20)
    checkpoints = Checkpoints(tmp_path)
    latest = checkpoints.latest()
    assert latest is not None and latest.progress == {"done": 10, "tally": {"rows": [10]}}
    assert torch.equal(latest.tensors["weight"], torch.full((3,), 10.0))
    (problem,) = checkpoints.problems()
    assert problem.startswith("20.json")


def test_no_checkpoint_without_a_usable_file(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path), 10, 20)
    edit_progress(tmp_path, 10)
    edit_tensor(tmp_path, 20)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None and checkpoints.latest_step() == 0 and len(checkpoints.problems()) == 2


def test_last_two_checkpoints_remain(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1, 2, 3, 4, 4)
    (tmp_path / ".5.json.123").write_text("left by a process that was killed")
    write(checkpoints, 5)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{n}.{end}" for n in (4, 5) for end in ("json", "safetensors")
    }


def test_full_disk_keeps_one_checkpoint_and_writes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def limited(descriptor: int) -> None:
        if len(list(tmp_path.glob("*.safetensors"))) == 2 and os.readlink(f"/proc/self/fd/{descriptor}").count("safe"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    checkpoints = Checkpoints(tmp_path)
    monkeypatch.setattr(os, "fsync", limited)
    write(checkpoints, 1, 2, 3)
    assert Checkpoints(tmp_path).latest_step() == 3 and (tmp_path / "2.json").is_file()


def test_only_checkpoints_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("content")
    (tmp_path / "7.json.bak").write_text("content")
    (tmp_path / "99.json").symlink_to("/dev/zero")
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1, 2, 3)
    assert checkpoints.latest_step() == 3
    with suppress(OSError):  # the folder is not empty
        checkpoints.clear()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.json.bak", "notes.txt"]


def test_damaged_checkpoint_does_not_displace_a_usable_one(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path), 10, 20)
    edit_progress(tmp_path, 20)
    resumed = Checkpoints(tmp_path)
    assert resumed.latest() is not None
    write(resumed, 30)
    edit_tensor(tmp_path, 30)
    assert Checkpoints(tmp_path).latest_step() == 10


def test_checkpoint_of_another_run_is_not_used(tmp_path: Path) -> None:
    write(Checkpoints(tmp_path, "abc/0"), 10)
    assert Checkpoints(tmp_path, "abc/0").latest_step() == 10 and Checkpoints(tmp_path, "abc/1").latest_step() == 0
    assert "another run (abc/0)" in Checkpoints(tmp_path, "abc/1").problems()[0]


def old_format(folder: Path) -> None:
    """What version 0.1 wrote: the checksum is of the tensors alone."""
    for path in folder.glob("*.json"):
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({**raw["progress"], "sha256": raw["sha256"]}))


def edit_newest(folder: Path) -> None:
    edit_progress(folder, max(int(path.stem) for path in folder.glob("*.json")))


@pytest.mark.slow
@pytest.mark.parametrize(("harm", "words"), [(edit_newest, "resuming after step"), (old_format, "again from step 0")])
def test_use_of_an_older_checkpoint_is_reported(
    config: RunConfig,
    source: Source,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    words: str,
) -> None:
    def finished(lane: Trainer, checkpoints: Checkpoints | None = None) -> Any:
        *_, (_, last) = train_together([lane], [checkpoints])
        assert isinstance(last, Finished)
        return last.results["matrix"], last.results["drift"]

    expected = finished(Trainer(config, 0, source, CPU))
    lane = Trainer(config, 0, source, CPU)
    list(train_together([lane], [Checkpoints(tmp_path)], report_every=1, stop=lambda: lane.done == 8))
    harm(tmp_path)
    with caplog.at_level(logging.WARNING, "contnorm"):
        assert finished(Trainer(config, 0, source, CPU), Checkpoints(tmp_path)) == expected
    (message,) = caplog.messages
    assert words in message and str(tmp_path) in message and "\n" not in message


def test_required_checkpoints_are_written_on_a_slow_disk(
    config: RunConfig, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    save = Checkpoints.save

    def slow(checkpoints: Checkpoints, tensors: Packed, progress: dict[str, Any]) -> None:
        time.sleep(0.05)
        save(checkpoints, tensors, progress)
        written.append(progress["done"])

    monkeypatch.setattr(Checkpoints, "save", slow)
    lane = Trainer(config, 0, source, CPU)
    list(train_together([lane], [Checkpoints(tmp_path)], every=1))
    assert set(lane.plan.ends) <= set(written) and written == sorted(written)
    assert Checkpoints(tmp_path).latest_step() == lane.plan.ends[-1]


def test_checkpoints_on_a_gpu_are_seconds_apart(
    config: RunConfig, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that advances by four seconds at each question stands for slow steps, and this CPU for a GPU."""
    clock = itertools.count(0, 4)
    timer = loop._SaveTimer(torch.device("cuda"))
    timer.last = 0.0
    monkeypatch.setattr(timer, "_now", lambda: float(next(clock)))
    assert [timer.are_due() for _ in range(8)] == [False, False, False, True, False, False, True, False]
    assert all(loop._SaveTimer(CPU).are_due() for _ in range(3))
    written: list[int] = []
    save = Checkpoints.save
    monkeypatch.setattr(
        Checkpoints,
        "save",
        lambda this, packed, progress: (written.append(progress["done"]), save(this, packed, progress)),
    )
    monkeypatch.setattr(loop, "_SaveTimer", lambda device: timer)
    lane = Trainer(config, 0, source, CPU)
    list(train_together([lane], [Checkpoints(tmp_path)], every=1, stop=lambda: lane.done == 17, report_every=1))
    # 6 steps per task: questions after each step and at the end of each task; the last task is stopped before its end.
    assert written[-1] == 17 and 3 <= len(written) <= 8
    results = [_last_matrix(Trainer(config, 0, source, CPU), store) for store in (Checkpoints(tmp_path), None)]
    assert results[0] == results[1]


def _last_matrix(trainer: Trainer, checkpoints: Checkpoints | None) -> Any:
    *_, (_, last) = train_together([trainer], [checkpoints])
    assert isinstance(last, Finished)
    return last.results["matrix"]


def test_clear_removes_temporary_files_of_interrupted_writes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".7.safetensors.0a1b2c3d", ".7.json.12345678", "7.json"):
        (folder / name).touch()
    Checkpoints(folder).clear()
    assert not folder.exists()
