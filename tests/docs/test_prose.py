"""The check of prose in `make lint`: proselint reads the sentences of a page, and not its code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("proselint", reason="proselint is not installed")

from tools.check_prose import pages, problems, prose

PAGE = """# Norms

The the layer `very unique` is [unique](very-unique.md).

```sh
the the layer
```

The layer is very unique.
"""


def test_problems_have_the_line_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    found = problems(page, tmp_path)
    assert {line.split(": ")[0] for line in found} == {"page.md:3", "page.md:9"}
    assert any("lexical_illusions" in line for line in found) and any("uncomparables" in line for line in found)


def test_prose_keeps_lines_and_drops_code() -> None:
    text = prose(PAGE)
    assert text.count("\n") == PAGE.count("\n") and "very-unique" not in text and text.count("very") == 1


def test_generated_pages_are_left_out(tmp_path: Path) -> None:
    for name in ("README.md", "docs/index.md", "docs/results/table2.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [page.name for page in pages(tmp_path)] == ["README.md", "index.md"]
