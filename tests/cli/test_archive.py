"""The archive command, and archives as the runs of other commands."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from contnorm.bench.records import Store
from tests.committed_records import COARSE_GRID, RUNS, copy_run
from tests.datasets import small_mnist

BN, CN, BRN = "ba9df79f047e", "85d5f7c04f8c", "634f63758def"
Result = tuple[int, str, str]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for run in (BN, CN, BRN):
        copy_run(run, tmp_path / "runs")
    return tmp_path / "runs"


def test_archive_command_writes_all_records(runs: Path, tmp_path: Path, contnorm: Callable[..., Result]) -> None:
    out = tmp_path / "new" / "all.jsonl.gz"
    code, text, error = contnorm("archive", runs, "-o", out)
    finished = len(Store(runs).load_all().records)
    assert (code, error) == (0, "") and f"{finished} finished and 1 diverged runs written to {out}" in text
    written = out.stat().st_mtime_ns
    code, text, error = contnorm("archive", runs, "-o", out)
    assert code == 0 and "already in" in text and out.stat().st_mtime_ns == written
    (runs / BN / "0.json").unlink()
    code, text, error = contnorm("archive", runs, "-o", out)
    assert code == 2 and "--force" in error and error.count("\n") == 1
    code, text, error = contnorm("archive", runs, "-o", out, "--force")
    assert code == 0 and f"{finished - 1} finished" in text


def test_archive_command_reports_problems(runs: Path, tmp_path: Path, contnorm: Callable[..., Result]) -> None:
    (runs / BN / "0.json").write_text("{")
    copy_run(CN, runs / "table3")
    code, text, error = contnorm("archive", runs, "-o", tmp_path / "all.jsonl.gz")
    lines = error.splitlines()
    assert code == 2 and "written to" in text and len(lines) == 3
    assert "0.json: is not a valid record" in lines[0] and str(runs / "table3") in lines[1] and "incomplete" in lines[2]
    assert not Store(tmp_path / "all.jsonl.gz").load_all().problems


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none", "-o", "all.jsonl.gz"), "there is no such file or folder"),
        (("empty", "-o", "all.jsonl.gz"), "no valid records"),
        (("runs", "-o", "all.json"), ".jsonl.gz"),
        (("runs", "-o", "file/all.jsonl.gz"), "can't be written"),
    ],
)
def test_archive_command_with_invalid_paths(
    runs: Path,
    tmp_path: Path,
    contnorm: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    code, _, error = contnorm("archive", *arguments)
    assert code == 2 and words in error and error.count("\n") == 1


@pytest.mark.slow
def test_commands_print_the_same_for_an_archive(runs: Path, tmp_path: Path, contnorm: Callable[..., Result]) -> None:
    archive = tmp_path / "all.jsonl.gz"
    contnorm("archive", runs, "-o", archive)
    mixed = tmp_path / "mixed"
    copy_run(CN, mixed)
    for run in (BN, BRN):
        copy_run(run, tmp_path / "part")
    contnorm("archive", tmp_path / "part", "-o", mixed / "part.jsonl.gz")

    def outputs(path: Path) -> list[str]:
        results = [
            contnorm("show", "--runs", path),
            contnorm("show", path),
            contnorm("show", BN[:6], "--runs", path),
            contnorm("show", "--by-task", "--runs", path),
            contnorm("compare", BN, CN, "--runs", path),
            contnorm("report", "--runs", path, "--format", "md", "--table", "table2"),
            contnorm("report", "--runs", path, "--format", "csv", "--part", "runs"),
            contnorm("paper", "table2", "--runs", path, "--data-root", tmp_path, "--only", "norm=cn"),
        ]
        assert [code for code, _, _ in results] == [0] * len(results), results
        return [out for _, out, _ in results]

    expected = outputs(runs)
    assert outputs(archive) == expected
    rows = [sorted(text.splitlines()) for text in outputs(mixed)]
    assert rows == [sorted(text.splitlines()) for text in expected]


def test_damaged_archive_is_reported_by_every_command(
    runs: Path, tmp_path: Path, contnorm: Callable[..., Result]
) -> None:
    archive = tmp_path / "all.jsonl.gz"
    contnorm("archive", runs, "-o", archive)
    lines = gzip.decompress(archive.read_bytes()).splitlines(keepends=True)
    lines[1] = b"{}\n"
    archive.write_bytes(gzip.compress(b"".join(lines)))
    for arguments in (
        ("show",),
        ("show", "--by-task"),
        ("compare", BN, CN),
        ("report", "--format", "md", "--table", "table2"),
    ):
        code, out, error = contnorm(*arguments, "--runs", archive)
        assert code == 0 and out and error.count("\n") == 1 and f"{archive}:2: " in error, arguments


@pytest.mark.parametrize("command", ["run", "resume", "tune", "paper"])
def test_commands_do_not_write_into_an_archive(tmp_path: Path, contnorm: Callable[..., Result], command: str) -> None:
    archive = tmp_path / "all.jsonl.gz"
    archive.write_bytes(COARSE_GRID.read_bytes())
    small_mnist(tmp_path / "data", train=400, test=100)
    arguments = {
        "run": ("run", "--norm", "bn", "--data-root", tmp_path / "data", "--runs", archive),
        "resume": ("resume", "--runs", archive),
        "tune": ("tune", "table2", "--stream", "split-cifar100", "--data-root", tmp_path, "--runs", archive),
        "paper": ("paper", "table1", "--data-root", tmp_path / "data", "--runs", archive, "--seeds", 1),
    }[command]
    code, _, error = contnorm(*arguments)
    assert code == 2 and str(archive) in error and "Traceback" not in error
    if command in ("run", "resume"):
        assert "read-only. Use a folder of runs." in error and error.count("\n") == 1
    assert archive.read_bytes() == COARSE_GRID.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl.gz", "data"]


def test_diagnose_needs_weights_that_an_archive_does_not_have(contnorm: Callable[..., Result]) -> None:
    code, _, error = contnorm("diagnose", BN, "--runs", RUNS)
    assert code == 2 and "archives have no weights" in error and error.count("\n") == 1


def test_committed_runs_are_shown_from_their_folder(contnorm: Callable[..., Result]) -> None:
    code, out, error = contnorm("show", "--runs", RUNS)
    assert code == 0 and error == "" and "1 of 5 seeds" in out
