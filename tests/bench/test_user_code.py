"""Code of a user's own: valid code loads whatever it does, and what is wrong with it is one line with its place."""

from __future__ import annotations

import hashlib
import os
import py_compile
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contnorm.bench.config.schema import StrategyConfig
from contnorm.bench.local_imports import imported_files
from contnorm.bench.strategies.build import build_strategy
from contnorm.bench.user_code import code_hash, load_user_code
from contnorm.errors import UserError

STRATEGY = "from contnorm.bench import Strategy\n"


LATE = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import ClassVar
@dataclass
class Mine:
    where: ClassVar[str] = "{folder}"
    many: list[int] = field(default_factory=list)
"""


def test_file_with_dataclasses_and_postponed_annotations_loads(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(LATE.format(folder=folder))
    found = [load_user_code(f"{tmp_path / folder / 'mine.py'}:Mine", "thing") for folder in ("a", "b")]
    assert [getattr(thing, "where", None) for thing in found] == ["a", "b"], "of two files of one name each is itself"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\ndef broken(:\n", ", line 2: SyntaxError: invalid syntax"),
        ("x = 1\nimport no_such_module\n", ", line 2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f():\n    return 1 / 0\nf()\n", ", line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('so long')\n", ", line 2: SystemExit: so long"),
        ("raise ValueError('two\\nlines')\n", ", line 1: ValueError: two lines"),
    ],
)
def test_load_error_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(content)
    with pytest.raises(UserError, match=re.escape(f"strategy '{file}:W': it can't be loaded: {file}{said}")) as told:
        load_user_code(f"{file}:W", "strategy")
    assert "\n" not in str(told.value)


def test_strategy_construction_error_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{STRATEGY}class W(Strategy):\n    def __init__(self, config):\n        self.x = config.nosuch\n")
    with pytest.raises(UserError, match=r"called with its settings: .*mine\.py, line 4: AttributeError: .*nosuch"):
        build_strategy(StrategyConfig(f"{file}:W"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose modules are forgotten again."""
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


IMPORTING = "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent))\n"


def test_hash_without_local_imports_is_that_of_the_file(folder: Path) -> None:
    content = f"import json, torch\nfrom numpy import linalg\n{STRATEGY}class W(Strategy): ...\n"
    write(folder, mine=content, json="shadowed = True", unrelated="x = 1")
    assert imported_files(folder / "mine.py") == {}
    assert code_hash(f"{folder / 'mine.py'}:W") == hashlib.sha256(content.encode()).hexdigest()[:12]


def test_hash_depends_on_imported_modules(folder: Path) -> None:
    """Also of one that is imported by another, in a function, from a package, or relatively."""
    write(
        folder,
        mine=f"{IMPORTING}import helper_a\ndef f():\n    from package_p import part\n",
        helper_a="from helper_b import value\n",
        helper_b="value = 1\n",
        package_p__part="from .deep import nested\n",
        package_p__deep__nested="value = 1\n",
        unrelated="value = 1\n",
    )
    (folder / "package_p" / "__init__.py").write_text("")
    name = f"{folder / 'mine.py'}:f"
    listed = {str(file.relative_to(folder)) for file in imported_files(folder / "mine.py")}
    assert listed == {
        "helper_a.py",
        "helper_b.py",
        "package_p/__init__.py",
        "package_p/part.py",
        "package_p/deep/nested.py",
    }
    hashes = [code_hash(name)]
    for file in sorted(listed):
        (folder / file).write_text((folder / file).read_text() + "# edited\n")
        hashes.append(code_hash(name))
    assert len(set(hashes)) == 6
    (folder / "unrelated.py").write_text("value = 2\n")
    assert code_hash(name) == hashes[-1]
    load_user_code(name, "thing")
    assert code_hash(name) == hashes[-1], "what a file is does not depend on whether it was loaded"


def test_hash_depends_on_content_not_on_location(folder: Path) -> None:
    for place in ("here", "there"):
        write(folder, **{f"{place}__mine": "import helper_a\n", f"{place}__helper_a": "value = 1\n"})
    assert code_hash(f"{folder}/here/mine.py:f") == code_hash(f"{folder}/there/mine.py:f")


def test_hash_covers_modules_on_the_search_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, code__mine="import helper_c\n", lib__helper_c="value = 1\n")
    name = f"{folder}/code/mine.py:f"
    alone = code_hash(name)
    monkeypatch.setattr("contnorm.bench.local_imports._search_path", (str(folder / "lib"), *sys.path))
    assert code_hash(name) != alone


def test_edited_module_is_imported_again(folder: Path) -> None:
    write(folder, mine=f"{IMPORTING}from helper_d import value\n", helper_d="value = 1\n")
    name = f"{folder / 'mine.py'}:value"
    assert load_user_code(name, "thing") == 1
    write(folder, helper_d="value = 22\n")
    assert load_user_code(name, "thing") == 22


@pytest.mark.parametrize(
    "hidden",
    [
        "import importlib, sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent))\n"
        "value = importlib.import_module('helper_' + 'e').value\n",
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent / 'lib'))\n"
        "from helper_f import value\n",
    ],
    ids=["by a computed name", "by a changed search path"],
)
def test_import_that_can_not_be_followed_is_refused(folder: Path, hidden: str) -> None:
    """Else an edit would go unnoticed; and so is a second attempt, when the module would be loaded already."""
    write(folder, mine=hidden, helper_e="value = 1\n", lib__helper_f="value = 1\n")
    for _ in range(2):
        with pytest.raises(UserError, match=r"imports .*helper_\w\.py .*PYTHONPATH"):
            load_user_code(f"{folder / 'mine.py'}:value", "model")


@pytest.mark.parametrize("named", ["mine", "helper"])
def test_bytecode_next_to_a_file_is_not_executed(folder: Path, named: str) -> None:
    other = folder / "other.txt"
    other.write_text("raise ImportError('bytecode was executed')")
    (folder / "helper.py").write_text("VALUE = 1\n")
    (folder / "mine.py").write_text(
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, str(Path(__file__).parent))\n"
        "from helper import VALUE\nsys.path.pop(0)\n"
    )
    cached = folder / "__pycache__" / f"{named}.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(str(other), str(cached), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    assert load_user_code(f"{folder / 'mine.py'}:VALUE", "model") == 1


def test_file_edited_within_a_second_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for value in (1, 2):
        file.write_text(f"VALUE = {value}\n")
        os.utime(file, (10**9, 10**9))
        assert load_user_code(f"{file}:VALUE", "model") == value
