"""A request to stop is acknowledged and obeyed in every phase of a run, and the resumed run has the same bits."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.signals import StopRequested, StopSignals, raise_on_stop
from tests.bench.engine.stopped_runs import results, same_state, train
from tests.datasets import small_mnist

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def settings(root: Path, **groups: dict[str, Any]) -> RunConfig:
    stream = {"name": "permuted-mnist", "train_per_task": 40, "tasks": 2}
    return resolve({"stream": stream, "norm": {"name": "bn"}, "strategy": {"name": "er"}, **groups}, root)


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["running", "oracle"])
def test_signal_at_any_batch_and_resume_is_bitwise_equal(
    root: Path, tmp_path: Path, moments: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of an evaluation, of re-estimation and of the look ahead, with two lanes side by side."""
    config = settings(root, evaluate={"ahead": True, "moments": moments})
    source = load_source("mnist", root)

    def lanes() -> list[Trainer]:
        return [Trainer(config, seed, source, CPU) for seed in (0, 1)]

    whole = lanes()
    expected = results(whole)
    ends = set()
    for forward_passes in range(0, 60, 5):
        places = [tmp_path / f"{forward_passes}-{seed}" for seed in (0, 1)]
        first, passes = lanes(), itertools.count()

        def count(*_: object, passes: Any = passes, at: int = forward_passes) -> None:
            if next(passes) == at:
                signal.raise_signal(signal.SIGTERM)

        first[0].model.register_forward_pre_hook(count)
        with StopSignals(announce=False) as signals:
            events = train(first, places, stop=lambda signals=signals: bool(signals))
        ends.add((events[-1].kind, events[-1].done))
        again = lanes()
        found = results(again, places)
        for key in ("matrix", "matrix_running", "drift"):
            assert [one.get(key) for one in found] == [one.get(key) for one in expected]
        assert all(same_state(*pair) for pair in zip(whole, again, strict=True))
    assert ("stopped", 0) in ends and len(ends) > 3


def test_slow_steps_stop_before_the_next_report(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contnorm.bench.engine.loop.STOP_INTERVAL", 0.0)
    lane = Trainer(settings(root), 0, load_source("mnist", root), CPU)
    *_, last = train([lane], [tmp_path], stop=lambda: lane.done == 2)
    assert (last.kind, last.done, last.saved) == ("stopped", 2, 2)


SLOW = """
import os, time
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        if not self.training and len(x) > 2:  # not where the network is tried out
            open(os.environ["MARKER"], "a").close()
            time.sleep(0.3)
        return x

def make(shape, outputs, norm):
    first = [nn.Conv2d(shape[0], 8, 3, 2), norm(8), nn.ReLU()]
    return nn.Sequential(*first, *[Slow() for _ in range(1000)], nn.Flatten(), nn.Linear(8 * 13 * 13, outputs))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "more"),
    [
        (signal.SIGINT, []),
        (signal.SIGTERM, ["--seeds", "2", "--lanes", "2"]),
        (signal.SIGINT, ["--set", "evaluate.ahead=true"]),
    ],
)
def test_signal_during_an_evaluation_stops_the_run(
    root: Path, tmp_path: Path, number: signal.Signals, more: list[str]
) -> None:
    """An evaluation takes five minutes here. The whole process group gets the signal, as at a terminal."""
    (tmp_path / "net.py").write_text(SLOW)
    command = [sys.executable, "-m", "contnorm", "run", "--data-root", str(root), "--runs", str(tmp_path / "runs")]
    command += ["--norm", "bn", "--set", "stream.train_per_task=40", "--set", f"model.name={tmp_path / 'net.py'}:make"]
    environment = {**os.environ, "MARKER": str(tmp_path / "marker")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([*command, *more], env=environment, **pipes) as process:  # type: ignore[call-overload]
        _wait_for(tmp_path / "marker", process)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 128 + number, err
    assert err.count("\n") == 1 and "stopping" in err
    ahead = "evaluate.ahead=true" in more
    assert f"stopped after {0 if ahead else 4} of 20 steps" in out
    assert bool(list(tmp_path.rglob("checkpoint.safetensors"))) is not ahead


def _wait_for(marker: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 100
    while not marker.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.4)  # into the first layers


def test_reading_data_is_interrupted(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        pytest.fail("was not interrupted")

    jobs = [Run(settings(root), 0)]
    monkeypatch.setattr("contnorm.bench.engine.run.load_source", slow)
    with StopSignals() as signals:
        assert list(execute(jobs, RunOptions(runs=tmp_path / "runs", data_root=root), stop=lambda: bool(signals))) == []
    assert signals.received == [signal.SIGTERM] and not (tmp_path / "runs").exists()


def test_signal_before_interruptible_work(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StopRequested), raise_on_stop():
            pytest.fail("began")
    assert "stopping" in capfd.readouterr().err


def test_second_signal_interrupts() -> None:
    with StopSignals(announce=False) as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signals.received == [signal.SIGTERM, signal.SIGINT]


def test_handlers_are_restored() -> None:
    def mine(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGINT, mine)
    try:
        with StopSignals(), StopSignals() as inner:
            os.kill(os.getpid(), signal.SIGINT)
            assert inner.received == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
