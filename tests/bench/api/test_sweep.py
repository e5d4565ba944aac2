"""`bench.sweep` and `bench.tune`: results of single runs, the best settings, interruption, and invalid grids."""

import io
import logging
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
from contnorm.bench.api.result import Result
from contnorm.bench.api.sweep import Trial
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.grid import LineSearch
from contnorm.errors import UserError
from tests.datasets import small_cifar100

NET: dict[str, Any] = {"model.name": "mlp", "model.width": 8, "norm.groups": 4}


@pytest.fixture(scope="module")
def cifar100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=10)


@pytest.fixture
def validated(cifar100: Path) -> bench.Stream:
    """A stream with validation tasks."""
    return bench.load_stream("split-cifar100", cifar100, allow_missing=True)


def test_results_are_those_of_single_runs_and_to_the_bit(stream: bench.Stream) -> None:
    swept = bench.sweep(stream, norm=["bn", "cn4"], lr=[0.03, 0.1], settings=NET | {"norm.groups": 4}, seeds=2)
    assert [(t.setting["norm"], t.setting["lr"]) for t in swept.trials] == [
        ("bn", 0.03), ("bn", 0.1), ("cn4", 0.03), ("cn4", 0.1)
    ]  # fmt: skip
    for trial in swept.trials:
        alone = bench.run(stream, **trial.arguments, seeds=2)
        assert trial.result is not None and np.array_equal(trial.result.accuracy, alone.accuracy, equal_nan=True)
        assert trial.mean == pytest.approx(alone.acc.mean()) and trial.std == pytest.approx(alone.acc.std(ddof=1))
        assert trial.config == alone.config
    for norm in ("bn", "cn4"):
        means = {t.setting["lr"]: t.mean for t in swept.trials if t.setting["norm"] == norm}
        assert swept.best[norm].mean == max(means.values())


def test_any_argument_and_setting_can_be_a_grid(stream: bench.Stream) -> None:
    swept = bench.sweep(
        stream,
        strategy=["single", bench.ER(replay=5)],
        memory=bench.Ring(7),
        batch_size=range(10, 31, 20),
        settings={"train": {"passes": [1, 2]}, "model.width": 8},
        seeds=[3],
        **{"train.optimizer": ("sgd",)},
    )
    assert len(swept.trials) == 8 and swept.seeds == (3,)
    assert set(swept.axes) == {"strategy", "batch_size", "train.passes", "train.optimizer"}
    configs = [trial.config for trial in swept.trials]
    assert {(c.strategy.name, c.train.batch, c.train.passes) for c in configs if c} == {
        (strategy, batch, passes) for strategy in ("single", "er") for batch in (10, 30) for passes in (1, 2)
    }
    assert {c.memory.size for c in configs if c} == {7} and {c.model.width for c in configs if c} == {8}
    assert {c.train.replay for c in configs if c and c.strategy.name == "er"} == {5}
    assert {trial.setting["strategy"] for trial in swept.trials} == {"single", "ER(replay=5)"}
    assert list(swept.best) == ["cn"], "the default norm"


def test_models_of_python_can_be_a_grid(stream: bench.Stream) -> None:
    def wide(shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], 16), nn.BatchNorm1d(16), nn.Linear(16, outputs))

    def narrow(shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(shape[0], 2), nn.BatchNorm1d(2), nn.Linear(2, outputs))

    swept = bench.sweep(stream, model=[wide, narrow], norm="bn", seeds=1)
    assert [trial.setting["model"] for trial in swept.trials] == ["wide", "narrow"]
    assert swept.best["bn"].setting["model"] == "wide"
    with pytest.raises(UserError, match="tag='net' names one object"):
        bench.sweep(stream, model=[wide, narrow], tag="net")


