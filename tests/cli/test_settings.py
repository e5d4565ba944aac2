"""Settings of the command line: precedence of flags, ``--set`` and a file, and contradictions."""

from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from contnorm import bench
from contnorm.bench.config.defaults import apply_defaults
from contnorm.bench.config.schema import from_dict, with_setting
from contnorm.cli import run as run_command
from contnorm.cli.main import app
from contnorm.errors import UserError

FILE = "--config FILE"


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


@pytest.mark.parametrize(
    ("arguments", "setting", "value"),
    [
        ((FILE, "--norm", "cn"), "norm.name", "cn"),  # a default of the option
        ((FILE, "--stream", "permuted-mnist"), "stream.name", "permuted-mnist"),
        ((FILE, "--stream", "permuted-mnist"), "strategy.name", "derpp"),
        ((FILE, "--set", "norm.name=ln"), "norm.name", "ln"),
        ((FILE, "--set", "norm.name=ln"), "norm.groups", 10),
        (("--set", "norm.name=bn"), "norm.name", "bn"),
        (("--norm", "cn8", "--groups", "8"), "norm.groups", 8),
        (("--lr", "0.2", "--set", "train.lr=0.1", "--set", "train={batch=5}"), "train.lr", 0.1),
        (("--batch", "6", "--set", "train={lr=0.5}"), "train.batch", 6),
        (("--max-steps", "9", "--set", "train.max_steps=none"), "train.max_steps", None),
    ],
)
def test_set_overrides_options_and_these_override_a_file(
    merged: Any, file: str, arguments: tuple[str, ...], setting: str, value: object
) -> None:
    config = merged(*(f"--config={file}" if given is FILE else given for given in arguments))
    assert attrgetter(setting)(config) == value


@pytest.mark.parametrize("command", [("run",), ("paper", "--list"), ("tune", "table2"), ("data",)])
def test_missing_data_root_is_rejected(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTNORM_DATA", str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r"absent: does not exist"):
        app([*command], standalone_mode=False)
