"""`contnorm show` with --where, --sort, --columns and --format, and its line about unfinished runs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from contnorm.bench import load_runs
from contnorm.bench.config.schema import from_dict
from contnorm.bench.records import Store

LRS = {"bn": (0.03, 0.1), "cn": (0.03,)}

Show = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """bn at two learning rates and cn at one, on seeds 0 and 1; seed 2 of cn diverged."""
    store = Store(tmp_path / "runs")
    for norm, lrs in LRS.items():
        for lr in lrs:
            config = from_dict({"norm": {"name": norm}, "train": {"lr": lr}, "stream": {"source": "mnist"}})
            for seed in (0, 1):
                right = 50 + seed + (20 if norm == "cn" else 0) + (10 if lr == 0.1 else 0)
                store.save(config, seed, {"matrix": {"correct": [[90, None], [right, right]], "total": [100, 100]}})
    store.save_diverged(config, 2, "seed 2: the loss is nan.")
    return tmp_path / "runs"


@pytest.fixture
def show(runs: Path, contnorm: Show) -> Show:
    def call(*arguments: str) -> tuple[int, str, str]:
        return contnorm("show", *arguments, "--runs", runs)

    return call


def rows(out: str) -> list[list[str]]:
    lines = [line.split("  ") for line in out.splitlines()]
    return [[cell.strip() for cell in line if cell.strip()] for line in lines]


@pytest.mark.parametrize(
    ("sort", "norms"),
    [
        (["acc"], ["cn32", "bn 0.1", "bn 0.03"]),
        (["acc", "--reverse"], ["bn 0.03", "bn 0.1", "cn32"]),
        (["fm"], ["cn32", "bn 0.1", "bn 0.03"]),
        (["lr,acc"], ["cn32", "bn 0.03", "bn 0.1"]),
        (["norm,lr"], ["bn 0.03", "bn 0.1", "cn32"]),
    ],
)
def test_sort_orders_runs(show: Show, sort: list[str], norms: list[str]) -> None:
    code, out, _ = show("--sort", *sort, "--columns", "norm,lr")
    names = [norm if norm == "cn32" else f"{norm} {lr}" for norm, lr in rows(out)[1:4]]
    assert code == 0 and names == norms


def test_where_and_usual_table(show: Show) -> None:
    _, out, _ = show("--where", "norm=bn", "--where", "lr<0.1")
    assert rows(out)[0][4] == "lr" and rows(out)[1][3:5] == ["bn", "0.03"] and "cn" not in out
    _, out, _ = show("--where", "norm=cn")
    assert "1 of 3 seeds diverged" in out


def test_columns_have_settings_and_scores(show: Show) -> None:
    _, out, _ = show("--columns", "norm,train.lr,seeds,seed,acc,batch,bwt", "--sort", "acc", "--where", "norm=bn")
    head, first, second = rows(out)
    assert head == ["norm", "train.lr", "seeds", "seed", "acc", "batch", "bwt"]
    assert first[:6] == ["bn", "0.1", "2", "0, 1", "60.50 +- 0.71", "10"]
    assert second[6] == f"{50.5 - 90:.2f} +- {np.std([50, 51], ddof=1):.2f}"


def test_own_settings_of_a_strategy_are_selected_and_shown(show: Show, runs: Path) -> None:
    for temperature in (1.0, 2.0):
        config = from_dict({"strategy": {"name": "mine.py:Mine", "code": "0", "temperature": temperature}})
        Store(runs).save(config, 0, {"matrix": {"correct": [[5]], "total": [10]}})
    _, out, _ = show("--where", "temperature>1", "--columns", "strategy,temperature,acc")
    assert rows(out) == [["strategy", "temperature", "acc"], ["mine.py:Mine", "2.0", "50.00"]]
    _, out, _ = show("--columns", "temperature,norm", "--sort", "temperature")
    assert [row[0] for row in rows(out)[1:6]] == ["1.0", "2.0", "none", "none", "none"], "missing values are last"
    assert "strategy.temperature" in show("--format", "csv")[1].splitlines()[0]
    assert show("--where", "temperature!=2", "--format", "csv")[0] == 0


def test_csv_has_one_column_per_setting(show: Show, runs: Path) -> None:
    code, out, err = show("--format", "csv")
    table = list(csv.DictReader(io.StringIO(out)))
    frame = load_runs(runs).to_frame()
    assert code == 0 and not err and len(table) == len(frame) == 7 and list(table[0]) == list(frame.columns)
    assert {row["train.lr"] for row in table} == {"0.03", "0.1"} and {row["stream.scenario"] for row in table} == {
        "domain"
    }
    assert [row["acc"] for row in table] == ["" if math.isnan(acc) else str(acc) for acc in frame["acc"]]
    assert [row["status"] for row in table].count("diverged") == 1


def test_json_has_the_rows_of_csv(show: Show) -> None:
    _, out, _ = show("--format", "json", "--columns", "norm,lr,seed,acc,fwt", "--where", "lr=0.1")
    assert json.loads(out) == [
        {"norm.name": "bn", "train.lr": 0.1, "seed": seed, "acc": 60.0 + seed, "fwt": None} for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sort", "ac"], "--sort: unknown column 'ac'. Did you mean 'acc'"),
        (["--columns", "nrm"], "Did you mean 'norm'"),
        (["--columns", "norm,,acc"], "a name is missing"),
        (["--columns", "code"], "'code' is ambiguous"),
        (["--columns", "map"], "no selected run has the score 'map'"),
        (["--columns", "seeds", "--format", "csv"], "Use seed"),
        (["--where", "norm=cnn"], "Did you mean 'cn'"),
        (["--where", "lr=0.2"], "No run has lr=0.2; train.lr is 0.03 or 0.1"),
        (["--where", "norm"], "such as norm=cn"),
        (["--where", "seed=2"], "all runs with seed=2 diverged"),
        (["--format", "xml"], "'xml'"),
        (["--by-task", "--columns", "acc"], "--by-task"),
        (["--reverse"], "--sort"),
    ],
)
def test_mistakes_are_one_line(show: Show, arguments: list[str], words: str) -> None:
    code, out, err = show(*arguments)
    assert code == 2 and not out and words in err and err.count("\n") == 1


@pytest.mark.parametrize("selection", ["seed=2", "status=diverged"])
def test_diverged_runs_alone_are_rows_but_have_no_scores(show: Show, selection: str) -> None:
    arguments = ("--where", selection, "--format", "csv", "--columns")
    code, out, _ = show(*arguments, "norm,seed,status")
    assert code == 0 and out.splitlines() == ["norm.name,seed,status", "cn,2,diverged"]
    code, _, err = show(*arguments, "norm,acc")
    assert code == 2 and "no selected run has the score 'acc'. All of them diverged." in err


def test_folder_of_diverged_runs_is_a_table(tmp_path: Path, contnorm: Show) -> None:
    Store(tmp_path).save_diverged(from_dict({"norm": {"name": "cn"}}), 2, "seed 2: the loss is nan.")
    code, out, _ = contnorm("show", "--runs", tmp_path, "--format", "csv", "--columns", "norm,seed,status")
    assert code == 0 and out.splitlines()[1:] == ["cn,2,diverged"]


def stop(runs: Path, norm: str, seed: int) -> Path:
    config = from_dict({"norm": {"name": norm}})
    folder = runs / config.hash / f"{seed}.unfinished"
    folder.mkdir(parents=True)
    note: dict[str, Any] = {"schema": 3, "config": config.as_dict(), "seed": seed}
    (folder / "run.json").write_text(json.dumps(note))
    return folder


def test_unfinished_runs_are_counted_with_the_command(show: Show, runs: Path) -> None:
    stop(runs, "bn", 7)
    folder = stop(runs, "gn", 0)
    line = f"2 unfinished runs (2 stopped). Resume with: contnorm resume --runs {runs}"
    for arguments in ((), ("--sort", "acc"), ("--columns", "norm")):
        assert show(*arguments)[1].splitlines()[-1] == line
    _, out, err = show("--format", "csv")
    assert line in err and "unfinished" not in out
    assert "1 unfinished run (1 stopped)" in show("--where", "norm=bn")[1]
    assert "unfinished" not in show("--where", "norm=cn")[1]
    lock = FileLock(folder / "lock")
    assert lock.acquire()
    assert "2 unfinished runs (1 in progress, 1 stopped)" in show()[1]
    lock.release()


def test_folder_of_unfinished_runs_names_resume(tmp_path: Path, contnorm: Show) -> None:
    stop(tmp_path, "bn", 0)
    for arguments in ([], ["--sort", "acc"]):
        code, _, error = contnorm("show", *arguments, "--runs", tmp_path)
        assert code == 2 and f"contnorm resume --runs {tmp_path}" in error and error.count("\n") == 1


def test_unfinished_runs_of_a_named_folder_are_resumed_in_that_folder(
    show: Show, contnorm: Show, runs: Path, tmp_path: Path
) -> None:
    """The folder of --runs, which is not named, has nothing to resume."""
    stop(runs, "bn", 7)
    code, out, _ = contnorm("show", runs, "--runs", tmp_path / "other")
    assert code == 0
    assert out.splitlines()[-1] == f"1 unfinished run (1 stopped). Resume with: contnorm resume --runs {runs}"


@pytest.mark.parametrize("arguments", [[], ["--sort", "acc"]])
def test_named_folder_of_unfinished_runs_names_resume(tmp_path: Path, contnorm: Show, arguments: list[str]) -> None:
    folder = stop(tmp_path / "stopped", "bn", 0)
    resume = f"1 unfinished run (1 stopped). Resume with: contnorm resume --runs {tmp_path / 'stopped'}\n"
    for name in (tmp_path / "stopped", folder.parent):
        code, _, error = contnorm("show", name, *arguments, "--runs", tmp_path / "other")
        assert code == 2 and error == f"contnorm: no finished runs under {name}. {resume}"
    name = folder.parent.name[:6]
    for command in (("show", name, *arguments), ("compare", name, name)):
        code, _, error = contnorm(*command, "--runs", tmp_path / "stopped")
        assert code == 2 and error == f"contnorm: no finished run '{name}' under {tmp_path / 'stopped'}. {resume}"
