"""The page on running the paper: what it shows is what is printed."""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from contnorm.cli.paper import run_recipe
from contnorm.paper.run import TableOptions

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "howto" / "run-the-paper.md").read_text()


def test_howto_lines_are_printed(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    run_recipe("table1", TableOptions(data_root=tmp_path, runs=ROOT / "docs" / "records" / "runs"), console)
    assert isinstance(console.file, io.StringIO)
    printed = {line.rstrip() for line in console.file.getvalue().splitlines()}
    shown = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(shown) == 2
    for line in "".join(shown).splitlines():
        assert line in printed
