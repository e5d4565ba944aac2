"""The tables under docs/results are those of the records, and every one of them is linked."""

from __future__ import annotations

from pathlib import Path

import pytest

from contnorm.report.report import collect_report, write_report
from contnorm.report.tables import MADE

ROOT = Path(__file__).resolve().parent.parent
RESULTS, RECORDS = ROOT / "docs" / "results", ROOT / "docs" / "records"
# Folder of the tables, records and recipe; the first has the paper's tables.
MADE_FROM = {"": ("runs", None), "cocoseq-mini": ("cocoseq-mini.jsonl.gz", "examples/cocoseq_mini.toml")}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE_FROM)
def test_tables_are_those_of_the_records(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a table names its file as it was asked for
    records, recipe = MADE_FROM[name]
    report = collect_report(RECORDS / records, [recipe] if recipe else [])
    assert report.runs.problems == []
    made = {file.name: file.read_text() for file in write_report(report, tmp_path / "made")}
    kept = {path.name: text for path in (RESULTS / name).glob("*.md") if (text := path.read_text()).startswith(MADE)}
    again = f"make them again by the command in {RESULTS / name / 'README.md'}"
    assert kept.keys() == made.keys(), again
    for file, text in made.items():
        assert kept[file] == text, f"{file} is not what the records give; {again}"
    index = (RESULTS / name / "README.md").read_text()
    assert [file for file in made if f"({file})" not in index] == []
