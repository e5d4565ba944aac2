"""The page on running the paper: what it shows is what is printed, and its recipe is one."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from contnorm.cli.paper import Asked, run_recipe
from contnorm.recipes.grid import cells_of
from contnorm.recipes.reading import parse_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "howto" / "run-the-paper.md").read_text()


def test_shown_lines_are_printed(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    run_recipe("table1", Asked(data_root=tmp_path, runs=ROOT / "docs" / "records" / "runs"), console)
    assert isinstance(console.file, io.StringIO)
    printed = {line.rstrip() for line in console.file.getvalue().splitlines()}
    shown = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for line in "".join(shown).splitlines():
        assert line in printed


def test_the_recipe_of_ones_own_is_one() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    recipe = parse_recipe("mine", text, "mine.toml")
    cells = cells_of(recipe)
    assert [(cell.norm, cell.place["buffer"], bool(cell.published)) for cell in cells] == [
        ("bn", 20, False),
        ("cn4", 20, False),
        ("bn", 50, False),
        ("cn4", 50, True),
    ]
    assert [cell.values["train"]["lr"] for cell in cells] == [0.03, 0.1, 0.03, 0.1]
