"""Python blocks of the documentation: those of a page run as one script."""

import runpy
import warnings
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, blocks, page_name

# They train several networks, compile layers, write a report, or import a large framework.
SLOW_GUIDES = ("python-api", "sweeps", "bring-your-own-norm", "run-the-bench", "run-the-paper")
# What the blocks of a page need, if its name is not that of the page; those of mammoth need no checkout of it.
FRAMEWORKS = {"hub": "huggingface_hub", "mammoth": "contnorm", "README": "contnorm"}
SLOW_PAGES = {"README.md", "docs/index.md", "docs/deviations.md", *(f"docs/howto/{guide}.md" for guide in SLOW_GUIDES)}
SLOW_PAGES |= {page_name(page) for page in PAGES if page.parent.name == "integrations"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page_name(page) in SLOW_PAGES else [], id=page_name(page))
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_python_of_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the blocks of a page as one script, in an empty folder that has the docs of the checkout.

    A text block after a Python block is output of that page. A block that ``<!-- needs: MODULE -->`` is left out where
    that module is not installed.
    """
    framework = FRAMEWORKS.get(page.stem, page.stem if page.parent.name == "integrations" else "contnorm")
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    python = [block for block in blocks(page, "python") if not block.needs or find_spec(block.needs)]
    script.write_text("\n".join(block.text for block in python))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if page.parent.name == "integrations" or any(block.needs for block in python):
            warnings.simplefilter("ignore")  # frameworks advise about workers, loggers and their own future
        runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    for code, output in pairwise(blocks(page)):
        if code.language == "python" and output.language == "text":
            assert output.text in printed, f"{page_name(page)}:{output.line}: the page shows other output"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_languages_of_blocks_are_known_and_python_compiles(page: Path) -> None:
    """A block in any other language, or in none, would escape the tests. Python that can't be run here is `py`."""
    for block in blocks(page, "py"):
        compile(block.text, f"{page_name(page)}:{block.line}", "exec")
    known = {"python", "py", "sh", "bash", "console", "toml", "yaml", "json", "text", "csv", "bibtex", "mermaid"}
    unknown = [
        f"{page_name(page)}:{block.line}: {block.language!r}" for block in blocks(page) if block.language not in known
    ]
    assert not unknown
