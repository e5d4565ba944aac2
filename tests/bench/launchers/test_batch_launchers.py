"""The launchers of joblib and submitit, with the real libraries: processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contnorm import bench
from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.base import Launcher
from contnorm.bench.launchers.registry import create_launcher
from contnorm.errors import UserError

NEEDS_JOBLIB = pytest.mark.skipif(find_spec("joblib") is None, reason="joblib is not installed")
NEEDS_SUBMITIT = pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed")
JOBLIB = pytest.mark.feature("joblib", "launcher: records equal to local ones, stop and resume")
SUBMITIT = pytest.mark.feature("submitit", "launcher: records equal to local ones, stop and resume (local cluster)")

Create = Callable[..., Launcher]


@pytest.fixture(
    params=[
        pytest.param("joblib", marks=[NEEDS_JOBLIB, JOBLIB]),
        pytest.param("submitit", marks=[NEEDS_SUBMITIT, SUBMITIT]),
    ]
)
def create(request: pytest.FixtureRequest, tmp_path: Path) -> Create:
    def create(**options: Any) -> Launcher:
        own = {"n_jobs": 2} if request.param == "joblib" else {"folder": tmp_path / "jobs", "cluster": "local"}
        launcher: Launcher = create_launcher(request.param, {**own, **options})
        return launcher

    return create


@pytest.fixture
def stream() -> bench.Stream:
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 100)
    x = rng.normal(size=(4, 12))[y] + rng.normal(size=(len(y), 12))
    return bench.Stream.from_arrays(x, y, x[::4], y[::4], tasks=2)


@pytest.mark.slow
def test_records_equal_those_of_one_process(create: Create, stream: bench.Stream, tmp_path: Path) -> None:
    tasks: list[tuple[int, int]] = []
    result = bench.run(
        stream,
        norm="bn",
        seeds=3,
        runs=tmp_path / "runs",
        launcher=create(),
        on_task_done=lambda event: tasks.append((event.seed, event.task)),
    )
    alone = bench.run(stream, norm="bn", seeds=3, lanes=1)
    np.testing.assert_array_equal(result.accuracy, alone.accuracy)
    assert sorted(tasks) == [(seed, task) for seed in range(3) for task in range(2)], "events arrive when a unit ends"
    assert not bench.clean(tmp_path / "runs").removable and not bench.clean(tmp_path / "runs").stopped
    assert not list((tmp_path / "jobs").glob("stop-*")) if (tmp_path / "jobs").exists() else True


@pytest.mark.slow
@NEEDS_JOBLIB
def test_in_memory_runs_return_their_weights(stream: bench.Stream) -> None:
    result = bench.run(stream, norm="bn", seeds=2, keep_weights=True, launcher="joblib")
    assert len(result.models()) == 2


@pytest.mark.slow
def test_stop_saves_and_the_same_call_continues(create: Create, tmp_path: Path) -> None:
    """A signal arrives while two long runs are executed by workers."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(4), 10_000)
    x = rng.normal(size=(4, 12))[y] + rng.normal(size=(len(y), 12))
    long = bench.Stream.from_arrays(x, y, x[::400], y[::400], tasks=2)
    runs = tmp_path / "runs"

    def interrupt() -> None:
        deadline = time.monotonic() + 100
        while len(list(runs.rglob("checkpoints/*.json"))) < 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(bench.RunInterrupted):
        bench.run(long, norm="bn", seeds=2, runs=runs, launcher=create())
    leftovers = bench.clean(runs)
    assert leftovers.stopped and not leftovers.running
    assert any(one.run is not None and one.run.step % 500 for one in leftovers.stopped), "saved at the signal"


class Broken(bench.ER):
    """Fails in a worker."""

    def loss(self, *arguments: Any, **keywords: Any) -> Any:
        raise ValueError("no loss today")


