"""The demo script: its tables are those of the records, which a second call reuses."""

import functools
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("first_table")


@pytest.mark.slow
def test_tables_have_published_numbers_and_records_are_reused(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two seeds on a quarter of the included digits: a notice, and the rows in the order of the paper."""
    short = functools.partial(demo.bench.load_stream, train_per_task=500, test_per_task=300)
    monkeypatch.setattr(demo.bench, "load_stream", short)
    arguments = ["--runs", str(tmp_path / "runs"), "--data-root", str(tmp_path), "--seeds", "2", "--lanes", "1"]
    demo.main(arguments)
    printed = capsys.readouterr().out
    assert "included 5,000 digits" in printed and "1,000 test digits" in printed
    rows = {tuple(line.split()[:2]): line.split() for line in printed.splitlines() if line.count("±") == 3}
    acc = {key: float(row[2]) for key, row in rows.items()}
    assert list(acc) == [(strategy, norm) for strategy in ("Single", "ER") for norm in ("BN", "BN*", "CN")]
    assert acc["Single", "BN*"] > acc["Single", "BN"] > 65 and acc["ER", "BN"] > acc["Single", "BN"]
    assert rows["ER", "BN*"][5] == "81.75" and rows["ER", "CN"][5] == "-", "the published value is next to ours"
    assert len([line for line in printed.splitlines() if line.count("±") == 4]) == 2, "two rows of distances"
    assert len(list((tmp_path / "runs").glob("*/*.json"))) == 8
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
    demo.main(arguments)
    assert capsys.readouterr().out.splitlines()[:-1] == printed.splitlines()[:-1]
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*.json")}