def test_diverged_settings_are_counted_and_never_win(stream: bench.Stream) -> None:
    swept = bench.sweep(stream, norm="none", lr=[1e30, 0.03], settings=NET, seeds=2)
    frame = swept.to_frame()
    assert frame["diverged"].tolist() == [2, 0] and frame["seeds"].tolist() == [0, 2]
    assert frame["unfinished"].tolist() == [0, 0] and frame["best"].tolist() == [False, True]
    assert swept.best["none"].setting["lr"] == 0.03 and swept.trials[0].result is None
    assert set(swept.trials[0].diverged) == {0, 1} and all("seed" in why for why in swept.trials[0].diverged.values())


def test_nothing_is_chosen_if_every_setting_diverges(stream: bench.Stream) -> None:
    swept = bench.sweep(stream, norm="none", lr=[1e30, 1e31], settings=NET, seeds=1)
    assert swept.best == {} and any("every setting has a diverged seed" in note for note in swept.notes)
    swept.plot()


def test_one_diverged_seed_excludes_a_setting() -> None:
    good = Trial({"norm": "bn", "lr": 0.1}, {}, (0, 1), scores={0: 50.0, 1: 52.0})
    half = Trial({"norm": "bn", "lr": 0.3}, {}, (0, 1), scores={0: 99.0}, diverged={1: "nan"})
    missing = Trial({"norm": "cn", "lr": 0.3}, {}, (0, 1), scores={0: 99.0})
    done = Trial({"norm": "cn", "lr": 0.1}, {}, (0, 1), scores={0: 40.0, 1: 40.0})
    tie = Trial({"norm": "bn", "lr": 0.01}, {}, (0, 1), scores={0: 51.0, 1: 51.0})
    trials = [good, half, missing, done]
    result = bench.SweepResult(trials, ("norm", "lr"), "s", "acc", (0, 1), "test samples", "")
    assert result.best == {"bn": good} and not result.complete, "the missing run of cn may be the best"
    assert result.to_frame()["unfinished"].tolist() == [0, 0, 1, 0]
    assert [note for note in result.notes if "unfinished" in note] == ["cn: nothing is chosen yet; unfinished runs: 1."]
    result.trials.append(tie)
    assert result.best["bn"] is tie, "the smaller learning rate"
    assert "bn lr=0.1 did as well" in result.notes[0]


def test_forgetting_is_minimized(stream: bench.Stream) -> None:
    swept = bench.sweep(stream, norm="bn", lr=[0.001, 0.3], settings=NET, score="fm", seeds=1)
    assert swept.best["bn"].mean == min(trial.mean for trial in swept.trials) and "lowest mean fm" in swept.rule


def test_choice_on_test_samples_is_warned_about(stream: bench.Stream, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "contnorm"):
        one = bench.sweep(stream, norm=["bn", "cn"], settings=NET, seeds=1)
        assert one.warning is None and not caplog.records, "nothing is chosen"
        several = bench.sweep(stream, norm="bn", lr=[0.1, 0.2], settings=NET, seeds=1)
    assert several.warning and "test samples" in several.warning and several.warning in caplog.text
    assert several.chosen_on == "test samples"
    assert any("is at the edge of the grid" in note for note in several.notes), "there is no other place"


def test_validation_tasks_are_used_where_a_stream_has_them(validated: bench.Stream, tmp_path: Path) -> None:
    swept = bench.sweep(validated, norm="bn", lr=[0.01, 0.1], settings=NET, seeds=1, validation=True, runs=tmp_path)
    assert swept.warning is None and swept.chosen_on == "validation tasks (stream.part=validate)"
    assert {record.config.stream.part for record in bench.load_runs(tmp_path).records} == {"validate"}
    assert validated.settings == {"name": "split-cifar100"}, "the stream itself is not changed"
    fewer = bench.load_stream("split-cifar100", validated.root, allow_missing=True, tasks=10)  # there are 3 to validate
    again = bench.sweep(fewer, norm="bn", lr=[0.01, 0.1], settings=NET, seeds=1, validation=True, runs=tmp_path)
    assert [trial.config for trial in again.trials] == [trial.config for trial in swept.trials]


