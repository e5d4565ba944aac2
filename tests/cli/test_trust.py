"""Code named in a file is executed only if the user names it on the command line, for every command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import Store
from contnorm.bench.user_code import load_user_code, only_trusted
from contnorm.cli.main import app
from contnorm.errors import UserError
from tests.datasets import small_mnist

CPU = torch.device("cpu")
STREAM = {"name": "permuted-mnist", "train_per_task": 60, "tasks": 2}
CODE = """
from pathlib import Path
from torch import nn
from contnorm.bench.strategies.base import Single

with Path(__file__).with_suffix(".executed").open("a") as marker:
    marker.write("once more")

class Mine(Single):
    pass

def make(shape, outputs, norm):
    return nn.Sequential(nn.Conv2d(1, 4, 5, stride=4), norm(4), nn.Flatten(), nn.Linear(144, outputs))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def executed(code: Path) -> bool:
    marker = code.with_suffix(".executed")
    there = marker.is_file()
    marker.unlink(missing_ok=True)
    return there


def contnorm(*arguments: object) -> int:
    code = app([*map(str, arguments)], prog_name="contnorm", standalone_mode=False)
    return code if isinstance(code, int) else 0


def test_diagnose_executes_only_trusted_code(root: Path, tmp_path: Path, code: Path) -> None:
    small = ("--set", "stream.train_per_task=60", "--set", "stream.tasks=2", "--strategy", "single", "--norm", "bn")
    where = ("--data-root", root, "--runs", tmp_path / "runs")
    assert contnorm("run", *small, *where, "--keep-weights", "--set", f"model.name={code}:make") == 0
    assert executed(code), "a name among the settings of this call is permission"
    (folder,) = (tmp_path / "runs").iterdir()
    with pytest.raises(UserError, match=f"--trust-code {code}"):
        contnorm("diagnose", folder, *where)
    assert not executed(code)
    contnorm("diagnose", folder, *where, "--trust-code", code)
    assert executed(code)
    weights = next(folder.glob("*.safetensors"))
    contnorm("diagnose", "--model", f"{code}:make", "--weights", weights, "--stream", "split-mnist", *where)
    assert executed(code)


RECIPE = """
title = "mine"
[scores]
ACC = "acc"
[[runs]]
streams = ["permuted-mnist"]
strategies = ["{code}:Mine"]
norms = ["bn"]
settings = {{ stream = {{ train_per_task = 20, tasks = 2 }} }}
"""


@pytest.mark.parametrize("command", [("paper",), ("paper", "--list"), ("tune",)])
def test_code_named_in_recipe_is_not_trusted(root: Path, tmp_path: Path, code: Path, command: tuple[str, ...]) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(RECIPE.format(code=code))
    typed = (*command, recipe, "--data-root", root, "--runs", tmp_path / "runs", "--seeds", 1)
    with pytest.raises(UserError, match="--trust-code" if command != ("tune",) else "has no validation tasks"):
        contnorm(*typed)
    assert not executed(code)
    if command == ("paper",):
        assert contnorm(*typed, "--trust-code", code) == 0
        assert executed(code)


def test_code_named_in_settings_file_is_not_trusted(root: Path, tmp_path: Path, code: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[strategy]\nname = "{code}:Mine"\n[norm]\nname = "bn"\n[stream]\ntrain_per_task = 20\ntasks = 2\n'
    )
    typed = ("run", "--config", settings, "--data-root", root, "--runs", tmp_path / "runs")
    with pytest.raises(UserError, match="--trust-code"):
        contnorm(*typed)
    assert not executed(code)
    assert contnorm(*typed, "--trust-code", code) == 0
    assert executed(code)


@pytest.mark.slow
def test_worker_processes_execute_only_trusted_code(root: Path, tmp_path: Path, code: Path) -> None:
    place = RunOptions(runs=tmp_path / "runs", data_root=root, lanes=2)
    config = resolve({"stream": STREAM, "norm": {"name": "bn"}, "strategy": {"name": f"{code}:Mine"}}, root)
    with only_trusted([code]):
        list(execute([Run(config, 0), Run(config, 1)], place))
    assert len(list(Store(place.runs))) == 2


def test_control_characters_in_names_are_escaped() -> None:
    with only_trusted(()), pytest.raises(UserError) as error:
        load_user_code("a\x1b[2J; rm -r b.py:Mine", "strategy")
    assert str(error.value).isprintable()


def test_file_is_trusted_by_absolute_path(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with only_trusted([Path("mine.py")]):
        assert load_user_code(f"{code}:Mine", "strategy")
    with only_trusted([Path("other.py")]), pytest.raises(UserError, match="--trust-code"):
        load_user_code("mine.py:Mine", "strategy")
    with pytest.raises(UserError, match=r"--trust-code nowhere\.py: there is no such file"):
        contnorm("run", "--trust-code", "nowhere.py")


def test_tilde_in_name_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("home", "work/~"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "mine.py").write_text(f"Mine = {folder!r}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    with only_trusted([tmp_path / "home" / "mine.py"]), pytest.raises(UserError, match="--trust-code"):
        load_user_code("~/mine.py:Mine", "strategy")
