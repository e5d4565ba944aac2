"""The tables under docs/results are those of the records, and every one of them is linked."""

from pathlib import Path

import pytest

from contnorm.report import collect_report, write_report
from contnorm.report.tables import MADE

ROOT = Path(__file__).resolve().parent.parent
RESULTS, RECORDS = ROOT / "docs" / "results", ROOT / "docs" / "records"
# Where the tables are, with their records and recipe; the folder has the paper's tables.
MADE_FROM = {"": ("runs", None), "cocoseq-mini.md": ("cocoseq-mini.jsonl.gz", "examples/cocoseq_mini.toml")}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE_FROM)
def test_tables_are_those_of_the_records(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a table names its file as it was asked for
    records, recipe = MADE_FROM[name]
    report = collect_report(RECORDS / records, [recipe] if recipe else [])
    assert report.runs.problems == []
    index = (RESULTS / "README.md").read_text()
    for made in write_report(report, tmp_path / (name or "made")):
        kept = (RESULTS / made.name).read_text()
        assert kept.startswith(MADE) and kept == made.read_text(), f"{made.name}: make it by the command in README.md"
        assert f"({made.name})" in index
