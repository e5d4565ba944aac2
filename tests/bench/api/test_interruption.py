"""SIGTERM to a program that uses the API, runs in several threads, and duplicate runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from contnorm.bench.engine.job_events import Event

from contnorm import bench
from contnorm.bench.signals import StopSignals

SCRIPT = """
import threading
from pathlib import Path
import numpy as np
from contnorm import bench

rng = np.random.default_rng(0)
y = np.repeat(np.arange(4), 5000)  # 1,000 steps a task, and a checkpoint after 500
stream = bench.Stream.from_arrays(rng.normal(size=(len(y), 12)), y, rng.normal(size=(50, 12)), y[::400], tasks=2)

def work():
    bench.run(stream, norm="bn", strategy="er", seeds={seeds}, lanes={seeds}, runs={runs!r}, tag="x")

def in_thread():
    try:
        work()
    except bench.RunInterrupted as stopped:
        Path({runs!r}, "caught").write_text(str(stopped.signal))

try:
    {call}
finally:
    print("finally", flush=True)
"""
IN_THREAD = """with bench.StopSignals():
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()"""


def terminate_once_it_trains(script: str, runs: Path) -> tuple[int, str, str]:
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 100
        while not list(runs.rglob("checkpoints/*.json")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, 2], ids=["in the process", "in worker processes"])
def test_sigterm_to_a_program_saves_and_exits_143(tmp_path: Path, seeds: int) -> None:
    code, out, err = terminate_once_it_trains(SCRIPT.format(seeds=seeds, runs=str(tmp_path), call="work()"), tmp_path)
    assert code == 128 + signal.SIGTERM, err
    assert out == "finally\n" and "Traceback" not in err
    assert "stopping after the current batch and saving" in err and "stopped after saving" in err
    stopped = [leftover.run for leftover in bench.clean(tmp_path).stopped]
    assert len(stopped) == seeds and not bench.clean(tmp_path).running
    assert any(run is not None and run.step % 500 for run in stopped), "saved at the signal, not at the last interval"


@pytest.mark.slow
def test_sigterm_to_a_program_with_runs_in_a_thread_saves(tmp_path: Path) -> None:
    code, _, err = terminate_once_it_trains(SCRIPT.format(seeds=1, runs=str(tmp_path), call=IN_THREAD), tmp_path)
    assert code == 0, err
    assert (tmp_path / "caught").read_text() == str(int(signal.SIGTERM))
    (stopped,) = bench.clean(tmp_path).stopped
    assert stopped.run is not None and stopped.run.step % 500


def test_interruption_is_an_exit_after_sigterm_only() -> None:
    for kind, more in ((bench.RunInterrupted, ()), (bench.SweepInterrupted, (None,))):
        stopped = kind("saved.", signal.SIGTERM, *more)
        assert isinstance(stopped, kind) and isinstance(stopped, SystemExit) and stopped.code == 143
        stopped = kind("saved.", signal.SIGINT, *more)
        assert not isinstance(stopped, SystemExit) and stopped.signal == signal.SIGINT and str(stopped) == "saved."


def test_signals_of_the_main_thread_reach_other_threads() -> None:
    seen: list[bool] = []

    with StopSignals() as outer:
        with ThreadPoolExecutor(1) as pool:
            context = pool.submit(StopSignals().__enter__).result()
            seen.append(bool(context))
            signal.raise_signal(signal.SIGTERM)
            seen.append(bool(context))
        assert context.received is outer.received
    assert seen == [False, True]


@pytest.mark.parametrize("same", [True, False], ids=["same run", "other runs"])
def test_threads_give_the_results_of_one_thread(stream: bench.Stream, tmp_path: Path, same: bool) -> None:
    norms = ["bn", "bn"] if same else ["bn", "gn"]
    barrier = threading.Barrier(2)

    def work(norm: str) -> bench.Result:
        barrier.wait()
        return bench.run(stream, norm=norm, seeds=2, lanes=1, runs=tmp_path)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, norms))
    for norm, result in zip(norms, results, strict=True):
        np.testing.assert_array_equal(result.accuracy, bench.run(stream, norm=norm, seeds=2, lanes=1).accuracy)
    assert not bench.clean(tmp_path).stopped and not bench.clean(tmp_path).removable


def test_signal_before_the_first_run_does_not_advise_to_resume(
    stream: bench.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def execute(*arguments: object, **options: object) -> Iterator[Event]:
        signal.raise_signal(signal.SIGINT)  # as while data is read
        yield from ()

    monkeypatch.setattr("contnorm.bench.api.execution.execute", execute)
    with pytest.raises(bench.RunInterrupted, match=r"^stopped\. Run it again to continue\.$"):
        bench.run(stream, norm="bn", lanes=1, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
