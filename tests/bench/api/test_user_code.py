"""User code: loading, identity of files and objects, errors, and that only code which the call names is executed."""

import hashlib
import importlib
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from contnorm import bench
from contnorm.bench.components import file_hash, identify, load_component
from contnorm.bench.config.resolve import resolve
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.cli.main import app
from contnorm.errors import UserCodeError, UserError

FAST: dict[str, Any] = {"train.max_steps": 2}
CODE = """
import torch
from torch import nn

WIDTH = 4

class Net(nn.Module):
    def __init__(self, scale=1.0, activation=torch.relu):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 6)
        self.scale, self.activation = scale, activation

    def forward(self, x):
        return self.scale * self.last(self.activation(self.norm(self.first(x))))

def make(shape, outputs):
    return Net()
"""


def write(folder: Path, **files: str) -> None:
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user, in a file that a test may edit."""
    write(tmp_path, edited_net=CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("edited_net")
    sys.modules.pop("edited_net", None)


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\ndef broken(:\n", "line 2: SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\nf()\n", "line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('so long')\n", "line 2: SystemExit: so long"),
        ("raise ValueError('two\\nlines')\n", "line 1: ValueError: two lines"),
    ],
)
def test_load_error_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    write(tmp_path, mine=content)
    file = tmp_path / "mine.py"
    message = f"strategy '{file}:W': it can't be loaded: {file}, {said}"
    with pytest.raises(UserCodeError, match=f"{re.escape(message)}[^\n]*$"):
        load_component("strategy", f"{file}:W")


def test_file_is_loaded_once_for_each_content(tmp_path: Path) -> None:
    name = f"{tmp_path / 'mine.py'}:VALUE"
    write(tmp_path, mine="VALUE = [1]\n")
    assert load_component("model", name) is load_component("model", name)
    write(tmp_path, mine="VALUE = [2]\n")  # with the size and, most likely, the second of the first
    assert load_component("model", name) == [2]


def test_each_folder_has_modules_of_its_own(tmp_path: Path) -> None:
    """Two files in different folders import modules of the same name, in turns."""
    for place in ("a", "b"):
        helper = f"from deep.part import value\nvalue += '{place}'"
        write(tmp_path, **{f"{place}__mine": "from helper_x import value\n", f"{place}__helper_x": helper})
        write(tmp_path, **{f"{place}__deep__part": "value = 'part '\n"})
    found = [load_component("model", f"{tmp_path}/{place}/mine.py:value") for place in ("a", "b", "a")]
    assert found == ["part a", "part b", "part a"]


def test_helper_is_loaded_again_after_an_error(tmp_path: Path) -> None:
    write(tmp_path, mine="import helper_y\nvalue = helper_y.value\n", helper_y="other = 1\n")
    with pytest.raises(UserCodeError, match="has no attribute 'value'"):
        load_component("model", f"{tmp_path}/mine.py:value")
    write(tmp_path, helper_y="value = 2\n")
    assert load_component("model", f"{tmp_path}/mine.py:value") == 2


def test_hash_is_that_of_the_file_and_of_the_modules_in_its_folder(tmp_path: Path) -> None:
    content = "import json, torch\nfrom numpy import linalg\nclass W: ...\n"
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


def test_function_of_a_file_is_named_by_the_file(stream: bench.Stream, user_module: ModuleType) -> None:
    first = bench.run(stream, model=user_module.make, settings=FAST, runs="runs")
    assert first.config.model.name == "edited_net.py:make"
    assert bench.run(stream, model="edited_net.py:make", settings=FAST, runs="runs").hash == first.hash
    Path("edited_net.py").write_text(CODE.replace("torch.relu", "torch.tanh"))
    for model in (user_module.make, user_module.Net()):
        with pytest.raises(UserError, match=r"edited_net\.py.*reload"):
            bench.run(stream, model=model, settings=FAST, runs="runs")
    importlib.reload(user_module)
    assert bench.run(stream, model=user_module.make, settings=FAST, runs="runs").hash != first.hash


# --- Objects ---------------------------------------------------------------------------------------------------------


def code_of(value: object, kind: Any = "model") -> str | None:
    return identify(value, kind, None, recorded=True).code


def test_attributes_and_hooks_of_a_network_are_part_of_its_identity(user_module: ModuleType) -> None:
    nets = []
    for options in ({}, {"scale": 2.0}, {"activation": torch.tanh}, {"activation": nn.functional.gelu}, {}, {}):
        torch.manual_seed(0)
        nets.append(user_module.Net(**options))
    nets[0].register_buffer("offset", torch.ones(1), persistent=False)
    nets[-1].register_forward_hook(lambda module, inputs, output: 2 * output)
    codes = [code_of(net) for net in nets]
    assert len(set(codes)) == len(nets)
    assert code_of(nets[1]) == codes[1]


def cell(text: str, name: str | None = None) -> dict[str, Any]:
    """Define things as in a cell of a notebook, with its source; or as from stdin, without it."""
    file = name or "<stdin>"
    if name is not None:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    values: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), values)
    return values


NOTEBOOK = """
import numpy as np
from contnorm import bench
factor = 2.0
table = np.arange(3)

