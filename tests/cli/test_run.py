"""`contnorm run` and `contnorm resume`: progress, signals, and exit codes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.progress
import torch
from rich.console import Console

from contnorm.bench.api import execution as running
from contnorm.bench.api.execution import RunOptions
from contnorm.bench.config.defaults import varying
from contnorm.bench.config.resolve import resolve
from contnorm.bench.data import progress as data_progress
from contnorm.bench.data.progress import load_with_progress
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import Store
from contnorm.cli.main import COMMANDS, load_command
from contnorm.cli.run import resume_all, run_seeds
from contnorm.cli.show import show_scores
from contnorm.errors import UserError
from tests.cli.terminal import exit_code, printed
from tests.datasets import small_mini_imagenet, small_mnist

CPU = torch.device("cpu")
VALUES: dict[str, Any] = {
    "stream": {"name": "permuted-mnist", "train_per_task": 60, "tasks": 2},
    "norm": {"name": "bn"},
    "strategy": {"name": "single"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def jobs(root: Path, seeds: int = 2) -> list[Run]:
    return [Run(resolve(VALUES, root), seed) for seed in range(seeds)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_before_first_run_exits_130(
    root: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    def nothing_begun(*given: object, **more: object) -> Iterator[Event]:
        os.kill(os.getpid(), number)
        yield from ()

    monkeypatch.setattr(running, "execute", nothing_begun)
    assert exit_code(jobs(root, 3), RunOptions(runs=tmp_path, data_root=root), console) == code
    assert "not started: 3 of 3 runs. Run it again" in printed(console), "resume would not know of them"
    assert run_seeds(VALUES, [0], RunOptions(), root, tmp_path, console) == code
    assert "ACC" not in printed(console), "no table of what is not there"


def test_signal_after_last_run_exits_0(
    root: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def then_stopped(*given: Any, **more: Any) -> Iterator[Event]:
        yield from execute(given[0], given[1])
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(running, "execute", then_stopped)
    assert exit_code(jobs(root), RunOptions(runs=tmp_path, data_root=root), console) == 0


@pytest.mark.parametrize(
    ("numbers", "code"),
    [
        ((signal.SIGINT, signal.SIGINT), 130),
        ((signal.SIGTERM, signal.SIGTERM), 143),
        ((signal.SIGINT, signal.SIGTERM), 143),
        ((signal.SIGTERM, signal.SIGINT), 130),
    ],
)
def test_second_signal_stops_at_once(
    root: Path,
    tmp_path: Path,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[signal.Signals, ...],
    code: int,
) -> None:
    def deaf(*given: object, **more: object) -> Iterator[Event]:
        for number in numbers:
            os.kill(os.getpid(), number)
        pytest.fail("went on after the second signal")
        yield from ()

    before = [signal.getsignal(number) for number in numbers]  # may be ignored, such as in the background
    monkeypatch.setattr(running, "execute", deaf)
    assert exit_code(jobs(root), RunOptions(runs=tmp_path, data_root=root), console) == code
    assert "stopped at once; the last checkpoints are kept. Continue with: contnorm" in printed(console)
    assert [signal.getsignal(number) for number in numbers] == before


def test_runs_in_another_thread_install_no_handlers(root: Path, tmp_path: Path, console: Console) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def work() -> None:
        seen.append(exit_code(jobs(root, 1), RunOptions(runs=tmp_path, data_root=root), console))
        seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, before] and len(list(Store(tmp_path))) == 1


def test_no_scores_are_printed_without_records(console: Console) -> None:
    show_scores([], console)
    assert printed(console) == "" and varying([]) == set()


def stop_one(root: Path, runs: Path, threads: int = 1) -> None:
    *_, event = execute(jobs(root, 1), RunOptions(runs=runs, data_root=root, threads=threads), stop=lambda: True)
    assert isinstance(event.what, Stopped)


def test_resume_uses_folder_and_options_of_each_run(root: Path, tmp_path: Path, console: Console) -> None:
    stop_one(root, tmp_path / "a", threads=2)
    stop_one(root, tmp_path / "b")
    assert resume_all(tmp_path, RunOptions(), root, console) == 0
    for name, threads in (("a", 2), ("b", 1)):
        (record,) = Store(tmp_path / name)
        assert record.raw["device"]["threads"] == threads
    assert not list(tmp_path.rglob("*.unfinished"))


def test_resume_with_other_threads(root: Path, tmp_path: Path, console: Console) -> None:
    stop_one(root, tmp_path / "a", threads=2)
    with pytest.raises(UserError, match="started with --device cpu --threads 2"):
        resume_all(tmp_path, RunOptions(threads=1), root, console)
    with pytest.raises(UserError, match="threads=0: use 1 or more"):
        resume_all(tmp_path, RunOptions(threads=0), root, console)
    assert len(stopped_runs(tmp_path).runs) == 1


def test_resume_of_gpu_runs_without_gpu_is_reported(
    root: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    stop_one(root, tmp_path / "a")
    (note,) = tmp_path.rglob("run.json")
    note.write_text(note.read_text().replace('"cpu"', '"cuda"'))
    with pytest.raises(UserError, match=r"1 stopped runs started on a GPU .--device cuda., and torch sees none here"):
        resume_all(tmp_path, RunOptions(), root, console)
    with pytest.raises(UserError, match=r"started with --device cuda --threads 1 and has \d+ steps"):
        resume_all(tmp_path, RunOptions(device="cpu"), root, console)


@pytest.mark.slow
def test_locked_run_does_not_block_others(root: Path, tmp_path: Path, console: Console) -> None:
    for name in ("a", "b"):
        stop_one(root, tmp_path / name)
    held = execute(jobs(root, 1), RunOptions(runs=tmp_path / "b", data_root=root))
    next(held)
    threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()  # the other run is over by then
    assert resume_all(tmp_path, RunOptions(), root, console) == 130, "waiting can be interrupted"
    held.close()
    assert f"waiting for process {os.getpid()} on " in printed(console)
    assert len(list(Store(tmp_path / "a"))) == 1 and not list(Store(tmp_path / "b"))


def test_failed_seeds_are_reported_in_order_and_others_shown(root: Path, tmp_path: Path, console: Console) -> None:
    """What is recorded already needs no second run to be shown."""
    values = VALUES | {"train": {"lr": 1e30}}
    found = {"matrix": {"correct": [[9, None], [9, 9]], "total": [10, 10]}}
    Store(tmp_path).save(resolve(values, root), 1, found)
    lost = r"^seed 0: the loss is \S+ at .* is too high for norm 'bn'\. seed 2: the loss is .* norm 'bn'\.$"
    with pytest.raises(UserError, match=lost):
        run_seeds(values, [2, 1, 0], RunOptions(lanes=1), root, tmp_path, console)
    assert "90.00" in printed(console)


def test_resume_reports_unusable_runs_and_finishes_others(
    root: Path, tmp_path: Path, console: Console, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        stop_one(root, tmp_path / name)
    (note,) = (tmp_path / "a").rglob("run.json")
    note.write_text("{")
    assert resume_all(tmp_path, RunOptions(), root, console) == 2
    (problem,) = caplog.messages
    assert problem.startswith(f"{note}: is not a valid note of a stopped run")
    assert len(list(Store(tmp_path / "b"))) == 1
    with pytest.raises(UserError, match="is not a valid note of a stopped run"):
        resume_all(tmp_path, RunOptions(), root, console)
    with pytest.raises(UserError, match="no stopped run under"):
        resume_all(tmp_path / "b", RunOptions(), root, console)


def stopped_at_once(given: list[Run], place: RunOptions, **more: object) -> Iterator[Event]:
    for event in execute(given, place, stop=lambda: True):
        if isinstance(event.what, Stopped):
            os.kill(os.getpid(), signal.SIGINT)
        yield event


def test_brackets_in_path_are_not_markup(root: Path, tmp_path: Path, console: Console) -> None:
    runs = tmp_path / "r[bold]x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "execute", stopped_at_once)
        assert exit_code(jobs(root, 1), RunOptions(runs=runs, data_root=root), console) == 130
    assert f"and saved. Continue with: contnorm resume '{runs}'" in printed(console)
    assert run_seeds(VALUES, [0], RunOptions(), root, runs, console) == 0
    assert f"recorded in {runs}" in printed(console)


@pytest.mark.slow
def test_signal_while_processes_start(root: Path, tmp_path: Path) -> None:
    """The whole group gets the signal, as at a terminal: no process shows a traceback, and nothing is lost."""
    command = [sys.executable, "-m", "contnorm", "run", "--data-root", str(root), "--runs", str(tmp_path / "runs")]
    command += ["--norm", "bn", "--seeds", "2", "--lanes", "2", "--set", "stream.train_per_task=400"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        deadline = time.monotonic() + 60
        while len(list(tmp_path.rglob("run.json"))) < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 130 and err.startswith("contnorm: stopping") and err.count("\n") == 1
    assert f"contnorm resume {tmp_path / 'runs'}" in out and "ACC" not in out
    assert len(stopped_runs(tmp_path).runs) == 2


def test_incomplete_data_is_refused_or_recorded_and_resume_remembers_it(
    root: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONTNORM_ALLOW_MISSING")
    with pytest.raises(UserError, match=r"69,500 of 70,000 images are missing .*--allow-missing"):
        run_seeds(VALUES, [0], RunOptions(), root, tmp_path / "refused", console)
    assert not list(tmp_path.rglob("*.json")), "nothing is left of a run that was refused"
    *_, event = execute(jobs(root, 1), RunOptions(runs=tmp_path, data_root=root, allow_missing=True), stop=lambda: True)
    assert isinstance(event.what, Stopped)
    assert resume_all(tmp_path, RunOptions(), root, console) == 0
    (record,) = Store(tmp_path)
    source = record.raw["source"]
    assert source["missing_images"] == 69_500 and source["images"] == 500 and source["published_images"] == 70_000
    assert "500 of the 70,000 published images of mnist" in printed(console)


def test_every_command_that_loads_data_takes_allow_missing() -> None:
    takes = {name for name in COMMANDS if any(p.name == "allow_missing" for p in load_command(name).params)}
    assert takes == {"run", "sweep", "resume", "diagnose", "paper", "tune", "data"}


def test_progress_bar_is_shown_while_images_are_decoded(tmp_path: Path) -> None:
    """With the display of the runs, as a terminal can have one display only; and not for data that is ready."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    small_mini_imagenet(tmp_path, per_class=2)
    with rich.progress.Progress(console=terminal) as bars:
        load_with_progress("mini-imagenet", tmp_path, terminal, bars=bars)
        assert not bars.tasks
    assert isinstance(terminal.file, io.StringIO) and "decoding pictures" in terminal.file.getvalue()
    (tmp_path / ".contnorm" / "mini-imagenet.json").unlink()
    load_with_progress("mini-imagenet", tmp_path, terminal)


def test_ctrl_c_while_data_is_loaded_exits_130(
    root: Path, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **more: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    monkeypatch.setattr(data_progress, "load_source", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert exit_code(jobs(root, 1), RunOptions(runs=tmp_path, data_root=root), console) == 130
    assert signal.getsignal(signal.SIGINT) is before
