"""From a list of runs to records: in this process, in several ones, stopped, killed and resumed."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from contnorm import bench
from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine import loop
from contnorm.bench.engine.execute import Work, execute, group_runs, plan_groups
from contnorm.bench.engine.launch import Processes
from contnorm.bench.engine.run import Event, Launcher, Run, RunOptions, list_devices
from contnorm.bench.records import Record, Store
from contnorm.bench.unfinished import unfinished_runs
from contnorm.errors import UserCodeError, UserError


def run_of(seed: int = 0, per_task: int = 60, **groups: Any) -> Run:
    stream = {"name": "split-mnist", "source": "digits", "tasks": 3, "train_per_task": per_task}
    return Run(resolve({"stream": stream, "strategy": {"name": "er"}, **groups}, Path("data")), seed)


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def bits(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.raw.items() if key not in ("seconds", "commit", "seal")}


def all_bits(folder: Path) -> list[dict[str, Any]]:
    return [bits(record) for record in Store(folder)]


def test_runs_are_recorded_once_and_leave_nothing_else(tmp_path: Path) -> None:
    runs, options = [run_of(0), run_of(1), run_of(0)], RunOptions(runs=tmp_path, keep_weights=True)
    events = list(execute(runs, options))
    assert kinds(events).count("finished") == 2 and events[0].kind == "started"
    assert events[0].provenance["versions"]["contnorm"] and kinds(events).count("task") == 6
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "0.json", "0.safetensors", "1.json", "1.safetensors",
    ]  # fmt: skip
    assert kinds(list(execute(runs, options))) == ["recorded", "recorded"]
    in_memory = {event.run: event for event in execute(runs, RunOptions()) if event.kind == "finished"}
    for record in Store(tmp_path):
        assert in_memory[Run(record.config, record.seed)].results["matrix"] == record.raw["matrix"]


@pytest.mark.slow
def test_processes_give_the_records_of_one_process(tmp_path: Path) -> None:
    runs = [run_of(seed, norm={"name": norm}) for norm in ("bn", "cn") for seed in (0, 1)]
    for name, launcher in (("one", None), ("two", Processes(2))):
        list(execute(runs, RunOptions(runs=tmp_path / name, launcher=launcher)))
    assert all_bits(tmp_path / "one") == all_bits(tmp_path / "two") and len(all_bits(tmp_path / "one")) == 4


def test_short_runs_are_not_sent_to_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def launch(self: Processes, *_: Any) -> Iterator[Event]:
        used.append(self.number)
        return iter([])

    monkeypatch.setattr(Processes, "launch", launch)
    options = RunOptions(runs=tmp_path, lanes=2)
    assert "finished" in kinds(list(execute([run_of(0), run_of(1)], options))) and not used
    long = [run_of(seed, model={"name": "resnet18"}, per_task=500, train={"passes": 9}) for seed in (0, 1)]
    with pytest.raises(UserError, match="without the end of 2 of 2 runs"):
        list(execute(long, options))
    assert used == [2]


@pytest.mark.parametrize("done", [1, 12, 20])
def test_stopped_run_is_resumed_bit_exactly(tmp_path: Path, done: int) -> None:
    run = run_of(per_task=200)
    whole, stopped = (RunOptions(runs=tmp_path / name) for name in ("whole", "stopped"))
    list(execute([run], whole))
    stopped = replace(stopped, log_every=1)
    reached: list[Event] = []
    stop = partial(bool, reached)
    for event in execute([run], stopped, stop=stop):
        reached += [event] if event.kind == "steps" and event.done >= done else []
    assert event.kind == "stopped" and event.saved == event.done == done
    (left,) = unfinished_runs(tmp_path / "stopped")
    assert (left.config, left.step, left.status) == (run.config, done, "stopped")
    (record,) = bench.resume(tmp_path / "stopped")
    assert bits(record) == all_bits(tmp_path / "whole")[0] and not unfinished_runs(tmp_path / "stopped")


def test_runs_stopped_around_an_evaluation_continue_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: checkpoints are not always written before an evaluation, and one group resumes both runs."""
    runs, whole, stopped = (
        [run_of(0), run_of(1)],
        RunOptions(runs=tmp_path / "whole"),
        RunOptions(runs=tmp_path / "two"),
    )
    list(execute(runs, whole))
    save = loop._Group.save
    for run, kind in zip(runs, ("steps", "task"), strict=True):
        reached: list[Event] = []
        monkeypatch.setattr(loop._Group, "save", lambda group, stopped=reached: save(group) if stopped else None)
        for event in execute([run], replace(stopped, log_every=6), stop=partial(bool, reached)):
            reached += [event] if event.kind == kind and event.done == 6 else []
        assert event.kind == "stopped" and event.done == 6
    assert kinds(list(Work(stopped)(runs, lambda: False))).count("finished") == 2
    assert all_bits(tmp_path / "two") == all_bits(tmp_path / "whole")


SCRIPT = """
import sys
from pathlib import Path
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.launch import Processes
from contnorm.bench.engine.run import RunOptions
from tests.bench.engine.test_execute import run_of

runs = [run_of(seed, per_task=800, train={"lr": 0.01}) for seed in (0, 1)]
options = RunOptions(runs=Path(sys.argv[1]), checkpoint_every=7, launcher=Processes(2))
for event in execute(runs, options):
    print(event.kind, event.run.seed, event.done, flush=True)
"""


