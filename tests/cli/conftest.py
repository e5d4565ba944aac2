"""Fixtures for the tests of commands: a console that prints to memory, and calls of the program in this process."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from contnorm.cli.main import main

Contnorm = Callable[..., tuple[int, str, str]]  # returns exit code, output and errors


@pytest.fixture
def console() -> Console:
    """A console that is 200 columns wide."""
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def contnorm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Contnorm:
    """Call the program with command-line arguments; returns exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["contnorm", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
