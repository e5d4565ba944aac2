"""The callback after each task: its events, and stops by exceptions."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from contnorm import bench


def files(runs: Path) -> list[str]:
    return sorted(str(path.relative_to(runs)) for path in runs.rglob("*") if path.is_file())


def test_event_of_each_task_has_the_row_of_the_result(stream: bench.Stream) -> None:
    events: list[bench.TaskDone] = []
    result = bench.run(stream, norm="bn", seeds=2, lanes=1, on_task_done=events.append)
    assert [(event.seed, event.task) for event in events] == [(s, t) for s in range(2) for t in range(3)]
    for event in events:
        row = result.accuracy[event.seed, event.task, : event.task + 1]
        np.testing.assert_allclose(event.accuracy, row)
        assert event.average == pytest.approx(row.mean())
        assert event.config == result.config
        assert event.seeds == (0, 1)
        assert event.last is (event.task == 2)
        assert not event.recorded
        assert event.done == (event.task + 1) * event.steps // 3  # tasks of equal size


def test_recorded_run_reports_the_same_tasks(stream: bench.Stream, tmp_path: Path) -> None:
    first: list[bench.TaskDone] = []
    second: list[bench.TaskDone] = []
    for events in (first, second):
        bench.run(stream, norm="bn", runs=tmp_path, on_task_done=events.append)
    assert [event.accuracy for event in second] == [event.accuracy for event in first]
    assert [event.done for event in second] == [event.done for event in first]
    assert all(event.recorded for event in second)


def test_callback_does_not_change_results(stream: bench.Stream) -> None:
    def draw(event: bench.TaskDone) -> None:
        torch.rand(5)
        np.random.rand(5)

    plain = bench.run(stream, norm="bn")
    with_callback = bench.run(stream, norm="bn", on_task_done=draw)
    np.testing.assert_array_equal(plain.accuracy, with_callback.accuracy)


@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_exception_stops_and_saves_and_the_same_call_continues(
    stream: bench.Stream, tmp_path: Path, lanes: int
) -> None:
    def fail(event: bench.TaskDone) -> None:
        raise LookupError(f"after task {event.task}")

    with pytest.raises(LookupError, match="after task 0"):
        bench.run(stream, norm="bn", seeds=2, lanes=lanes, runs=tmp_path, on_task_done=fail)
    stopped = bench.clean(tmp_path).stopped
    assert max(leftover.run.step for leftover in stopped if leftover.run is not None) > 0
    assert not bench.clean(tmp_path).running
    resumed = bench.run(stream, norm="bn", seeds=2, lanes=lanes, runs=tmp_path)
    np.testing.assert_array_equal(resumed.accuracy, bench.run(stream, norm="bn", seeds=2, lanes=1).accuracy)


@pytest.mark.parametrize("lanes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stop_with_discard_leaves_only_earlier_records(stream: bench.Stream, tmp_path: Path, lanes: int) -> None:
    bench.run(stream, norm="bn", seeds=[0], runs=tmp_path)
    before = files(tmp_path)

    def stop(event: bench.TaskDone) -> None:
        if event.seed == 2 and event.task == 1:
            raise bench.StopRun("enough", discard=True)

    with pytest.raises(bench.StopRun, match="enough"):
        bench.run(stream, norm="bn", seeds=3, lanes=lanes, runs=tmp_path, keep_weights=True, on_task_done=stop)
    assert files(tmp_path) == before


def test_stop_after_the_last_task_with_discard_removes_the_record(stream: bench.Stream, tmp_path: Path) -> None:
    def stop(event: bench.TaskDone) -> None:
        if event.last:
            raise bench.StopRun(discard=True)

    with pytest.raises(bench.StopRun):
        bench.run(stream, norm="bn", runs=tmp_path, keep_weights=True, on_task_done=stop)
    assert not list(tmp_path.iterdir())


def test_sweep_and_run_all_call_it_for_each_setting(stream: bench.Stream) -> None:
    hashes: set[str] = set()
    bench.sweep(stream, norm=["bn", "gn"], lr=[0.01, 0.1], seeds=1, lanes=1, on_task_done=lambda e: hashes.add(e.hash))
    assert len(hashes) == 4
    results = bench.run_all(
        stream, [{"norm": "bn"}, {"norm": "gn"}], lanes=1, on_task_done=lambda event: hashes.add(event.hash)
    )
    assert {result.config.hash for result in results} <= hashes


def test_callback_must_be_callable(stream: bench.Stream, tmp_path: Path) -> None:
    with pytest.raises(bench.UserError, match=r"on_task_done='print'.*bench\.TaskDone"):
        bench.run(stream, runs=tmp_path, on_task_done="print")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_all_seeds_diverged_is_an_error_of_its_own(stream: bench.Stream) -> None:
    with pytest.raises(bench.DivergedError, match=r"seed 0.*learning rate"):
        bench.run(stream, norm="none", lr=1e12)


def test_run_that_another_process_discards_is_run_again(stream: bench.Stream, tmp_path: Path) -> None:
    """As when two trials have the same settings, and the one that has recorded a seed is pruned."""
    first = bench.run(stream, norm="bn", seeds=1, runs=tmp_path)

    def discard(event: bench.TaskDone) -> None:
        if event.seed == 1 and event.task == 0:
            bench.discard(tmp_path, event.config, seeds=[0], records=True)

    both = bench.run(stream, norm="bn", seeds=2, lanes=1, runs=tmp_path, on_task_done=discard)
    assert list(both.seeds) == [0, 1]
    np.testing.assert_array_equal(both.accuracy[0], first.accuracy[0])


def test_exit_in_the_callback_saves_the_runs_first(stream: bench.Stream, tmp_path: Path) -> None:
    def leave(event: bench.TaskDone) -> None:
        sys.exit(3)

    with pytest.raises(SystemExit, match="3"):
        bench.run(stream, norm="bn", lanes=1, runs=tmp_path, on_task_done=leave)
    (stopped,) = bench.clean(tmp_path).stopped
    assert stopped.run is not None and stopped.run.step, "the first task is in a checkpoint"
    again = bench.run(stream, norm="bn", lanes=1, runs=tmp_path)
    np.testing.assert_array_equal(again.accuracy, bench.run(stream, norm="bn").accuracy)


def test_signal_in_a_run_of_the_callback_saves_both(stream: bench.Stream, tmp_path: Path) -> None:
    def inner(event: bench.TaskDone) -> None:
        signal.raise_signal(signal.SIGTERM)

    def outer(event: bench.TaskDone) -> None:
        bench.run(stream, norm="gn", lanes=1, runs=tmp_path, on_task_done=inner)

    with pytest.raises(KeyboardInterrupt, match="stopped after saving"):
        bench.run(stream, norm="bn", lanes=1, runs=tmp_path, on_task_done=outer)
    assert [leftover.run.step > 0 for leftover in bench.clean(tmp_path).stopped if leftover.run] == [True, True]


def test_callback_can_run_other_settings_but_not_the_run_that_it_follows(stream: bench.Stream, tmp_path: Path) -> None:
    nested: list[bench.Result] = []

    def other(event: bench.TaskDone) -> None:
        nested.append(bench.run(stream, norm="gn", lanes=1, runs=tmp_path))

    def same(event: bench.TaskDone) -> None:
        bench.run(stream, norm="bn", seeds=2, lanes=1, runs=tmp_path)

    with pytest.raises(bench.UserError, match=r"on_task_done: started run [0-9a-f]{12}, seed 0, which the call"):
        bench.run(stream, norm="bn", seeds=2, lanes=1, runs=tmp_path, on_task_done=same)
    outer = bench.run(stream, norm="bn", seeds=2, lanes=1, runs=tmp_path, on_task_done=other)
    np.testing.assert_array_equal(outer.accuracy, bench.run(stream, norm="bn", seeds=2, lanes=1).accuracy)
    np.testing.assert_array_equal(nested[-1].accuracy, bench.run(stream, norm="gn").accuracy)