@pytest.mark.slow
def test_killed_runs_are_resumed_bit_exactly(tmp_path: Path) -> None:
    """Processes of a killed parent end by themselves, and their locks with them."""
    runs = [run_of(seed, per_task=800, train={"lr": 0.01}) for seed in (0, 1)]
    list(execute(runs, RunOptions(runs=tmp_path / "whole")))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.startswith("steps"))
        assert len(list(itertools.islice(lines, 4))) == 4
        process.kill()
    events = list(execute(runs, RunOptions(runs=tmp_path / "killed")))
    assert kinds(events).count("finished") + kinds(events).count("recorded") == 2
    assert all_bits(tmp_path / "killed") == all_bits(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.unfinished"))


def test_another_process_is_waited_for(tmp_path: Path) -> None:
    run, options = run_of(), RunOptions(runs=tmp_path)
    first = execute([run], options)
    assert next(first).kind == "started"
    second = execute([run], options)
    waiting = next(second)
    assert waiting.kind == "waiting" and f"process {os.getpid()}" in waiting.why
    assert list(first)[-1].kind == "finished"
    assert kinds(list(second)) == ["recorded"]


def test_diverged_run_is_recorded_and_not_repeated(tmp_path: Path) -> None:
    run, options = run_of(train={"lr": 1e9}, norm={"name": "none"}), RunOptions(runs=tmp_path)
    list(execute([run, run_of()], options))
    events = list(execute([run, run_of()], options))
    assert kinds(events) == ["diverged", "recorded"] and "delete that to run it again" in events[0].why
    assert "Most likely the learning rate of 1000000000.0 is too high" in events[0].why
    assert not unfinished_runs(tmp_path)


def test_lanes_are_grouped_by_what_a_graph_needs() -> None:
    runs = [run_of(seed, norm={"name": norm}) for norm in ("bn", "cn") for seed in (0, 1)]
    other = run_of(train={"batch": 20})
    assert [len(group) for group in group_runs([*runs, other], 3)] == [3, 1, 1]
    longest = run_of(per_task=400)
    seconds = {**dict.fromkeys(runs, 1.0), longest: 5.0}
    assert plan_groups(seconds, RunOptions())[0] == (longest,)


class Failing(Launcher):
    """A launcher that loses the events."""

    remote = False

    def launch(self, work: Any, groups: Any, stop: Any) -> Iterator[Event]:
        yield from ()


def test_launcher_that_loses_runs_is_an_error() -> None:
    with pytest.raises(UserError, match="without the end of 1 of 1 runs"):
        list(execute([run_of()], RunOptions(launcher=Failing())))


BROKEN = """
import os, signal
from torch import nn

class Broken(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        if self.training:
            {action}
        return self.inner(x)

def make(shape, outputs, norm):
    return Broken(nn.Sequential(nn.Flatten(), nn.Linear(784, outputs)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [None, Processes(2)])
def test_error_of_user_code_is_one_line_and_leaves_nothing(tmp_path: Path, launcher: Launcher) -> None:
    file = tmp_path / "net.py"
    file.write_text(BROKEN.format(action="raise KeyError('a')"))
    runs = [run_of(seed, model={"name": f"{file}:make"}, norm={"name": "none"}) for seed in (0, 1)]
    with pytest.raises(UserCodeError, match=r"net\.py, line 11: KeyError: 'a'") as raised:
        list(execute(runs, RunOptions(runs=tmp_path / "runs", launcher=launcher)))
    assert "\n" not in str(raised.value) and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_killed_worker_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(BROKEN.format(action="os.kill(os.getpid(), signal.SIGKILL)"))
    runs = [run_of(seed, model={"name": f"{file}:make"}, norm={"name": "none"}) for seed in (0, 1)]
    with pytest.raises(UserError, match=r"a worker process ended \(exit code -9\).*fewer lanes"):
        list(execute(runs, RunOptions(runs=tmp_path / "runs", launcher=Processes(2))))


@pytest.mark.slow
def test_objects_are_sent_to_processes_or_the_runs_stay_here(caplog: pytest.LogCaptureFixture) -> None:
    class Net(nn.Sequential):
        """A class of no file that a worker could import."""

    def make(shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Net(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))

    stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
    here = bench.run(stream, model=make, norm="bn", seeds=2)
    there = bench.run(stream, model=make, norm="bn", seeds=2, launcher=Processes(2))
    np.testing.assert_array_equal(here.accuracy, there.accuracy)
    assert not caplog.messages
    lock = threading.Lock()
    bench.run(stream, model=lambda *shape: (lock, make(*shape))[1], norm="bn", seeds=2, launcher=Processes(2))
    assert "can't be sent to another process" in caplog.text


@pytest.mark.slow
def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "contnorm", "run", "--seeds", "2", "--set", "model.width=2000", "--runs", "runs"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 100
        while not list(tmp_path.rglob("lock")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT) and "stopping" in err  # a shell shows both as 130


@pytest.mark.parametrize("devices", ["0,x", [], [0, 0], -1, "2"])
def test_devices_that_are_not_there_are_refused(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="devices="):
        list_devices(devices)
    assert list_devices("all") == list_devices([0, 1]) == (0, 1) and list_devices("1") == (1,)