def test_samples_are_held_out_where_a_stream_has_no_validation_tasks(stream: bench.Stream) -> None:
    swept = bench.sweep(stream, norm="bn", lr=[0.01, 0.1], settings=NET, seeds=1, validation=True)
    assert swept.warning is None and swept.chosen_on == "held-out training samples (stream.holdout=0.2)"
    assert {trial.config.stream.holdout for trial in swept.trials if trial.config} == {0.2}
    tuned = bench.tune(stream, norm=["bn", "cn"], lr=[0.01, 0.1], settings=NET, seeds=1, extensions=1)
    assert set(tuned.best) == {"bn", "cn"} and tuned.warning is None


@contextmanager
def interrupted_in_run(number: int) -> Iterator[None]:
    """Send SIGINT to this process at the third step of so many runs."""
    step, started = Trainer.step, [0]

    def step_and_interrupt(trainer: Trainer) -> Tensor:
        loss = step(trainer)
        started[0] += trainer.done == 3
        if trainer.done == 3 and started[0] == number:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step_and_interrupt)
        yield


def test_interrupted_sweep_keeps_its_runs_and_continues(stream: bench.Stream, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"norm": ["bn", "cn"], "lr": [0.03, 0.1], "settings": NET, "seeds": 2}
    whole = bench.sweep(stream, **arguments)
    with interrupted_in_run(6), pytest.raises(bench.RunInterrupted, match="runs unfinished") as stopped:
        bench.sweep(stream, **arguments, runs=tmp_path)
    partial = stopped.value.result
    assert stopped.value.signal == signal.SIGINT and isinstance(stopped.value, KeyboardInterrupt)
    assert sum(len(trial.scores) for trial in partial.trials) == 5 and not partial.complete
    assert list(partial.best) == ["bn"], "cn has unfinished settings"
    assert partial.trials[0].result is not None and partial.trials[0].result.seeds == [0, 1]
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/[0-9].json")}
    assert len(times) == 5
    resumed = bench.sweep(stream, **arguments, runs=tmp_path)
    assert resumed.complete and all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert [trial.scores for trial in resumed.trials] == [trial.scores for trial in whole.trials]


def test_interrupted_search_continues_with_the_same_values(validated: bench.Stream, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"norm": ["bn", "none"], "lr": [0.001, 0.01], "settings": NET, "seeds": 1, "lanes": 1}
    whole = bench.tune(validated, **arguments)
    assert len(whole.trials) > 4, "the grid is extended"
    with interrupted_in_run(5), pytest.raises(bench.RunInterrupted) as stopped:
        bench.tune(validated, **arguments, runs=tmp_path)
    assert sum(len(trial.scores) for trial in stopped.value.result.trials) == 4
    resumed = bench.tune(validated, **arguments, runs=tmp_path)
    assert [(t.setting, t.scores) for t in resumed.trials] == [(t.setting, t.scores) for t in whole.trials]


def test_search_is_that_of_the_grid_for_each_norm(validated: bench.Stream) -> None:
    """Repeats the search of each norm with single runs."""
    tuned = bench.tune(
        validated, norm=["bn", "none"], lr=[0.003, 0.01], settings=NET, seeds=1, extensions=2, refine="around"
    )
    assert tuned.tuned == "lr" and tuned.chosen_on.startswith("validation tasks") and tuned.warning is None
    part = bench.load_stream("split-cifar100", validated.root, allow_missing=True, part="validate")
    for norm, trials in tuned.groups.items():
        line = LineSearch([0.003, 0.01], extensions=2, refine="around")
        while values := line.propose():
            for value in values:
                line.record(value, float(bench.run(part, norm=norm, lr=value, settings=NET).acc[0]))
        assert [trial.setting["lr"] for trial in trials] == line.tried
        assert tuned.best[norm].setting["lr"] == line.best


