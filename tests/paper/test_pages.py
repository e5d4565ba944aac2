"""docs/howto/run-the-paper.md: what it shows is printed, and its example of a table runs as it says."""

import io
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from contnorm.bench.engine.run import RunOptions
from contnorm.cli.main import app
from contnorm.cli.paper import run_recipe
from contnorm.paper.cells import cells_of
from contnorm.paper.recipe import find_recipe, parse_recipe
from contnorm.paper.run import TableOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE, EXAMPLE = (ROOT / "docs" / "howto" / "run-the-paper.md").read_text().split("## Add a table")
(RECIPE,) = re.findall(r"^```toml\n(.*?)^```", EXAMPLE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^contnorm (.*)$", EXAMPLE, re.MULTILINE)


def test_shown_lines_are_printed(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    run_recipe("table1", TableOptions(data_root=tmp_path, runs=ROOT / "docs" / "records" / "runs"), console)
    assert isinstance(console.file, io.StringIO)
    printed = {line.rstrip() for line in console.file.getvalue().splitlines()}
    shown = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2 and [line for line in "".join(shown).splitlines() if line not in printed] == []


def test_page_recipe_has_described_cells() -> None:
    cells = cells_of(parse_recipe("mine", RECIPE, "mine.toml"))
    assert [(cell.norm, cell.place["buffer"], sorted(cell.published)) for cell in cells] == [
        ("bn", 20, []),
        ("cn4", 20, []),
        ("bn", 50, ["acc", "fm"]),
        ("cn4", 50, ["acc", "fm"]),
    ]
    assert [cell.values["train"]["lr"] for cell in cells] == [0.03, 0.1, 0.03, 0.1]


@pytest.mark.slow
def test_page_example_runs_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONTNORM_DATA", str(tmp_path))
    Path("my-table.toml").write_text(RECIPE)
    assert find_recipe("my-table.toml").name == "my-table"
    papers, reports = (
        [shlex.split(text) for text in COMMANDS if text.startswith(word)] for word in ("paper", "report")
    )
    assert papers[1] == ["paper", "my-table.toml", "--seeds", "3"] and len(papers) == len(reports) == 2
    console = Console(file=io.StringIO(), width=160)
    run_recipe("my-table.toml", TableOptions(2, execution=RunOptions()), console)  # two seeds, in this process: quicker
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"cn4, lr 0\.1 +ACC +2 +\S+ \+- \S+ +97\.10 \+- 0\.40 .*(agrees|above|below)", printed)
    assert "CN is over BN in ACC" in printed
    for arguments in reports:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
    assert "97.10 +- 0.40" in Path("my-report/tables.md").read_text()
    page = Path("report.html").read_text()
    assert '<section id="my-table">' in page and "printed as 19" in page and "fm_mammoth" in page
    assert "contnorm paper my-table.toml --seeds 2" in page
    assert "settings the recipe has for it" in page and "chosen on the validation tasks" not in page
    assert "The same settings for all norms" not in page
    assert 'id="table2"' not in page, "only the table that was named"
