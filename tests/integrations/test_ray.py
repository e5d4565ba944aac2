"""Runs on Ray, on two cores of this machine: faults, stops, and records equal to local ones.

The strategy of the runs is slow while a file exists, so that faults happen in the middle of runs without assumptions
about the speed of the machine.
"""

import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from contnorm import bench
from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine.checkpoint import RunFolder
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Event, Run, RunOptions
from contnorm.bench.records import Store
from contnorm.bench.unfinished import unfinished_runs
from contnorm.errors import UserCodeError, UserError

ray = pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),  # of Ray, about itself
]

STREAM = {"name": "split-mnist", "source": "digits", "tasks": 3, "train_per_task": 60, "test_per_task": 40}
SLOW = """
import os, time
from contnorm import bench

class Slow(bench.ER):
    def loss(self, model, head, stream, memory):
        if os.path.exists({hold!r}):
            time.sleep(0.5)
        return super().loss(model, head, stream, memory)
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file: while it exists, steps are slow."""
    path = tmp_path / "hold"
    path.touch()
    return path


def slow_runs(tmp_path: Path, hold: Path, norms: Sequence[str], seeds: int) -> list[Run]:
    code = tmp_path / "slow.py"
    code.write_text(SLOW.format(hold=str(hold)))
    settings = {"stream": STREAM, "strategy": {"name": f"{code}:Slow"}}
    configs = [resolve({**settings, "norm": {"name": norm}}, tmp_path) for norm in norms]
    return [Run(config, seed) for config in configs for seed in range(seeds)]


def results(runs: Path) -> dict[tuple[str, int], Any]:
    """The content of all records, without times, the state of the checkout, and the seal over all."""
    left_out = ("seconds", "seal", "commit")
    return {(r.hash, r.seed): {k: v for k, v in r.raw.items() if k not in left_out} for r in Store(runs)}


def test_runs_survive_the_loss_of_a_worker(tmp_path: Path, hold: Path) -> None:
    runs, options = slow_runs(tmp_path, hold, ("bn", "cn"), 2), RunOptions(runs=tmp_path / "runs", launcher="ray")
    begun: dict[Run, list[int]] = {}
    ended: list[Run] = []
    for event in execute(runs, options):
        if event.kind == "started":
            begun.setdefault(event.run, []).append(event.done)
        if event.kind == "task" and event.task == 1 and hold.exists():
            note = RunFolder(options.store.path(event.config, event.seed)).note
            process = re.search(r"process (\d+)", json.loads(note.read_text())["process"])
            assert process is not None
            os.kill(int(process[1]), signal.SIGKILL)
            killed = event.run
            hold.unlink()
        if event.kind in ("finished", "recorded"):
            ended.append(event.run)
    assert sorted(ended, key=runs.index) == runs
    assert begun[killed][0] == 0 and begun[killed][-1] > 0, "it went on from its checkpoint"
    list(execute(runs, RunOptions(runs=tmp_path / "local")))
    assert results(tmp_path / "runs") == results(tmp_path / "local") and len(ended) == 4
    assert not list((tmp_path / "runs").glob("*/*.unfinished"))


def test_stopped_runs_are_saved_and_go_on(tmp_path: Path, hold: Path) -> None:
    runs, options = slow_runs(tmp_path, hold, ("bn",), 2), RunOptions(runs=tmp_path / "runs", launcher="ray")
    seen: list[Event] = []

    def stop() -> bool:
        return any(event.kind == "task" for event in seen)

    for event in execute(runs, options, stop):
        seen.append(event)
    stopped = [event for event in seen if event.kind == "stopped"]
    assert stopped and all(event.saved == event.done > 0 for event in stopped)
    assert {left.seed for left in unfinished_runs(tmp_path / "runs")} == {event.seed for event in stopped}
    hold.unlink()
    list(execute(runs, options))
    list(execute(runs, RunOptions(runs=tmp_path / "local")))
    assert results(tmp_path / "runs") == results(tmp_path / "local")


def test_sweep_and_tune_equal_local_ones(tmp_path: Path) -> None:
    stream = bench.load_stream(**STREAM)
    options: dict[str, Any] = {"norm": ["cn"], "strategy": bench.ER(replay=5), "seeds": 2}
    on_ray = bench.sweep(stream, lr=[0.1, 1e30], **options, runs=tmp_path / "ray", launcher="ray")
    local = bench.sweep(stream, lr=[0.1, 1e30], **options, runs=tmp_path / "local")
    assert results(tmp_path / "ray") == results(tmp_path / "local")
    assert [trial.scores for trial in on_ray.trials] == [trial.scores for trial in local.trials]
    assert len(on_ray.trials[1].diverged) == 2
    search: dict[str, Any] = {"lr": [0.03, 0.1], "extensions": 0, "refine": None, **options}
    tuned = bench.tune(stream, **search, launcher=bench.RayLauncher(num_cpus=2))
    assert tuned.best["cn"].setting == bench.tune(stream, **search).best["cn"].setting


def test_errors_are_reported_with_their_cause() -> None:
    stream = bench.load_stream(**STREAM)

    class Exits(bench.ER):
        def loss(self, model: Any, head: Any, stream: Any, memory: Any) -> Any:
            os._exit(1)

    class Fails(bench.ER):
        def loss(self, model: Any, head: Any, stream: Any, memory: Any) -> Any:
            raise KeyError("mistake")

    launcher = bench.RayLauncher(retries=1)
    with pytest.raises(UserError, match=r"seed 0: its worker was lost .*Run it again to continue"):
        bench.run(stream, strategy=Exits, seeds=1, launcher=launcher)
    with pytest.raises((UserCodeError, RuntimeError), match="mistake"):
        bench.run(stream, strategy=Fails, seeds=1, launcher=launcher)