def test_other_numeric_settings_can_be_tuned(validated: bench.Stream) -> None:
    tuned = bench.tune(
        validated,
        over="memory.size",
        norm="bn",
        strategy=["er", "single"],
        settings=NET | {"memory.size": [20, 40]},
        seeds=1,
        extensions=1,
    )
    assert tuned.by == ("norm", "strategy") and set(tuned.best) <= {("bn", "er"), ("bn", "single")}
    assert all(isinstance(trial.setting["memory.size"], int) for trial in tuned.trials)
    assert {trial.config.train.lr for trial in tuned.trials if trial.config} == {0.03}, "the default of the stream"


def test_value_beyond_the_grid_that_cannot_be_run_is_noted(
    validated: bench.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest memory is the best here, and the next smaller one has fewer slots than a replay batch."""
    monkeypatch.setattr(Result, "score", lambda result, _: np.array([-float(result.config.memory.size)]))
    tuned = bench.tune(
        validated, over="memory.size", norm=["bn", "gn4"], settings=NET | {"memory.size": [5, 10]}, seeds=1
    )
    assert [trial.setting["memory.size"] for trial in tuned.groups["bn"]] == [5, 7, 10]
    assert tuned.best["gn4"].setting["memory.size"] == 5 and tuned.complete
    refused = [note for note in tuned.notes if "can't be run" in note]
    assert len(refused) >= 2 and "memory.size=2 is too small" in refused[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"lr": []},
        {"settings": {"train.bach": [5, 10]}},
        {"train.bach": 5},
        {"settings": {"stream.tasks": [2, 3]}},
        {"lr": [0.1], "settings": {"train.lr": 0.2}},
        {"lr": [0.1, "fast"]},
        {"norm": ["bn", "cm"]},
        {"score": "accuracy"},
        {"by": "strategy"},
        {"seeds": 0},
    ],
)
def test_invalid_grid_is_refused_and_nothing_is_written(
    arguments: dict[str, Any], stream: bench.Stream, tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        bench.sweep(stream, **{"seeds": 1, "runs": tmp_path / "runs"} | arguments)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments", [{"lr": 0.1}, {"lr": [0.1]}, {"over": "norm", "norm": ["bn", "cn"]}, {"refine": "twice"}]
)
def test_invalid_search_is_refused(arguments: dict[str, Any], validated: bench.Stream) -> None:
    with pytest.raises(UserError):
        bench.tune(validated, **arguments)


def test_lines_of_runs_name_the_settings_that_vary(stream: bench.Stream, tmp_path: Path) -> None:
    lines = Console(file=io.StringIO(), width=200)
    bench.sweep(stream, norm="bn", lr=[0.03, 0.1], settings=NET, seeds=2, progress=lines, runs=tmp_path)
    assert isinstance(lines.file, io.StringIO)
    assert "arrays er bn train.lr=0.1 seed 1: recorded in" in lines.file.getvalue()


def test_table_and_figure_of_a_sweep(stream: bench.Stream, tmp_path: Path) -> None:
    swept = bench.sweep(stream, norm=["bn", "cn"], lr=[0.01, 0.1, 1e30], settings=NET, seeds=2)
    frame = swept.to_frame()
    assert list(frame.columns) == [
        "norm", "lr", "mean", "std", "seeds", "diverged", "unfinished", "best", "hash"
    ]  # fmt: skip
    assert frame["hash"].nunique() == 6
    (ax,) = swept.plot().axes
    assert set(ax.get_legend_handles_labels()[1]) == {"bn", "cn"}
    usable = [trial for trial in swept.trials if trial.setting["norm"] == "bn" and trial.eligible]
    assert np.allclose(ax.lines[0].get_ydata(), [trial.mean for trial in usable]) and ax.get_xscale() == "log"
    assert "<table" in swept._repr_html_() and "SweepResult(arrays" in repr(swept)
