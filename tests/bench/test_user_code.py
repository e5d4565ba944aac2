"""Code of a user's own: valid code loads whatever it does, and what is wrong with it is one line with its place."""

from __future__ import annotations

import hashlib
import importlib
import os
import py_compile
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from contnorm import bench
from contnorm.bench.config.schema import StrategyConfig
from contnorm.bench.local_imports import imported_files
from contnorm.bench.strategies.build import build_strategy
from contnorm.bench.user_code import check_module_names, code_hash, load_user_code
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


def test_modules_of_the_files_folder_are_imported_from_any_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a function that is called later, from a package, and if the current folder has modules of that name."""
    write(
        folder,
        mine__code="import own_helper\nvalue = own_helper.value\ndef later():\n    from own_late import value\n    "
        "return value\n",
        mine__own_helper="from own_package.part import value\n",
        mine__own_package__part="value = 'in the folder'\n",
        mine__own_late="value = 'late'\n",
        elsewhere__own_helper="value = 'elsewhere'\n",
        elsewhere__own_late="value = 'elsewhere'\n",
    )
    monkeypatch.chdir(folder / "elsewhere")
    monkeypatch.syspath_prepend(str(folder / "elsewhere"))
    before = list(sys.path)
    assert load_user_code(f"{folder}/mine/code.py:value", "thing") == "in the folder"
    assert load_user_code("../mine/code.py:later", "thing")() == "late"  # type: ignore[operator]
    assert sys.path == before


def test_each_folder_has_modules_of_its_own(folder: Path) -> None:
    """Two files in different folders import modules of the same name, in turns."""
    for place in ("a", "b"):
        write(
            folder, **{f"{place}__mine": "from same_name import value\n", f"{place}__same_name": f"value = '{place}'"}
        )
    for place in ("a", "b", "a"):
        assert load_user_code(f"{folder}/{place}/mine.py:value", "thing") == place
    with pytest.raises(UserError, match=r"imports the module same_name of .*/b, and other code of this run that of"):
        check_module_names([folder / "a" / "mine.py", folder / "b" / "mine.py"])
    check_module_names([folder / "a" / "mine.py", folder / "a" / "mine.py"])


def test_folder_is_closed_to_other_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose folder has no such module imports that of the search path, not that of an earlier file's folder."""
    write(folder, a__mine="from shared_name import value\n", a__shared_name="value = 'a'\n")
    write(folder, b__mine="from shared_name import value\n", lib__shared_name="value = 'lib'\n")
    monkeypatch.syspath_prepend(str(folder / "lib"))
    monkeypatch.setattr("contnorm.bench.local_imports._search_path", tuple(sys.path))
    assert [load_user_code(f"{folder}/{place}/mine.py:value", "thing") for place in "aba"] == ["a", "lib", "a"]


def test_module_of_a_program_with_the_same_name_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would use the loaded one, whose content is not part of the run's identity."""
    write(folder, program__taken_name="value = 1\n", mine="from taken_name import value\n", taken_name="value = 2\n")
    monkeypatch.syspath_prepend(str(folder / "program"))
    importlib.import_module("taken_name")
    with pytest.raises(UserError, match=r"imports the module taken_name of .*program/taken_name\.py is loaded"):
        load_user_code(f"{folder}/mine.py:value", "model")


def test_computed_import_of_the_files_folder_is_refused(folder: Path) -> None:
    write(folder, mine="import importlib\nimportlib.import_module('hidden_' + 'name')\n", hidden_name="value = 1\n")
    with pytest.raises(UserError, match=r"imports .*hidden_name\.py without an import statement"):
        load_user_code(f"{folder}/mine.py:importlib", "model")


def test_data_folder_does_not_hide_an_installed_package(folder: Path) -> None:
    write(folder, mine="import scipy\nvalue = scipy.__name__\n")
    (folder / "scipy").mkdir()
    assert load_user_code(f"{folder}/mine.py:value", "thing") == "scipy"
    assert imported_files(folder / "mine.py") == {}


@pytest.mark.slow
def test_strategy_with_a_helper_runs_in_worker_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another folder; an edit of the helper makes it another run."""
    write(
        folder,
        mine__strategy="from loss_helper import half\nfrom contnorm import bench\n\n\nclass Half(bench.Single):\n"
        "    def loss(self, *arguments):\n        loss, logits = super().loss(*arguments)\n"
        "        return half(loss), logits\n",
        mine__loss_helper="def half(loss):\n    return loss / 2\n",
    )
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 4
    stream = bench.Stream.from_arrays(x, y, x, y, tasks=2)
    arguments = {"strategy": "../mine/strategy.py:Half", "runs": folder / "runs", "lanes": 2}
    first = bench.run(stream, seeds=2, **arguments)  # type: ignore[arg-type]
    (folder / "mine" / "loss_helper.py").write_text("def half(loss):\n    return loss * 0.5\n")
    assert bench.run(stream, seeds=1, **arguments).config.hash != first.config.hash  # type: ignore[arg-type]