def scaled(loss):
    return loss * factor

class Mine(bench.Single):
    power = 1

    def loss(self, *arguments):
        loss, logits = super().loss(*arguments)
        return scaled(loss) ** self.power + float(table[0]), logits
"""
EDITS = [
    ("", ""),
    ("** self.power", "* self.power"),
    ("power = 1", "power = 2"),
    ("factor = 2.0", "factor = 3.0"),
    ("np.arange(3)", "np.arange(4)"),
    ("loss * factor", "loss / factor"),
    ("(bench.Single)", "(bench.ER)"),
]


@pytest.mark.parametrize("notebook", [True, False], ids=["notebook", "stdin"])
def test_class_of_a_notebook_is_identified_by_what_it_does(notebook: bool) -> None:
    def code(text: str, name: str) -> str | None:
        return code_of(cell(text, f"<{name}>" if notebook else None)["Mine"], "strategy")

    codes = [code(NOTEBOOK.replace(*edit), f"cell {number}") for number, edit in enumerate(EDITS)]
    assert len(set(codes)) == len(EDITS)
    assert code(NOTEBOOK + "\nother = 3\n", "other cell") == codes[0], "of the variables those that it uses"


@pytest.mark.slow
def test_identity_is_the_same_in_every_process() -> None:
    """Of classes, closures, objects and networks, whatever the order of sets."""
    text = NOTEBOOK + (
        "import functools\nfrom torch import nn, manual_seed\nfrom contnorm.bench.components import identify\n"
        "_ = manual_seed(0)\nnet = nn.Sequential(nn.LSTM(3, 3), nn.BatchNorm1d(3))\n"
        "makers = [lambda *shape, width=w, names={'a', 'b', 'c'}: (width, factor) for w in (4, 8)]\n"
        "values = [Mine, *makers, functools.partial(scaled, 3), net, nn.functional.gelu, np.maximum]\n"
        "print([identify(value, 'model', None, True).code for value in values])\n"
    )
    printed = [
        subprocess.run(
            [sys.executable], input=text, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert printed[0] == printed[1] and len(set(re.findall(r"'\w{12}'", printed[0]))) == 7


def test_lambdas_of_a_loop_are_different_runs(stream: bench.Stream) -> None:
    def net(width: int) -> Callable[..., nn.Module]:
        return lambda shape, outputs: nn.Sequential(
            nn.Linear(12, width), nn.BatchNorm1d(width), nn.Linear(width, outputs)
        )

    results = bench.run_all(stream, [{"model": net(width), "settings": FAST} for width in (4, 8)], lanes=1)
    assert results[0].hash != results[1].hash
    assert code_of(lambda x: x + 1) != code_of(lambda x: x + 2) and code_of(net(4)) == code_of(net(4))


LOOP = """
from contnorm.bench.components import identify
codes = []
for width in (4, 8):
    def make(shape, outputs):
        return width * outputs
    codes.append(identify(make, "model", None, recorded=True).code)
