"""The demo script: invalid arguments, and interruption."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from contnorm.bench.api import execution as running

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("first_table")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "seeds=0: use"),
        (["--lanes", "0"], "lanes=0: use 1 or more"),
        (["--seeds", "1", "--lanes", "1", "--runs", "file"], "a run can't be kept there"),
    ],
)
def test_invalid_argument_is_reported_in_one_line(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(SystemExit) as exit_info:
        demo.main(arguments)
    *notices, error = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and message in error
    assert all("5,000 digits" in notice for notice in notices)


def test_interruption_says_how_to_continue(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> Iterator[object]:
        os.kill(os.getpid(), signal.SIGINT)
        yield from ()

    monkeypatch.setattr(running, "execute", interrupted)
    with pytest.raises(SystemExit) as exit_info:
        demo.main(["--seeds", "1", "--runs", str(tmp_path), "--data-root", str(tmp_path)])
    captured = capsys.readouterr()
    assert exit_info.value.code == 130 and "one pass, 1 seed " in captured.out
    assert "Run it again to continue." in captured.err and "resume" not in captured.out
