"""Runs beside each other: in processes on a CPU, as lanes of several settings; each gives the bits it gives alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contnorm.bench.engine.events import Finished, Stopped
from contnorm.bench.engine.process_pool import run_in_processes
from contnorm.bench.engine.scheduler import Job, RunEnvironment, execute, resolve, stopped_runs

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import process_pool as processes
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.records import Store
from contnorm.bench.signals import child_processes
from contnorm.bench.streams.image_store import DeviceImages
from contnorm.errors import UserError
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def settings(root: Path, **groups: dict[str, Any]) -> RunConfig:
    stream = {"name": "permuted-mnist", "train_per_task": 60, "tasks": 3}
    return resolve({"stream": stream, "norm": {"name": "cn"}, "strategy": {"name": "er"}, **groups}, root)


def results(folder: Path) -> dict[tuple[str, int], Any]:
    return {(r.config.hash, r.seed): (r.raw["matrix"], r.raw["drift"]) for r in Store(folder)}


@pytest.mark.slow
def test_processes_equal_sequential_runs_bitwise(root: Path, tmp_path: Path) -> None:
    jobs = [Job(settings(root, norm={"name": norm}), seed) for norm in ("bn", "cn") for seed in (0, 1)]
    list(execute(jobs, RunEnvironment(tmp_path / "alone", root, CPU)))
    events = list(execute(jobs, RunEnvironment(tmp_path / "beside", root, CPU, lanes=2)))
    assert {event.job for event in events if isinstance(event.what, Finished)} == set(jobs)
    assert results(tmp_path / "beside") == results(tmp_path / "alone") and len(results(tmp_path / "alone")) == 4
    assert {record.raw["device"]["threads"] for record in Store(tmp_path / "beside")} == {1}


@pytest.mark.slow
def test_stopped_processes_resume_bit_exactly(root: Path, tmp_path: Path) -> None:
    jobs = [Job(settings(root), seed) for seed in range(3)]
    place = RunEnvironment(tmp_path, root, CPU, lanes=2)
    asked: list[bool] = []
    events = []
    for event in execute(jobs, place, stop=lambda: bool(asked)):
        events.append(event.what)
        asked.append(True)
    assert any(isinstance(what, Stopped) for what in events) or len(results(tmp_path)) == 3
    assert len(stopped_runs(tmp_path).runs) + len(results(tmp_path)) == 3
    list(execute([left.job for left in stopped_runs(tmp_path).runs], place))
    assert len(results(tmp_path)) == 3 and not stopped_runs(tmp_path).runs


def test_invalid_settings_start_no_process(root: Path, tmp_path: Path) -> None:
    bad = settings(root, norm={"name": "cn", "groups": 32})
    with pytest.raises(UserError, match="does not divide the 100 channels"):
        list(execute([Job(bad, 0), Job(bad, 1)], RunEnvironment(tmp_path / "runs", root, CPU, lanes=2)))
    assert not (tmp_path / "runs").exists()


def wrong(job: str, stop: Callable[[], bool]) -> Iterator[str]:
    yield f"begun {job}"
    if job == "mistake":
        raise UserError("a mistake of yours")
    if job == "bug":
        raise KeyError("a bug of ours")
    if job == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "quits":
        sys.exit(0)
    if job == "gone":
        os._exit(0)
    if job == "deaf":
        time.sleep(200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "error", "said"),
    [
        ("mistake", UserError, "a mistake of yours"),
        ("bug", RuntimeError, r"(?s)in a worker process:.*in wrong.*KeyError: 'a bug of ours'"),
        ("quits", RuntimeError, r"(?s)in a worker process:.*in wrong.*SystemExit: 0"),
        ("gone", UserError, r"ended by itself \(exit code 0\)"),
        ("killed", UserError, r"ended by a signal \(exit code -9\).*fewer lanes"),
    ],
)
def test_worker_errors_are_reported(job: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        list(run_in_processes(wrong, [job], 1, stop=lambda: False))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "error"), [(0.5, UserError), (100, KeyboardInterrupt)])
def test_unresponsive_worker_is_killed(
    monkeypatch: pytest.MonkeyPatch, limit: float, error: type[BaseException]
) -> None:
    """When another fails it is for a while, when a person insists not at all."""
    monkeypatch.setattr(processes, "LAST_WORDS", limit)
    begun: list[str] = []

    def insisting() -> bool:
        if error is KeyboardInterrupt and begun:
            raise KeyboardInterrupt
        return False

    jobs = ["deaf"] if error is KeyboardInterrupt else ["deaf", "mistake"]
    started = time.monotonic()
    with pytest.raises(error):
        begun.extend(run_in_processes(wrong, jobs, 2, insisting))
    assert time.monotonic() - started < 60 and not child_processes


@pytest.mark.slow
def test_killed_parent_leaves_no_worker_and_loses_nothing(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "contnorm", "run", "--data-root", str(root), "--norm", "cn", "--seeds", "2"]
    command += ["--lanes", "2", "--set", "stream.train_per_task=400", "--set", "stream.tasks=12"]
    with subprocess.Popen([*command, "--runs", str(tmp_path / "killed")], stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and process.poll() is None:
            if list((tmp_path / "killed").rglob("checkpoints/*.json")):
                break
            time.sleep(0.02)
        process.kill()
    left = [run.job for run in stopped_runs(tmp_path / "killed").runs]
    assert left, "the runs were over before they could be killed"
    _wait_until_nothing_changes(tmp_path / "killed")
    list(
        execute(
            [run.job for run in stopped_runs(tmp_path / "killed").runs], RunEnvironment(tmp_path / "killed", root, CPU)
        )
    )
    list(execute(left, RunEnvironment(tmp_path / "whole", root, CPU)))
    found, whole = results(tmp_path / "killed"), results(tmp_path / "whole")
    assert all(found[key] == value for key, value in whole.items())


def _wait_until_nothing_changes(folder: Path) -> None:
    """The processes see that their parent is gone within a few steps, save, and end."""
    before: set[Path] = set()
    while (now := set(folder.rglob("*"))) != before:
        before = now
        time.sleep(1)


@pytest.mark.slow
def test_lanes_of_different_settings_train_together(root: Path) -> None:
    source = load_source("mnist", root)
    configs = [
        settings(root, norm={"name": "bn"}),
        settings(root, norm={"name": "cn"}, train={"lr": 0.1}),
        settings(root, strategy={"name": "derpp"}),
        settings(root, strategy={"name": "single"}, model={"width": 48}),
    ]
    together, alone = ([Trainer(config, 0, source, CPU) for config in configs] for _ in range(2))
    found = [what.results["matrix"] for _, what in train_together(together) if isinstance(what, Finished)]
    for lane, matrix, beside in zip(alone, found, together, strict=True):
        *_, (_, last) = train_together([lane])
        assert isinstance(last, Finished) and last.results["matrix"] == matrix
        assert all(torch.equal(tensor, beside.state()[name]) for name, tensor in lane.state().items())


def test_prefetched_images_give_the_same_run(root: Path) -> None:
    config, source = settings(root, strategy={"name": "derpp", "replay_from": "all"}), load_source("mnist", root)
    whole, brought = (Trainer(config, 0, source, CPU, DeviceImages.of(source, CPU, whole)) for whole in (True, False))
    found = []
    for lane in (whole, brought):
        *_, (_, last) = train_together([lane])
        assert isinstance(last, Finished)
        found.append((last.results["matrix"], last.results["drift"]))
    assert found[0] == found[1]
    assert all(torch.equal(tensor, brought.state()[name]) for name, tensor in whole.state().items())
