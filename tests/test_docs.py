"""Documentation: its code runs, its links and anchors exist, its numbers and figures are current."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import warnings
from pathlib import Path

import pytest

import contnorm as cn
from contnorm import functional, testing
from contnorm.bench.data.multilabel_build import build
from contnorm.bench.data.multilabel_listings import list_csv
from contnorm.cli.main import COMMANDS, load_command

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = list(dict.fromkeys(PAGES))


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


# They train several networks, compile layers, or write a report.
SLOW_GUIDES = ("python-api", "sweeps", "bring-your-own-norm", "run-the-bench", "run-the-paper")
SLOW_PAGES = ("README.md", *(f"docs/howto/{guide}.md" for guide in SLOW_GUIDES))


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] if name(p) in SLOW_PAGES else [], id=name(p)) for p in PAGES],
)
def test_python_of_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of a page as one script, in an empty folder that has the docs of the checkout."""
    blocks = python_blocks(page)
    if not blocks:
        return
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    script = tmp_path / f"{page.stem.replace('-', '_')}.py"
    script.write_text("\n".join(blocks))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if page.parent.name == "integrations":
            warnings.simplefilter("ignore")  # frameworks advise about workers, loggers and their own future
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_anchors_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), f"{name(page)} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{name(page)} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    """Every `contnorm COMMAND --option` in a shell block or in the text is one that the program has."""
    if page.name == "CHANGELOG.md":
        return
    text = page.read_text()
    blocks = re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(code.split()) for code in re.findall(r"`(contnorm [^`]+)`", prose)]
    for line in lines:
        words = shlex.split(line, comments=True)
        if len(words) < 2 or words[0] != "contnorm" or words[1].startswith("-") or words[1].isupper():
            continue
        assert words[1] in COMMANDS, f"{name(page)}: {line}"
        options = {option for parameter in load_command(words[1]).params for option in parameter.opts} | {"--help"}
        unknown = [word for word in words[2:] if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options]
        assert not unknown, f"{name(page)}: {line}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tree_in_contributing_has_the_packages() -> None:
    """The first columns of the two tables name packages and modules that exist, and miss none."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## The tree") : page.index("## Glossary")]
    package = ROOT / "src" / "contnorm"
    for folder, table in zip((package, package / "bench"), section.split("Inside `bench`"), strict=True):
        names = {
            name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        }
        missing = {name for name in names if not (folder / name).is_dir() and not (folder / f"{name}.py").is_file()}
        assert not missing, f"CONTRIBUTING.md names {missing}"
        packages = {init.parent.name for init in folder.glob("*/__init__.py")}
        modules = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
        assert packages | modules <= names, f"CONTRIBUTING.md does not name {(packages | modules) - names}"


def test_paths_in_contributing_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*\.\w+)`", page):
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "src" / "contnorm")), path


@pytest.mark.parametrize("public", cn.__all__)
def test_public_names_are_documented_with_an_example(public: str) -> None:
    thing = getattr(cn, public)
    assert thing.__doc__ and ">>>" in thing.__doc__, f"contnorm.{public} needs a docstring with an example"


@pytest.mark.parametrize("public", sorted(set(testing.__all__) - {"NORM_CHECKS"}))  # a dict has no docstring
def test_names_of_testing_are_documented_with_an_example(public: str) -> None:
    page = (ROOT / "docs" / "howto" / "bring-your-own-norm.md").read_text()
    assert ">>>" in (getattr(testing, public).__doc__ or "")
    assert f"`{public}`" in page or f"testing.{public}" in page, f"bring-your-own-norm.md does not name {public}"


@pytest.mark.parametrize("public", functional.__all__)
def test_functions_are_documented_with_an_example(public: str) -> None:
    assert ">>>" in (getattr(functional, public).__doc__ or "")


def test_quickstart_table_is_the_printed_one(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    first = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert first and shown
    exec(compile(first[1], "quickstart", "exec"), {})
    assert capsys.readouterr().out == shown[1]


def test_csv_example_builds(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    page = (ROOT / "docs" / "howto" / "build-cocoseq.md").read_text()
    shown = re.search(r"^```text\n(image,split.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown
    (tmp_path / "labels.csv").write_text(shown[1])
    for picture in re.findall(r"^\S+\.jpg", shown[1], re.MULTILINE):
        (tmp_path / picture).parent.mkdir(exist_ok=True)
        image.new("RGB", (20, 10)).save(tmp_path / picture)
    manifest = build(list_csv("beaches", tmp_path / "labels.csv", tmp_path), tmp_path / "beaches", side=8)
    assert manifest["complete"] and manifest["class_names"] == ["palm", "sea", "sky"]


def test_expected_gain_of_cn_matches_table() -> None:
    page = " ".join((ROOT / "docs" / "concepts" / "why-bn-forgets.md").read_text().split())
    table = (ROOT / "docs" / "results" / "table2.md").read_text()
    alike, chosen, fresh = re.findall(r"^## [^\n]*: CN is over BN in ACC .*?(?=^## )", table, re.MULTILINE | re.DOTALL)
    for claim, sentence in (
        (alike, "has {} points with CN under ER and {} under DER++"),
        (chosen, "of its own, {} and {}"),
        (fresh, "with fresh seeds, {} and {}"),
    ):
        differences = re.findall(r"^\| split-cifar100 (?:er|derpp) cn32 against bn \| (\S+)", claim, re.MULTILINE)
        assert len(differences) == 2 and sentence.format(*differences) in page


def test_cpu_times_match_record() -> None:
    page = (ROOT / "docs" / "deviations.md").read_text()
    record = json.loads((ROOT / "docs" / "records" / "cn-on-cpu.json").read_text())
    times: dict[str, list[str]] = {}
    for row in record["rows"]:
        times.setdefault("x".join(map(str, row["shape"])), []).append(f"{row['p50']:.1f}")
    assert len(times) == 5
    for shape, cells in times.items():
        assert f"| {shape} | {' | '.join(cells)} |" in page
