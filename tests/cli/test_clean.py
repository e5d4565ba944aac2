"""`contnorm clean`: shows leftovers, asks at a terminal, and removes only what was confirmed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from contnorm.bench.engine.lock import RunLock
from tests.bench.test_leftovers import record, unfinished

Clean = Callable[..., tuple[int, str, str]]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A recorded run with checkpoints, and a stopped run."""
    record(tmp_path / "runs")
    unfinished(tmp_path / "runs", steps=2)
    unfinished(tmp_path / "runs", seed=1, steps=3)
    return tmp_path / "runs"


@pytest.fixture
def clean(runs: Path, contnorm: Clean, monkeypatch: pytest.MonkeyPatch) -> Clean:
    """Call the command; ``answers`` are typed at a terminal, which there is only if there are some."""

    def call(*arguments: str, answers: str = "") -> tuple[int, str, str]:
        replies = iter(answers)
        monkeypatch.setattr("contnorm.cli.clean._at_terminal", lambda: bool(answers))
        monkeypatch.setattr("typer.confirm", lambda question: print(question) or next(replies) == "y")
        called = contnorm("clean", runs, *arguments)
        assert not list(replies), "every answer was asked for"
        return called

    return call


def names(runs: Path) -> list[str]:
    return sorted(path.name for path in runs.glob("*/*"))


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["--dry-run", "--yes"]])
def test_without_terminal_nothing_is_removed(clean: Clean, runs: Path, arguments: list[str]) -> None:
    code, out, _ = clean(*arguments)
    assert code == 0 and "checkpoints of a recorded run" in out and "Would remove 1 leftover (" in out
    assert ("--yes" in out) == (not arguments) and "step 3" in out and f"contnorm resume {runs}" in out
    assert names(runs) == ["0.json", "0.unfinished", "1.unfinished"]


def test_yes_removes_leftovers_and_keeps_stopped_runs(clean: Clean, runs: Path) -> None:
    assert "Removed 1 leftover." in clean("--yes")[1]
    assert names(runs) == ["0.json", "1.unfinished"]
    assert "Removed 1 leftover." in clean("--yes", "--stopped")[1]
    assert names(runs) == ["0.json"] and "has no leftovers" in clean("--yes")[1]


@pytest.mark.parametrize(
    ("answers", "remaining"),
    [
        ("n", ["0.json", "0.unfinished", "1.unfinished"]),
        ("yn", ["0.json", "1.unfinished"]),
        ("yy", ["0.json"]),
    ],
)
def test_terminal_asks_first(clean: Clean, runs: Path, answers: str, remaining: list[str]) -> None:
    code, out, _ = clean(answers=answers)
    assert code == 0 and names(runs) == remaining
    assert out.index("recorded run") < out.index("Remove 1 leftover (")
    assert ("lose the progress" in out) == (answers != "n")


def test_run_in_progress_is_named(clean: Clean, runs: Path) -> None:
    lock = RunLock(next(runs.glob("*/1.unfinished")) / "lock")
    assert lock.acquire()
    assert "1 run in progress, by process" in clean("--yes", "--stopped")[1]
    assert names(runs) == ["0.json", "1.unfinished"]
    lock.release()


def test_foreign_file_is_reported(clean: Clean, runs: Path) -> None:
    (next(runs.glob("*/0.unfinished")) / "notes.txt").write_text("mine")
    _, _, err = clean("--yes")
    assert "notes.txt" in err and "0.unfinished" in names(runs)