@pytest.mark.slow
@NEEDS_JOBLIB
def test_error_of_user_code_is_raised_here(stream: bench.Stream, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no loss today"):
        bench.run(stream, norm="bn", strategy=Broken, seeds=2, runs=tmp_path / "runs", launcher="joblib")


@pytest.mark.slow
@NEEDS_SUBMITIT
@pytest.mark.feature("submitit", "a killed job is resumed by the next call")
def test_killed_job_of_submitit_fails_and_is_resumed_by_the_next_call(stream: bench.Stream, tmp_path: Path) -> None:
    def kill(event: bench.TaskDone) -> None:
        raise AssertionError("its job was killed")

    class Killed(bench.ER):
        def loss(self, *arguments: Any, **keywords: Any) -> Any:
            if not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().loss(*arguments, **keywords)

    launcher = create_launcher("submitit", {"folder": tmp_path / "jobs", "cluster": "local"})
    options: dict[str, Any] = {"norm": "bn", "strategy": Killed, "tag": "killed", "runs": tmp_path / "runs"}
    with pytest.raises(UserError, match=r"job \S+: ended without a result.*run it again to resume"):
        bench.run(stream, **options, launcher=launcher, on_task_done=kill)
    result = bench.run(stream, **options, launcher=launcher)
    np.testing.assert_array_equal(result.accuracy, bench.run(stream, norm="bn", strategy="er").accuracy)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # submitit leaves its log files open
@NEEDS_SUBMITIT
@pytest.mark.feature("submitit", "debug cluster")
def test_debug_cluster_executes_in_this_process(stream: bench.Stream, tmp_path: Path) -> None:
    launcher = create_launcher("submitit", {"folder": tmp_path / "jobs", "cluster": "debug"})
    before = signal.getsignal(signal.SIGINT)
    result = bench.run(stream, norm="bn", runs=tmp_path / "runs", launcher=launcher)
    np.testing.assert_array_equal(result.accuracy, bench.run(stream, norm="bn").accuracy)
    assert signal.getsignal(signal.SIGINT) is before


@NEEDS_JOBLIB
def test_unknown_option_of_a_launcher() -> None:
    with pytest.raises(UserError, match=r"option of launcher joblib.*'jobs'.*n_jobs"):
        create_launcher("joblib", {"jobs": 2})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("joblib", {"n_jobs": "two"}, r"n_jobs='two'"),
        ("joblib", {"n_jobs": 0}, r"n_jobs=0"),
        ("joblib", {"backend": "nope"}, r"backend='nope'.*loky"),
        ("joblib", {"backend": "multiprocessing"}, r"backend='multiprocessing'.*does not support"),
        ("submitit", {"most_jobs": 0}, r"most_jobs=0"),
        ("submitit", {"most_jobs": "x"}, r"most_jobs='x'"),
        ("submitit", {"timeout_min": "x"}, r"submitit: .*timeout_min"),
        ("submitit", {"parameters": "x"}, r"parameters='x'"),
        ("submitit", {"parameters": {"no_such_parameter": 1}}, r"submitit: .*no_such_parameter"),
        ("submitit", {"cluster": "foo"}, r"submitit: .*foo"),
        ("submitit", {}, ""),
    ],
)
def test_options_are_checked_before_anything_is_written(
    name: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    if message:
        with pytest.raises(UserError, match=message):
            create_launcher(name, options)
    else:
        create_launcher(name, options)
    assert not list(tmp_path.iterdir())


@NEEDS_JOBLIB
def test_joblib_has_one_process_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes of a GPU are the runs of one process."""
    launcher = create_launcher("joblib")
    counts: list[int] = []

    def parallel(n_jobs: int) -> Callable[[Any], Iterator[Any]]:
        counts.append(n_jobs)
        return lambda calls: iter(())

    monkeypatch.setattr(launcher, "_parallel", parallel)
    for device in ("cpu", "cuda"):
        work = UnitWork(RunEnvironment(None, Path("data"), torch.device(device), lanes=8))
        assert not list(launcher.launch(work, [], lambda: False))
    assert counts == [8, 1]


@pytest.mark.slow
@NEEDS_JOBLIB
def test_reused_workers_follow_a_change_of_folder(
    stream: bench.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joblib keeps its worker processes, which stay in the folder that the program was in when they were started."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        bench.run(stream, norm="bn", seeds=2, runs="runs", launcher=create_launcher("joblib", {"n_jobs": 2}))
        assert len(list((tmp_path / name / "runs").glob("*/[01].json"))) == 2
