"""The `export` command, and the options of `run` and `resume` for loggers."""

from __future__ import annotations

import csv
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from contnorm.bench.loggers import CSVLogger
from tests.committed_records import copy_run
from tests.datasets import small_mnist

BN, CN = "ba9df79f047e", "85d5f7c04f8c"
Result = tuple[int, str, str]


@pytest.fixture(autouse=True)
def current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_selected_runs_are_written(tmp_path: Path, contnorm: Callable[..., Result]) -> None:
    for run in (BN, CN):
        copy_run(run, tmp_path / "runs", seeds=(0, 1, 2))
    code, out, err = contnorm(
        "export", "runs", "--to", "csv", "--where", "norm=cn", "--where", "seed<2", "-o", "cn.csv"
    )
    assert (code, err) == (0, "") and "2 finished and 0 diverged runs exported to cn.csv and cn-accuracy.csv" in out
    assert [(row["norm.name"], row["seed"]) for row in rows(tmp_path / "cn.csv")] == [("cn", "0"), ("cn", "1")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs", "--to", "excel"], ["'excel'", "csv", "parquet", "mlflow"]),
        (["nothing", "--to", "csv"], ["nothing", "no such file"]),
        (["runs", "--to", "csv", "--where", "nrom=cn"], ["nrom", "norm"]),
        (["runs", "--to", "csv", "-o", "runs"], ["runs", "exists"]),
        (["runs", "--to", "csv", "--where", "lr=0.5"], ["No run has lr=0.5; train.lr is 0.0"]),
        (["runs"], ["--to"]),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, contnorm: Callable[..., Result], arguments: list[str], words: list[str]
) -> None:
    copy_run(CN, tmp_path / "runs", seeds=(0,))
    code, out, err = contnorm("export", *arguments)
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and all(word in err for word in words)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_broken_record_is_named(tmp_path: Path, contnorm: Callable[..., Result]) -> None:
    folder = copy_run(CN, tmp_path / "runs", seeds=(0, 1))
    (folder / "1.json").write_text("{}")
    code, out, err = contnorm("export", "runs", "--to", "json")
    assert code == 2 and "1 finished" in out and "1.json" in err


@pytest.mark.slow
def test_run_and_resume_write_one_log(
    tmp_path: Path, contnorm: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small_mnist(tmp_path / "data")
    arguments = ["run", "--stream", "split-mnist", "--set", "stream.tasks=2", "--data-root", root, "--log", "csv"]
    assert contnorm(*arguments, "--log-every", "2", "--runs", "whole")[0] == 0
    real = CSVLogger.metrics

    def interrupt(self: CSVLogger, run: object, step: int, values: object) -> None:
        real(self, run, step, values)  # type: ignore[arg-type]
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CSVLogger, "metrics", interrupt)
        code, out, _ = contnorm(*arguments, "--log-every", "2", "--log-dir", "my logs", "--runs", "stopped")
    hint = "contnorm resume stopped --log csv --log-every 2 --log-dir 'my logs'"
    assert code == 130 and hint in out
    code, out, err = contnorm(*shlex.split(hint)[1:])
    assert code == 0, err
    (whole,), (resumed,) = (list((tmp_path / name / "csv").glob("*/0.csv")) for name in ("whole-logs", "my logs"))
    metrics = [
        [tuple(row.values()) for row in rows(path) if not row["metric"].startswith("system/")]
        for path in (whole, resumed)
    ]
    assert metrics[0] == metrics[1] and len(metrics[0]) > 10


def test_unknown_logger_is_one_line(contnorm: Callable[..., Result], tmp_path: Path) -> None:
    code, _, err = contnorm("run", "--stream", "split-mnist", "--set", "stream.source=digits", "--log", "tensorbord")
    assert code == 2 and "'tensorbord'" in err and "tensorboard" in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
