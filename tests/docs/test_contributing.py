"""CONTRIBUTING: its map of the packages is complete, and its paths exist."""

import re

from tests.docs.pages import ROOT


def test_tree_in_contributing_has_the_packages() -> None:
    """The first columns of the two tables name packages and modules that exist, and miss no package."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page[page.index("## The tree") : page.index("## Glossary")]
    package = ROOT / "src" / "contnorm"
    for folder, table in zip((package, package / "bench"), section.split("Inside `bench`"), strict=True):
        rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        missing = {name for name in names if not (folder / name).is_dir() and not (folder / f"{name}.py").is_file()}
        assert not missing, f"CONTRIBUTING.md names {missing}"
        packages = {init.parent.name for init in folder.glob("*/__init__.py")}
        assert packages <= names, f"CONTRIBUTING.md does not name {packages - names}"


def test_paths_in_contributing_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]*\.\w+)`", page):
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "src" / "contnorm")), path
