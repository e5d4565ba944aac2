"""Code named in a file is executed only if the user names it on the command line, for every command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contnorm.bench.engine.run_dir import RunDir
from rich.console import Console

from contnorm.bench.api import execution as running
from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.records import Store
from contnorm.bench.user_code import load_user_code, only_trusted
from contnorm.cli.main import app
from contnorm.errors import UserError
from tests.cli.terminal import exit_code, printed
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


def stopped(root: Path, runs: Path, **groups: dict[str, Any]) -> RunDir:
    config = resolve({"stream": STREAM, "norm": {"name": "bn"}, **groups}, root)
    *_, last = execute([Run(config, 0)], RunOptions(runs=runs, data_root=root), stop=lambda: True)
    assert isinstance(last.what, Stopped)
    return RunDir.of(last.job, Store(runs))


@pytest.mark.parametrize("kind", ["strategy", "model"])
def test_resume_skips_runs_of_untrusted_code(
    root: Path, tmp_path: Path, code: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    runs = tmp_path / "runs"
    mine = stopped(root, runs, **{kind: {"name": f"{code}:{'Mine' if kind == 'strategy' else 'make'}"}})
    other = stopped(root, runs)
    executed(code)
    assert contnorm("resume", runs, "--data-root", root) == 2
    assert not executed(code) and other.record.is_file() and not mine.record.exists()
    (problem,) = caplog.messages
    assert str(mine.folder) in problem and f"--trust-code {code}" in problem
    assert contnorm("resume", runs, "--data-root", root, "--trust-code", code) == 0
    assert executed(code) and mine.record.is_file()


def forged(root: Path, runs: Path, **model: str) -> RunDir:
    """The note of a run that names files without their hashes, in its right place."""
    config = resolve({"stream": STREAM, "norm": {"name": "bn"}}, root)
    job = Run(replace(config, model=replace(config.model, **model)), 0)
    left = RunDir.of(job, Store(runs))
    left.write_note(job, RunOptions(runs=runs, data_root=root), "")
    return left


def test_resume_rejects_run_without_code_or_weights_hash(root: Path, tmp_path: Path, code: Path) -> None:
    left = forged(root, tmp_path / "runs", name=f"{code}:make")
    with pytest.raises(UserError, match="--trust-code"):
        contnorm("resume", tmp_path, "--data-root", root)
    with pytest.raises(UserError, match=r"model\.code is missing"):
        contnorm("resume", tmp_path, "--data-root", root, "--trust-code", code)
    assert not executed(code)
    left.clear()
    forged(root, tmp_path / "runs", weights=str(tmp_path / "elsewhere.pt"))
    with pytest.raises(UserError, match=r"model\.weights_hash is missing"):
        contnorm("resume", tmp_path, "--data-root", root)


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


def test_stop_prints_resume_command_with_trusted_files(
    root: Path, tmp_path: Path, code: Path, console: Console
) -> None:
    config = resolve({"stream": STREAM, "norm": {"name": "bn"}, "strategy": {"name": f"{code}:Mine"}}, root)
    place = RunOptions(runs=tmp_path / "runs", data_root=root)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(running, "execute", lambda jobs, where, stop, prepare: execute(jobs, where, lambda: True))
        exit_code([Run(config, 0)], place, console)
    assert f"contnorm resume {place.runs} --trust-code {code}" in printed(console)


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
        contnorm("resume", tmp_path, "--trust-code", "nowhere.py")


def test_tilde_in_name_is_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("home", "work/~"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "mine.py").write_text(f"Mine = {folder!r}\n")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    with only_trusted([tmp_path / "home" / "mine.py"]), pytest.raises(UserError, match="--trust-code"):
        load_user_code("~/mine.py:Mine", "strategy")
