"""``contnorm data add``: the user's images and arrays become a stream."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from contnorm import bench
from contnorm.cli.main import app
from contnorm.errors import UserError


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "blobs.npz", x=rng.normal(size=(80, 6)), y=np.arange(80) % 4)
    return tmp_path / "blobs.npz"


def output(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.output


def test_add_show_and_run(npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = ("--data-root", tmp_path / "root")
    added = output("data", "add", "blobs", "--npz", npz, "--tasks", "0,3;1,2", "--test-share", "0.25", *root)
    assert "60 training and 20 test samples of shape 6" in added and "task 0: 0, 3" in added
    command = next(line for line in added.splitlines() if line.startswith("run it: "))
    assert command == f"run it: contnorm run --stream blobs --data-root {tmp_path / 'root'}"
    assert "blobs (80 samples)" in output("data", *root)
    assert "task 1: 1, 2" in output("data", "blobs", *root)
    listing = bench.available(tmp_path / "root")["streams"]["blobs"]
    assert listing == ("2 tasks, 80 samples of 4 classes", str(tmp_path / "root"))
    assert "80 samples of 4 classes" in " ".join(output("ls", "streams", *root).split())
    run = output(
        "run", "--stream", "blobs", "--norm", "cn", "--strategy", "er", "--set", "memory.kind=reservoir", *root
    )
    assert "blobs er cn seed 0: recorded in" in run


def test_commands_name_added_data_alike(npz: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress, tables, logs, sweeps and selections have the name of the data, not that of the kind of stream."""
    monkeypatch.chdir(tmp_path)
    output("data", "add", "blobs", "--npz", npz, "--tasks", "2")
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef make(shape, outputs):\n"
        "    return nn.Sequential(nn.Linear(shape[0], 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))\n"
    )
    options = ("--stream", "blobs", "--norm", "bn", "--model", "nets.py:make", "--lanes", "1")
    run = output("run", *options, "--lr", "0.03", "--log", "tensorboard")
    assert [path.name.rpartition("-")[0] for path in tmp_path.glob("runs-logs/tensorboard/*")] == ["blobs-er-bn"]
    assert "blobs er bn seed 0" in run and "model.name=nets.py:make" in run
    assert "blobs: acc on the test samples" in output("sweep", *options, "--lr", "0.03,0.1", "--seeds", "1")
    shown = output("show", "--where", "stream=blobs", "--columns", "stream,lr", "--sort", "lr")
    assert shown.split()[2:] == ["blobs", "0.03", "blobs", "0.1"]
    assert len(bench.load_runs("runs").where(stream="blobs", model="nets.py:make")) == 2
    assert bench.load_stream("blobs").name == "blobs"
    with pytest.raises(UserError, match=r"no record has 'dogs'. There are arrays, blobs\."):
        bench.load_runs("runs").where("stream=dogs")


def test_classes_in_no_task_are_named(npz: Path, tmp_path: Path) -> None:
    added = output("data", "add", "blobs", "--npz", npz, "--tasks", "0;2", "--data-root", tmp_path / "root")
    assert "task 1: 2" in added and "in no task: 1, 3" in added


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("add",), "give the data set a name"),
        (("add", "blobs"), "either --folder DIR or --npz FILE"),
        (("add", "blobs", "--npz", "a.npz", "--folder", "b"), "either --folder DIR or --npz FILE"),
        (("add", "blobs", "--npz", "missing.npz", "--tasks", "2"), "there is no such file"),
        (("add", "blobs", "--npz", "NPZ"), "tasks is missing"),
        (("add", "blobs", "--npz", "NPZ", "--tasks", "9"), "1 to 4 tasks"),
        (("add", "blobs", "--npz", "NPZ", "--tasks", "0,7"), "there is no class 7"),
        (("add", "blobs", "--npz", "NPZ", "--tasks", "2", "--fetch"), "--fetch: is not for `contnorm data add`"),
        (("mnist", "--npz", "NPZ"), "--npz: is for `contnorm data add NAME`"),
        (("mnist", "digits"), "digits: unexpected argument"),
    ],
)
def test_bad_input_gives_one_line(npz: Path, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    words = [str(npz) if word == "NPZ" else word for word in arguments]
    (tmp_path / "root").mkdir()
    with pytest.raises(UserError, match=message) as error:
        output("data", *words, "--data-root", tmp_path / "root")
    assert "\n" not in str(error.value) and list((tmp_path / "root").iterdir()) == []


def test_misspelt_name_of_added_data_is_suggested(npz: Path, tmp_path: Path) -> None:
    root = ("--data-root", tmp_path / "root")
    output("data", "add", "flowers", "--npz", npz, "--tasks", "2", *root)
    with pytest.raises(UserError, match=r"unknown stream 'flower'\. Did you mean 'flowers'\? There are: .*, flowers\."):
        output("run", "--stream", "flower", *root)
