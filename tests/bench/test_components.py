"""Code of the user in files: what is loaded, how it is identified, and that only names of the call are executed."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from contnorm import bench
from contnorm.bench.components import file_hash, load_component
from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.cli.main import app
from contnorm.errors import UserCodeError, UserError

STRATEGY = "from contnorm.bench import Single\n"
LEAVING = """
from pathlib import Path
from contnorm.bench import Single
Path(__file__).with_name("executed").touch()
class Mine(Single): ...
"""


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\ndef broken(:\n", "{file}, line 2: SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\nf()\n", "{file}, line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('so long')\n", "{file}, line 2: SystemExit: so long"),
        ("raise ValueError('two\\nlines')\n", "{file}, line 1: ValueError: two lines"),
    ],
)
def test_load_error_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    write(tmp_path, mine=content)
    file = tmp_path / "mine.py"
    message = f"strategy '{file}:W': it can't be loaded: {said.format(file=file)}"
    with pytest.raises(UserCodeError, match=f"{re.escape(message)}[^\n]*$"):
        load_component("strategy", f"{file}:W")


def test_file_is_loaded_once_for_each_content(tmp_path: Path) -> None:
    name = f"{tmp_path / 'mine.py'}:VALUE"
    write(tmp_path, mine="VALUE = [1]\n")
    assert load_component("model", name) is load_component("model", name)
    write(tmp_path, mine="VALUE = [2]\n")  # with the size and, most likely, the second of the first
    assert load_component("model", name) == [2]


def test_dataclasses_with_postponed_annotations_load(tmp_path: Path) -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass W:\n    a: int = {}\n"
    )
    for folder in ("a", "b"):
        write(tmp_path, **{f"{folder}__mine": text.format(len(folder + str(folder == "b")))})
    made = [load_component("model", f"{tmp_path / folder / 'mine.py'}:W")().a for folder in ("a", "b")]
    assert made == [6, 5], "of two files of one name each is itself"


def test_each_folder_has_modules_of_its_own(tmp_path: Path) -> None:
    """Two files in different folders import modules of the same name, in turns."""
    for place in ("a", "b"):
        helper = f"from deep.part import value\nvalue += '{place}'"
        write(tmp_path, **{f"{place}__mine": "from helper_x import value\n", f"{place}__helper_x": helper})
        write(tmp_path, **{f"{place}__deep__part": "value = 'part '\n"})
    found = [load_component("model", f"{tmp_path}/{place}/mine.py:value") for place in ("a", "b", "a")]
    assert found == ["part a", "part b", "part a"]


def test_hash_is_that_of_the_file_and_of_the_modules_in_its_folder(tmp_path: Path) -> None:
    content = f"import json, torch\nfrom numpy import linalg\n{STRATEGY}class W(Single): ...\n"
    write(tmp_path, alone=content, json="shadowed = True")
    assert file_hash(tmp_path / "alone.py") == hashlib.sha256(content.encode()).hexdigest()[:12]
    write(
        tmp_path,
        mine="import helper_a\ndef f():\n    from package_p import part\n",
        helper_a="from helper_b import value\n",
        helper_b="value = 1\n",
        package_p__part="from .deep import nested\n",
        package_p__deep__nested="value = 1\n",
        unrelated="value = 1\n",
    )
    (tmp_path / "package_p" / "__init__.py").touch()
    hashes = [file_hash(tmp_path / "mine.py")]
    for name in ("helper_a", "helper_b", "package_p/__init__", "package_p/part", "package_p/deep/nested"):
        file = tmp_path / f"{name}.py"
        file.write_text(file.read_text() + "# edited\n")
        hashes.append(file_hash(tmp_path / "mine.py"))
    assert len(set(hashes)) == 6
    (tmp_path / "unrelated.py").write_text("value = 2\n")
    assert file_hash(tmp_path / "mine.py") == hashes[-1]


@pytest.mark.slow
def test_strategy_with_a_helper_runs_in_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another folder; an edit of the helper makes it another run."""
    write(
        tmp_path,
        mine__strategy="from loss_helper import half\nfrom contnorm import bench\n\n\nclass Half(bench.Single):\n"
        "    def loss(self, *arguments):\n        loss, logits = super().loss(*arguments)\n"
        "        return half(loss), logits\n",
        mine__loss_helper="def half(loss):\n    return loss / 2\n",
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 4
    stream = bench.Stream.from_arrays(x, y, x, y, tasks=2)
    arguments: dict[str, Any] = {"strategy": "../mine/strategy.py:Half", "runs": tmp_path / "runs", "lanes": 2}
    first = bench.run(stream, seeds=2, **arguments)
    write(tmp_path, mine__loss_helper="def half(loss):\n    return loss * 0.5\n")
    assert bench.run(stream, seeds=1, **arguments).hash != first.hash


def contnorm(*arguments: object) -> int:
    try:
        return int(app([str(argument) for argument in arguments], prog_name="contnorm", standalone_mode=False) or 0)
    except UserError as error:
        print(error)
        return 2


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a strategy whose file leaves a mark when it is executed."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, mine=LEAVING)
    return "mine.py:Mine"


def executed() -> bool:
    return Path("executed").exists()


SHORT = {"stream": {"name": "split-mnist", "source": "digits", "tasks": 2, "train_per_task": 40}}


def test_resume_names_a_run_with_code_and_executes_none(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve({**SHORT, "strategy": {"name": code}}, Path("data"))
    asked = iter([False])
    *_, last = execute([Run(config, 0)], RunOptions(runs=Path("runs")), lambda: next(asked, True))
    assert last.kind == "stopped"
    Path("executed").unlink()
    assert contnorm("resume") == 2
    assert "Repeat the command that started the run" in capsys.readouterr().out and not executed()
    flags = ["--set", "stream.source=digits", "--set", "stream.tasks=2", "--set", "stream.train_per_task=40"]
    assert contnorm("run", "--stream", "split-mnist", "--norm", "bn", "--strategy", code, *flags) == 0
    (record,) = Path("runs").glob("*/*.json")
    assert record.parent.name == config.hash and not list(Path("runs").glob("*/*.partial"))


def test_settings_file_names_no_code(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text(f"strategy.name = '{code}'\nstream.source = 'digits'\ntrain.max_steps = 2\n")
    run = ["run", "--stream", "split-mnist", "--norm", "bn", "--config", "mine.toml"]
    assert contnorm(*run) == 2
    assert "code, which is not executed because a file names it" in capsys.readouterr().out and not executed()
    assert contnorm(*run, "--strategy", code) == 0 and executed()


def test_record_names_no_code_for_diagnose(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream = bench.load_stream(**{"name": "split-mnist", **{k: v for k, v in SHORT["stream"].items() if k != "name"}})
    record = bench.run(stream, strategy=code, norm="bn", runs="runs", keep_weights=True).records[0]
    Path("executed").unlink()
    assert contnorm("diagnose", record.path) == 2
    assert "is not executed because a file names it" in capsys.readouterr().out and not executed()


def test_registered_component_is_loaded_when_a_record_names_it() -> None:
    with pytest.raises(UserError, match="is not known here"):
        load_component("strategy", "no-such-plugin")
