"""The events of runs arrive at loggers, in CSV files too, and change no result."""

import csv
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contnorm import bench
from contnorm.bench.loggers import CSVLogger, LoggedRun
from contnorm.errors import UserError
from tests.bench.loggers.conftest import Memo, StopAt

SYSTEM = {"train_seconds", "evaluate_seconds", "steps_per_second", "samples_per_second", "memory_mib"}


def read_csv(path: Path) -> list[tuple[int, str, float]]:
    with path.open(newline="") as file:
        return [(int(row["step"]), row["metric"], float(row["value"])) for row in csv.DictReader(file)]


def without_times(rows: list[tuple[int, str, float]]) -> list[tuple[int, str, float]]:
    return [row for row in rows if not row[1].startswith("system/")]


def test_logger_gets_what_the_record_has(stream: bench.Stream) -> None:
    memo = Memo()
    result = bench.run(stream, norm="cn4", lr=0.05, log=memo, log_every=5, settings={"evaluate.ahead": True})
    (record,), (run,) = result.records, memo.runs
    assert (run.hash, run.seed, run.done) == (record.hash, 0, 0)
    assert run.settings["train.lr"] == 0.05 and run.settings["norm.groups"] == 4
    assert run.provenance["versions"] == record.raw["versions"] and run.provenance["device"] == record.raw["device"]
    assert record.raw["task_ends"] == [8, 16, 24]
    assert list(memo.series("loss")) == [5, 10, 15, 20], "24 steps, not at the ends of tasks"
    for task in range(3):
        expected = {8 * (row + 1): 100 * record.matrix.correct[row][task] / 40 for row in range(3)}  # type: ignore[operator]
        assert memo.series(f"accuracy/task_{task}") == pytest.approx(expected)
    means = {8 * (row + 1): np.mean(result.accuracy[0, row, : row + 1]) for row in range(3)}
    assert memo.series("accuracy/average") == pytest.approx(means)
    assert memo.series("score/acc") == {24: record.score("acc")} and memo.series("score/fwt") == {
        24: record.score("fwt")
    }
    assert memo.series("task") == {5: 0, 10: 1, 15: 1, 20: 2}
    assert {name.partition("/")[2] for _, _, name, _ in memo.rows if name.startswith("system/")} == SYSTEM
    assert memo.series("system/samples_per_second")[24] == pytest.approx(240 / memo.series("system/train_seconds")[24])
    assert memo.ends == [(0, "finished", "")] and memo.closed == 1


@pytest.mark.slow
def test_runs_in_processes_are_logged(stream: bench.Stream) -> None:
    alone, together = Memo(), Memo()
    bench.run(stream, log=alone, log_every=4, seeds=2, lanes=1)
    bench.run_all(stream, [{}, {"norm": "bn"}], log=[together], log_every=4, seeds=2, lanes=2)
    first = together.runs[0].hash
    assert sorted(together.ends) == [(0, "finished", ""), (0, "finished", ""), (1, "finished", ""), (1, "finished", "")]
    assert {run.hash for run in alone.runs} < {run.hash for run in together.runs} and first
    assert set(without_seconds(alone.rows)) < set(without_seconds(together.rows)) and together.closed == 1


def without_seconds(rows: list[tuple[int, int, str, float]]) -> list[tuple[int, int, str, float]]:
    return [row for row in rows if not row[2].startswith("system/")]


class Noisy(bench.Logger):
    """Uses the global random generators, as libraries do."""

    def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)


def test_results_do_not_depend_on_loggers(stream: bench.Stream, tmp_path: Path) -> None:
    def make(shape: tuple[int, ...], outputs: int) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(shape[0], 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, outputs)
        )

    plain = bench.run(stream, model=make, keep_weights=True)
    logged = bench.run(stream, model=make, keep_weights=True, log=["csv", Noisy()], log_every=1, log_dir=tmp_path)
    assert plain.hash == logged.hash and plain.records[0].raw["matrix"] == logged.records[0].raw["matrix"]
    for mine, other in zip(plain.models()[0].parameters(), logged.models()[0].parameters(), strict=True):
        assert torch.equal(mine, other)


