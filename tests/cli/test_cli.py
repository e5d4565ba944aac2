"""The program as a user types it: a process, and one line with exit code 2 for a mistake, which writes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Contnorm
from tests.datasets import small_mnist


def in_a_process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contnorm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, **variables})


@pytest.mark.slow
def test_run_in_a_process(tmp_path: Path) -> None:
    small_mnist(tmp_path / "data")
    options = ("--norm", "bn", "--strategy", "single", "--seeds", 2, "--max-steps", 4, "--runs", tmp_path / "runs")
    done = in_a_process("run", *options, "--set", "stream.train_per_task=40", "--data-root", tmp_path / "data")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recorded in") == 2 and "ACC" in done.stdout
    assert len(list((tmp_path / "runs").rglob("[01].json"))) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--norm", "cn", "--groups", "7"), "groups=7 does not divide the 100 channels"),
        (("run", "--seeds", "0"), "--seeds 0: use "),
        (("run", "--seeds", "2", "--seed", "1"), "--seed 1 and --seeds 2: use one of them"),
        (("run", "--set", "stream.tasks=1,2"), "scores on different tasks can't be compared"),
        (("run", "--launcher", "slurm"), "unknown launcher 'slurm'"),
        (("run", "--nosuch"), "No such option: --nosuch. See `contnorm run --help`."),
        (("run", "--learning-rate", "1"), "No such option: --learning-rate. Use --lr."),
        (("run", "--epochs", "1"), "No such option: --epochs. Use --set train.passes=VALUE."),
        (("tune", "table2", "--buffer", "50"), "memory.size can't be set with a recipe"),
        (("rum",), "No such command 'rum'. Did you mean 'run'"),
        (("diagnose",), "Missing argument"),
        (("resume", "nowhere"), "no stopped run under nowhere"),
    ],
)
def test_mistake_is_one_line_and_writes_nothing(
    contnorm: Contnorm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = contnorm(*arguments)
    *notices, line = err.splitlines()
    assert code == 2 and not out and line.startswith("contnorm: ") and message in line
    assert all("5,000 digits" in notice for notice in notices) and not list(tmp_path.iterdir())
