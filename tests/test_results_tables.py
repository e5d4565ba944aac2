"""The tables under docs/results are those of the records that were kept, and every one of them can be found."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from contnorm.bench import load_runs
from contnorm.report.recipe_records import RecordFolders
from contnorm.report.report import MADE, collect_report, report_files

ROOT = Path(__file__).resolve().parent.parent
RESULTS, RECORDS = ROOT / "docs" / "results", ROOT / "docs" / "records" / "runs"
AGAIN = "make them again: contnorm report --runs docs/records/runs --format md -o docs/results"
# Tables of our own beside the paper's: the folder of the files and the name of the archive, and the recipe.
OWN = {"cocoseq-mini": "examples/cocoseq_mini.toml"}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return report_files(collect_report(RecordFolders([RECORDS])), "md")


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_tables_of_our_own_are_those_of_their_records(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a table names its file as it was asked for
    report = collect_report(RecordFolders([RECORDS.parent / f"{name}.jsonl.gz"]), [OWN[name]])
    folder = RESULTS / name
    index = (folder / "README.md").read_text()
    for file, text in report_files(report, "md").items():
        assert (folder / file).read_text() == text, f"made again by the command in {folder / 'README.md'}"
        assert f"({file})" in index
    assert f"({name}/README.md)" in (RESULTS / "README.md").read_text()


@pytest.mark.slow
def test_tables_are_those_of_the_records(made: dict[str, str]) -> None:
    kept = {path.name: text for path in RESULTS.glob("*.md") if (text := path.read_text()).startswith(MADE)}
    assert kept.keys() == made.keys(), AGAIN
    for name, text in made.items():
        assert kept[name] == text, f"docs/results/{name} is not what the records give; {AGAIN}"


@pytest.mark.slow
def test_every_record_can_be_read_and_obeys_the_identity_of_its_scores() -> None:
    """What was learned and is not known at the end was forgotten."""
    runs = load_runs(RECORDS)
    assert list(runs.problems) == []
    for record in runs:
        tasks = record.matrix.tasks
        scores = {name: record.score(name) for name in ("acc", "fm", "la")}
        assert scores["la"] - scores["acc"] <= (tasks - 1) / tasks * scores["fm"] + 1e-9


def test_every_table_is_linked_from_the_index(made: dict[str, str]) -> None:
    index = (RESULTS / "README.md").read_text()
    assert [name for name in made if f"({name})" not in index] == []