def net(shape, outputs): return 1
codes.append(identify(net, "model", None, recorded=True).code)
def net(shape, outputs): return 2
codes.append(identify(net, "model", None, recorded=True).code)
"""


def test_file_that_defines_a_name_several_times_has_several_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of the file does not tell which definition is meant."""
    write(tmp_path, defines_often=LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: Any = importlib.import_module("defines_often")
    assert len(set(module.codes)) == 4 and None not in module.codes
    monkeypatch.delitem(sys.modules, "defines_often")


def test_recorded_object_that_cannot_be_described_needs_a_tag(stream: bench.Stream, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        make = lambda shape, outputs: nn.Linear(12, file.write("6") * 6)  # noqa: E731
        with pytest.raises(UserError, match=r"uses 'file', an object of type TextIOWrapper, .* tag="):
            bench.run(stream, norm="none", model=make, settings=FAST, runs=tmp_path / "runs")
        in_memory = [bench.run(stream, norm="none", model=make, settings=FAST).hash for _ in range(2)]
        assert in_memory[0] != in_memory[1]
        tagged = bench.run(stream, norm="none", model=make, settings=FAST, runs=tmp_path / "runs", tag="linear")
        assert tagged.config.model.name == "python:linear"


class WithAttribute(bench.Single):
    def __init__(self, config: Any = None, factor: float = 1.0, teacher: nn.Module | None = None) -> None:
        super().__init__(config)
        self.factor, self.teacher = factor, teacher


def test_attributes_of_a_strategy_are_part_of_its_identity() -> None:
    teachers = [nn.Linear(2, 2) for _ in range(2)]
    made = [WithAttribute(factor=2.0), WithAttribute(factor=3.0), *(WithAttribute(teacher=net) for net in teachers)]
    assert len({code_of(strategy) for strategy in made}) == 4
    assert code_of(WithAttribute(factor=2.0)) == code_of(made[0])


class Breaks(bench.Single):
    def loss(self, *arguments: Any) -> Any:
        raise KeyError("mistake")


def test_error_is_the_same_in_a_notebook_and_in_a_file(stream: bench.Stream) -> None:
    message = r"strategy '.*test_user_code\.py:Breaks': after 0 of 2 steps: .*, line \d+: KeyError: 'mistake'"
    with pytest.raises(UserCodeError, match=message):
        bench.run(stream, strategy=Breaks, settings=FAST)
    text = (
        "from contnorm import bench\nclass Breaks(bench.Single):\n    def loss(self, *a):\n        raise KeyError('oh')"
    )
    with pytest.raises(UserCodeError, match=r"strategy 'python:Breaks': after 0 of 2 steps: loss, line 4: KeyError: "):
        bench.run(stream, strategy=cell(text)["Breaks"], settings=FAST)


# --- Workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_have_the_variables_of_the_program(stream: bench.Stream, user_module: ModuleType) -> None:
    """A worker that imported the module would have the width of the file."""
    user_module.WIDTH = 7  # type: ignore[attr-defined]
    result = bench.run(stream, model=user_module.make, settings=FAST, seeds=2, lanes=2, keep_weights=True)
    assert [model.first.out_features for model in result.models()] == [7, 7]


EXPERIMENT = """
import numpy as np
from contnorm import bench
from edited_net import Net

print("imported", flush=True)

class Mine(bench.Single):
    def __init__(self, config=None, factor=0.5):
        super().__init__(config)
        self.factor = factor

def make(shape, outputs):
    return Net()

x, y = np.random.default_rng(0).normal(size=(60, 12)), np.arange(60) % 6
stream = bench.Stream.from_arrays(x, y, x, y, tasks=2)
options = {"seeds": 2, "lanes": 2, "settings": {"train.max_steps": 2}, "runs": "runs"}
print(bench.run(stream, model=make, strategy=Mine(factor=2.0), **options).seeds)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "import", "stdin"])
def test_runs_of_a_script_without_main_guard_an_imported_module_and_stdin(tmp_path: Path, how: str) -> None:
    """Workers must not import a module that starts runs."""
    write(tmp_path, edited_net=CODE, experiment=EXPERIMENT)
    arguments = {"script": ["experiment.py"], "import": ["-c", "import experiment"], "stdin": []}[how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
        input=EXPERIMENT if how == "stdin" else None,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["imported", "[0, 1]", ""], done.stderr
    assert len(list(tmp_path.glob("runs/*/*.json"))) == 2


@pytest.mark.slow
def test_strategy_with_a_helper_runs_in_worker_processes(
    stream: bench.Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    arguments: dict[str, Any] = {"strategy": "../mine/strategy.py:Half", "runs": tmp_path / "runs", "lanes": 2}
    first = bench.run(stream, seeds=2, settings=FAST, **arguments)
    write(tmp_path, mine__loss_helper="def half(loss):\n    return loss * 0.5\n")
    assert bench.run(stream, seeds=1, settings=FAST, **arguments).hash != first.hash


# --- No command executes code that only a file names -----------------------------------------------------------------

SHORT = {"stream": {"name": "split-mnist", "source": "digits", "tasks": 2, "train_per_task": 40}}
LEAVING = """
from pathlib import Path
from contnorm.bench import Single
Path(__file__).with_name("executed").touch()
class Mine(Single): ...
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a strategy whose file leaves a mark when it is executed."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, mine=LEAVING)
    return "mine.py:Mine"


def contnorm(*arguments: object) -> int:
    try:
        return int(app([str(argument) for argument in arguments], prog_name="contnorm", standalone_mode=False) or 0)
    except UserError as error:
        print(error)
        return 2


def executed() -> bool:
    return Path("executed").exists()


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
    assert record.parent.name == config.hash


def test_settings_file_names_no_code(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text(f"strategy.name = '{code}'\nstream.source = 'digits'\ntrain.max_steps = 2\n")
    run = ["run", "--stream", "split-mnist", "--norm", "bn", "--config", "mine.toml"]
    assert contnorm(*run) == 2
    assert "code, which is not executed because a file names it" in capsys.readouterr().out and not executed()
    assert contnorm(*run, "--strategy", code) == 0 and executed()


def test_record_names_no_code_for_diagnose(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=40)
    record = bench.run(stream, strategy=code, norm="bn", runs="runs", keep_weights=True).records[0]
    Path("executed").unlink()
    assert contnorm("diagnose", record.path) == 2
    assert "is not executed because a file names it" in capsys.readouterr().out and not executed()
    with pytest.raises(UserError, match="is not known here"):
        load_component("strategy", "no-such-plugin")
