"""Documentation that can't rot: its code runs, its links lead somewhere, its figures are those our code draws."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import contnorm as cn
from contnorm import functional

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = list(dict.fromkeys(PAGES))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_on_a_page_runs_from_top_to_bottom(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, name(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("public", cn.__all__)
def test_public_names_are_documented_with_an_example(public: str) -> None:
    thing = getattr(cn, public)
    assert thing.__doc__ and ">>>" in thing.__doc__, f"contnorm.{public} needs a docstring with an example"


@pytest.mark.parametrize("public", functional.__all__)
def test_functions_are_documented_with_an_example(public: str) -> None:
    assert ">>>" in (getattr(functional, public).__doc__ or "")


def test_quickstart_shows_the_table_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    first = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert first and shown
    exec(compile(first[1], "quickstart", "exec"), {})
    assert capsys.readouterr().out == shown[1]


def test_times_in_the_docs_are_those_of_the_record() -> None:
    page = (ROOT / "docs" / "deviations.md").read_text()
    record = json.loads((ROOT / "docs" / "records" / "cn-on-cpu.json").read_text())
    times: dict[str, list[str]] = {}
    for row in record["rows"]:
        times.setdefault("x".join(map(str, row["shape"])), []).append(f"{row['p50']:.1f}")
    assert len(times) == 5
    for shape, cells in times.items():
        assert f"| {shape} | {' | '.join(cells)} |" in page


def test_cube_figure_is_the_one_our_code_draws(tmp_path: Path) -> None:
    cubes = pytest.importorskip("contnorm.report.cubes")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    cubes.draw_cubes(tmp_path / "cubes.svg")
    drawn = (tmp_path / "cubes.svg").read_text()
    assert drawn == (ROOT / "docs" / "figures" / "cubes.svg").read_text()
    assert drawn.count("#4477aa") and drawn.count("#ee7733")


def test_demo_prints_both_accuracies_and_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo on two seeds, in this process: its table has BN, BN* and CN, in a plausible order."""
    pytest.importorskip("mlxtend", reason="mlxtend is not installed")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    sys.modules.pop("two_tasks", None)
    demo = pytest.importorskip("two_tasks")
    monkeypatch.setattr(demo, "SEEDS", range(2))
    demo.main()
    printed = capsys.readouterr().out
    assert "ContinualNorm1d       100       4" in printed
    rows = {
        line.split()[0]: line
        for line in printed.splitlines()
        if "+-" in line and line.split()[:1] in (["BN"], ["BN*"], ["CN"])
    }
    learned = {norm: float(row.split()[1]) for norm, row in rows.items()}
    at_the_end = {norm: float(row.split()[4]) for norm, row in rows.items()}
    assert all(value > 80 for value in learned.values())
    assert at_the_end["BN*"] > at_the_end["BN"] > 60