def test_failing_logger_is_reported_once_and_the_run_continues(
    stream: bench.Stream, caplog: pytest.LogCaptureFixture
) -> None:
    @dataclass
    class Broken(bench.Logger):  # not hashable
        calls: int = 0

        def metrics(self, run: LoggedRun, step: int, values: Mapping[str, float]) -> None:
            self.calls += 1
            raise SystemExit("the disk\nis full")

    broken, memo = Broken(), Memo()
    result = bench.run(stream, log=[broken, memo], log_every=5)
    assert broken.calls == 1 and memo.ends == [(0, "finished", "")] and len(memo.series("loss")) == 4
    (message,) = caplog.messages
    assert "Broken" in message and "SystemExit: the disk is full" in message
    assert result.records[0].raw["matrix"] == bench.run(stream).records[0].raw["matrix"]


def test_diverged_run_is_logged_with_its_reason(stream: bench.Stream) -> None:
    memo = Memo()
    with pytest.raises(UserError, match="learning rate"):
        bench.run(stream, model="mlp", norm="none", lr=1e30, log=memo)
    ((seed, status, reason),) = memo.ends
    assert ((seed, status) == (0, "diverged") and "not finite" in reason) or "loss is" in reason
    assert memo.closed == 1


@pytest.mark.parametrize("step", [5, 8, 13])
def test_resumed_run_continues_its_csv(stream: bench.Stream, tmp_path: Path, step: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    result = bench.run(stream, runs=whole, log="csv", log_every=1)
    memo = Memo()
    with pytest.raises(KeyboardInterrupt):
        bench.run(stream, runs=stopped, log=["csv", StopAt(step), memo], log_every=1)
    path = tmp_path / "stopped-logs" / "csv" / result.hash / "0.csv"
    description = path.with_suffix(".json")
    assert json.loads(description.read_text())["status"] == "stopped" and memo.ends == [(0, "stopped", "")]
    bench.run(stream, runs=stopped, log=["csv", memo], log_every=1)
    assert [run.done for run in memo.runs] == [0, step]
    expected = without_times(read_csv(tmp_path / "whole-logs" / "csv" / result.hash / "0.csv"))
    assert without_times(read_csv(path)) == expected and len(expected) > 24
    content = json.loads(description.read_text())
    assert content["status"] == "finished" and content["settings"]["norm.name"] == "cn" and content["seed"] == 0


def test_recorded_run_is_not_logged_again(stream: bench.Stream, tmp_path: Path) -> None:
    bench.run(stream, runs=tmp_path / "runs")
    memo = Memo()
    bench.run(stream, runs=tmp_path / "runs", log=memo)
    assert not memo.runs and not memo.rows and memo.closed == 1


def test_csv_of_killed_process_has_no_step_twice(run: LoggedRun, tmp_path: Path) -> None:
    killed = CSVLogger(tmp_path)
    killed.start(run)
    for step in (10, 20, 30):
        killed.metrics(run, step, {"loss": 1 / step})
    with killed.path(run).open("a") as file:
        file.write("20,accuracy/task_0,9")  # it was killed while it wrote 90.0
    killed.close()
    again = CSVLogger(tmp_path)
    resumed = replace(run, done=20)
    again.start(resumed)
    again.metrics(resumed, 30, {"loss": 1 / 30})
    again.end(resumed, "finished")
    assert read_csv(again.path(run)) == [(10, "loss", 0.1), (20, "loss", 0.05), (30, "loss", 1 / 30)]


@pytest.mark.parametrize(
    "arguments",
    [{"log": "tensorbord"}, {"log": ["csv", 3]}, {"log": [Memo]}, {"log": "csv", "log_every": 0}],
)
def test_invalid_loggers_are_rejected(stream: bench.Stream, tmp_path: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        bench.run(stream, runs=tmp_path / "runs", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_missing_library_is_named_before_anything_is_written(
    stream: bench.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf'{name}.*pip install "contnorm\[{name}\]"'):
        bench.run(stream, runs=tmp_path / "runs", log=name)
    assert not list(tmp_path.iterdir())


def test_logs_are_next_to_the_runs_unless_named(stream: bench.Stream, tmp_path: Path) -> None:
    bench.run(stream, runs=tmp_path / "a" / "runs", log="csv", settings={"train.max_steps": 2})
    bench.run(stream, log="csv", log_dir=tmp_path / "b", settings={"train.max_steps": 2})
    for folder in (tmp_path / "a" / "runs-logs" / "csv", tmp_path / "b"):
        assert len(list(folder.rglob("*.csv"))) == 1
