"""Records that are named twice, scores that were not measured, settings files, and warnings of a comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.schema import from_dict, read_toml
from contnorm.bench.records import Store, seal_of
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


def rewrite(path: Path, **changes: Any) -> None:
    """Change a record, with a new seal where it has one."""
    raw = {**json.loads(path.read_text()), **changes}
    if "seal" in raw:
        raw["seal"] = seal_of(raw)
    path.write_text(json.dumps(raw))


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


def test_compare_warns_of_different_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    configs = [from_dict({"train": {"max_steps": steps}}) for steps in (5, 100, 101)]
    for config, tasks in zip(configs, (1, 2, 2), strict=True):
        correct = [[9 if j <= i else None for j in range(tasks)] for i in range(tasks)]
        store.save(config, 0, {"matrix": {"correct": correct, "total": [10] * tasks, "before": None}})
    few, more, same = (config.hash for config in configs)
    assert call(monkeypatch, "compare", few, more, "--runs", tmp_path) == 0
    assert "did not use the same data" in capsys.readouterr().out
    assert call(monkeypatch, "compare", more, same, "--runs", tmp_path) == 0
    assert "different tasks" not in capsys.readouterr().out


def test_compare_warns_of_other_data_of_any_seed(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(monkeypatch, "compare", BN, CN, "--runs", runs) == 0
    assert "warning" not in capsys.readouterr().out
    path = runs / CN / "2.json"
    source = json.loads(path.read_text())["source"]
    rewrite(path, source={**source, "fingerprint": "0" * len(source["fingerprint"])})
    assert call(monkeypatch, "compare", BN, CN, "--runs", runs) == 0
    assert "did not use the same data" in capsys.readouterr().out
