"""Records that are named twice, scores that were not measured, settings files, and warnings of a comparison."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contnorm.bench.config.schema import read_toml
from contnorm.cli.main import main
from contnorm.report.paper import section_document
from contnorm.report.report import collect_report
from contnorm.report.tables import markdown
from tests.committed_records import copy_run

BN, CN = "ba9df79f047e", "85d5f7c04f8c"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in (BN, CN):
        copy_run(name, tmp_path / "runs")
    return tmp_path / "runs"


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["contnorm", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_show_counts_repeated_run_once(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for words in ([runs / BN], [runs / BN, runs / BN], [runs / BN, runs / BN / "0.json"]):
        assert call(monkeypatch, "show", *words) == 0
        tables.append(capsys.readouterr().out)
    assert len(set(tables)) == 1


RECIPE = """
title = "BN and CN"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["er"]
norms = ["bn"]
"""


def test_unmeasured_score_is_omitted(runs: Path, tmp_path: Path) -> None:
    """Forward transfer needs the accuracies before the first task, which these runs do not have."""
    path = tmp_path / "own.toml"
    path.write_text(RECIPE.replace("split-mnist", "split-cifar100").replace('"acc"', '"fwt"'))
    (section,) = collect_report(runs, [str(path)]).sections
    assert "| bn | 0 |" in markdown(section_document(section))


def test_settings_file_with_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nlr = 0.1\n")
    assert read_toml(path) == {"train": {"lr": 0.1}}
