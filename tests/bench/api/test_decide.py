"""`bench.decide`: seeds are added until a verdict, from experiments, results and records."""

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import Tensor, nn

from contnorm import bench
from contnorm.bench.api import decide as decide_module
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.sequential import decide_differences

GOOD: dict[str, Any] = {"norm": "bn", "lr": 0.1}
BAD: dict[str, Any] = {"norm": "bn", "lr": 1e-5}  # learns nothing
CLOSE: dict[str, Any] = {"norm": "bn", "lr": 0.08}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds of every call that runs something."""
    calls: list[list[int]] = []
    run = decide_module.run_experiments

    def run_and_count(*args: Any, seeds: list[int], **options: Any) -> Any:
        calls.append(list(seeds))
        return run(*args, seeds=seeds, **options)

    monkeypatch.setattr(decide_module, "run_experiments", run_and_count)
    return calls


def test_clear_difference_is_decided_at_the_first_look(stream: bench.Stream, counted: list[list[int]]) -> None:
    decision = bench.decide(GOOD, BAD, stream=stream, lanes=1)
    assert decision.outcome == "higher" and decision.seeds == 16 and decision.score == "acc"
    assert counted == [list(range(100, 116))]
    good, bad = (bench.run(stream, **arguments, seeds=range(100, 116), lanes=1) for arguments in (GOOD, BAD))
    assert decision.interval == decide_differences((good.acc - bad.acc).tolist()).interval
    assert decision.mean == pytest.approx(np.mean(good.acc - bad.acc))
    assert decision.sentence.startswith("lr=0.1 is higher than lr=1e-05 in ACC by ")
    assert (bench.Result(decision.a).acc == good.acc).all()


@pytest.mark.slow
def test_undecided_comparison_gets_all_looks(stream: bench.Stream, counted: list[list[int]]) -> None:
    decision = bench.decide(GOOD, CLOSE, stream=stream, margin=1e-6, max_seeds=24, lanes=1)
    assert counted == [list(range(100, 116)), list(range(116, 124))]
    assert decision.outcome == "undecided" and [look.seeds for look in decision.looks] == [16, 24]


@pytest.mark.slow
def test_results_are_continued_and_their_first_seeds_are_exploratory(
    stream: bench.Stream, counted: list[list[int]]
) -> None:
    good, bad = (bench.run(stream, **arguments, seeds=[0, 1, 100, 101], lanes=1) for arguments in (GOOD, BAD))
    counted.clear()
    decision = bench.decide(good, bad, lanes=1)
    assert counted == [list(range(102, 116))], "seeds 100 and 101 are not repeated"
    assert (
        decision.outcome == "higher" and decision.seeds == 16 and set(decision.differences) == {0, 1, *range(100, 116)}
    )
    fresh = bench.decide(GOOD, BAD, stream=stream, lanes=1)
    assert decision.interval == fresh.interval


def test_records_are_decided_without_running(stream: bench.Stream, tmp_path: Path, counted: list[list[int]]) -> None:
    for arguments in (GOOD, BAD):
        bench.run(stream, **arguments, seeds=range(100, 116), runs=tmp_path, lanes=1)
    runs = bench.load_runs(tmp_path)
    good, bad = runs.where(lr=0.1), runs.where(lr=1e-5)
    counted.clear()
    assert bench.decide(good, bad).outcome == "higher" and bench.decide(bad, good).outcome == "lower"
    assert bench.decide(iter(list(good)), list(bad)).outcome == "higher"
    assert bench.decide(bench.Result(good), bench.Result(bad)).outcome == "higher"
    assert not counted


@pytest.mark.slow
def test_folder_is_continued_and_a_second_call_runs_nothing(stream: bench.Stream, tmp_path: Path) -> None:
    bench.run(stream, **GOOD, seeds=range(100, 104), runs=tmp_path, lanes=1)
    first = bench.decide(GOOD, BAD, stream=stream, runs=tmp_path, lanes=1)
    assert len(list(tmp_path.glob("*/*.json"))) == 32
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.json")}
    second = bench.decide(GOOD, BAD, stream=stream, runs=tmp_path, lanes=1)
    assert second == first and times == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.json")}


@contextmanager
def interrupted_in_run(number: int) -> Iterator[None]:
    """Send SIGINT to this process at the third step of so many runs."""
    step, count = Trainer.step, 0

    def step_and_interrupt(trainer: Trainer) -> Tensor:
        nonlocal count
        loss = step(trainer)
        if trainer.done == 3:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGINT)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step_and_interrupt)
        yield


@pytest.mark.slow
def test_interrupted_decision_continues(stream: bench.Stream, tmp_path: Path) -> None:
    whole = bench.decide(GOOD, BAD, stream=stream, lanes=1)
    with (
        interrupted_in_run(5),
        pytest.raises(bench.RunInterrupted, match=r"Run it again to continue\."),
    ):
        bench.decide(GOOD, BAD, stream=stream, runs=tmp_path, lanes=1)
    assert 0 < len(list(tmp_path.glob("*/*.json"))) < 32
    decision = bench.decide(GOOD, BAD, stream=stream, runs=tmp_path, lanes=1)
    assert decision.interval == whole.interval and decision.outcome == "higher"


def test_progress_has_a_line_for_each_look(stream: bench.Stream) -> None:
    console = Console(file=io.StringIO(), width=200)
    results = [bench.run(stream, **arguments, seeds=2, lanes=1) for arguments in (GOOD, CLOSE)]
    verdict = bench.decide(*results, margin=50.0, max_seeds=16, lanes=1, progress=console)
    assert isinstance(console.file, io.StringIO) and verdict.outcome == "equivalent"
    assert console.file.getvalue().splitlines()[-1] == f"{verdict.sentence} {verdict.seeds_needed}"


def test_diverged_seeds_are_no_pairs(stream: bench.Stream, caplog: pytest.LogCaptureFixture) -> None:
    good = bench.run(stream, **GOOD, seeds=range(100, 116), lanes=1)
    bad = bench.run(stream, **BAD, seeds=range(100, 115), lanes=1)
    lost = bench.Result(bad.records, diverged={115: "seed 115: the loss is nan."})
    decision = bench.decide(good, lost)
    assert (decision.seeds, decision.pairs, decision.diverged) == (16, 15, 1)
    assert "1 of them diverged" in decision.sentence
    missing = bench.decide(good, bench.Result(bad.records))
    assert missing.seeds == 0 and missing.outcome == "undecided"


def test_experiment_that_always_diverges_is_an_error(stream: bench.Stream) -> None:
    with pytest.raises(bench.UserError, match="loss"):
        bench.decide(GOOD, {"norm": "none", "lr": 1e30}, stream=stream, lanes=1)


@pytest.mark.slow
def test_objects_are_run_in_memory(stream: bench.Stream) -> None:
    def make(outputs: int, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, outputs))

    a, b = (
        bench.run(stream, model=lambda shape, outputs, width=width: make(outputs, width), norm="bn", lanes=1)
        for width in (32, 1)
    )
    decision = bench.decide(a, b, max_seeds=16, lanes=1)
    assert decision.outcome == "higher" and decision.seeds == 16
    with pytest.raises(bench.UserError, match="run in memory with Python objects"):
        bench.decide(a, b, runs="never")
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((GOOD, BAD), {}),
        ((GOOD, GOOD), {"stream": True}),
        ((GOOD, {"norm": "nope"}), {"stream": True}),
        ((GOOD, BAD), {"stream": True, "score": "nope"}),
        ((GOOD, BAD), {"stream": True, "margin": 0.0}),
        ((GOOD, BAD), {"stream": True, "max_seeds": 5}),
        ((GOOD, []), {"stream": True}),
        ((5, 6), {}),
        ((GOOD, BAD), {"stream": "no-such-stream"}),
    ],
)
def test_invalid_arguments_run_nothing(
    arguments: tuple[Any, Any], options: dict[str, Any], stream: bench.Stream, tmp_path: Path
) -> None:
    if options.get("stream") is True:
        options = {**options, "stream": stream}
    with pytest.raises(bench.UserError):
        bench.decide(*arguments, runs=tmp_path / "runs", **options)
    assert not (tmp_path / "runs").exists()


def test_stream_is_not_given_twice(stream: bench.Stream) -> None:
    result = bench.run(stream, **GOOD, lanes=1)
    with pytest.raises(bench.UserError, match="a result has its own"):
        bench.decide(result, BAD, stream=stream)


@pytest.mark.slow
def test_score_without_a_value_is_an_error(counted: list[list[int]]) -> None:
    """The forgetting of a single task: it is not that runs diverged."""
    stream = bench.load_stream("split-mnist", source="digits", tasks=1, train_per_task=20)
    a, b = (bench.run(stream, **side, seeds=range(100, 102), lanes=1) for side in (GOOD, BAD))
    for compare in (bench.decide, bench.compare):
        with pytest.raises(bench.UserError, match="score 'fm' has no value in these runs"):
            compare(a, b, "fm")
