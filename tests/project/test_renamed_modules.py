"""Modules of version 0.1 give an error that names the new module, and the migration page has all of them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from contnorm.lazy_names import RenamedModules
from contnorm.renamed_modules import RENAMED

ROOT = Path(__file__).resolve().parents[2]
MODULES_0_1 = (Path(__file__).parent / "modules_0_1.txt").read_text().split()  # of the last commit of version 0.1


def exists(module: str) -> bool:
    path = ROOT / "src" / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_table_has_every_module_that_is_gone() -> None:
    assert set(RENAMED) == {module for module in MODULES_0_1 if not exists(module)}
    assert len(MODULES_0_1) == 225


def test_table_names_modules_that_exist() -> None:
    assert [new for new in RENAMED.values() if not exists(new)] == []


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_import_of_an_old_module_names_the_new_one(old: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(old)
    assert str(caught.value).startswith(f"{old} was moved to {RENAMED[old]} in version 0.2.")


@pytest.mark.parametrize(
    ("statement", "old"),
    [
        ("import contnorm.catalog", "contnorm.catalog"),
        ("import contnorm.catalog as c", "contnorm.catalog"),
        ("from contnorm import catalog", "contnorm.catalog"),
        ("from contnorm.factory import create_norm", "contnorm.factory"),
        ("from contnorm.engine.lane import Lane", "contnorm.engine.lane"),
        ("from contnorm.engine import lane", "contnorm.engine"),
        ("from contnorm.kernels import beside", "contnorm.kernels.beside"),
        ("import contnorm.kernels.fused.tiles", "contnorm.kernels.fused.tiles"),
    ],
)
def test_every_form_of_import_names_the_new_module(statement: str, old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^{re.escape(old)} was moved to {re.escape(RENAMED[old])} in"):
        exec(statement, {})


def test_error_has_the_name_of_the_module() -> None:
    """Code that supports both versions compares it."""
    for old in ("contnorm.catalog", "contnorm.kernels.beside"):
        with pytest.raises(ModuleNotFoundError) as caught:
            importlib.import_module(old)
        assert caught.value.name == old


def test_search_for_an_old_module_finds_nothing() -> None:
    for old in ("contnorm.catalog", "contnorm.kernels.beside"):
        assert importlib.util.find_spec(old) is None
        assert RenamedModules.find_spec(old) is None
    with pytest.raises(ModuleNotFoundError):  # as for any package that does not exist
        importlib.util.find_spec("contnorm.engine.lane")


def test_pickle_of_an_old_class_names_the_new_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^contnorm\.engine\.lane was moved to contnorm\.bench\.engine\."):
        pickle.loads(b"ccontnorm.engine.lane\nLane\n.")


def test_unknown_modules_keep_the_usual_error() -> None:
    for name in ("contnorm.unheard_of", "contnorm.bench.unheard_of", "unheard_of"):
        with pytest.raises(ModuleNotFoundError, match=f"^No module named '{name}'"):
            importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError, match=r"contnorm\.registry\.x"):  # as in importlib: it is no package
        importlib.import_module("contnorm.registry.x")


def test_import_inside_a_module_is_about_the_inner_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uses_old_module.py").write_text("import contnorm.seeds\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"^contnorm\.seeds was moved to contnorm\.bench\.rng"):
        importlib.import_module("uses_old_module")


def test_table_is_not_loaded_by_an_import_of_the_package() -> None:
    code = "import sys, json, contnorm; print(json.dumps([sorted(sys.modules), len(sys.meta_path)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    modules, _ = json.loads(done.stdout)
    assert "contnorm.lazy_names" in modules and "contnorm.renamed_modules" not in modules
    assert sys.meta_path.count(RenamedModules) == 1


def test_migration_page_has_the_table() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text().partition("## All modules")[2]
    rows = dict(re.findall(r"^\| `(contnorm\.[\w.]+)` \| `(contnorm\.[\w.]+)` \|$", text, re.MULTILINE))
    assert rows == dict(RENAMED)


def test_migration_page_names_things_that_exist() -> None:
    """Names in the column "since 0.2" of the other tables are attributes of public modules."""
    text = (ROOT / "docs" / "migrating.md").read_text().partition("## All modules")[0]
    names = re.findall(r"^\| .* \| `((?:contnorm|bench)\.[\w.]+)`", text, re.MULTILINE)
    assert len(names) > 10
    for name in names:
        found: object = importlib.import_module("contnorm")
        parts = (name if name.startswith("contnorm.") else f"contnorm.{name}").split(".")[1:]
        if parts[0] in ("bench", "paper", "report", "diagnosis", "moments", "registry", "errors", "convert"):
            found = importlib.import_module(f"contnorm.{parts.pop(0)}")
        for part in parts:
            found = getattr(found, part)
