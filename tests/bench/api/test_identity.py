"""Identity of networks and strategies that are passed as Python objects, and the code that worker processes execute."""

from __future__ import annotations

import importlib
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from contnorm import bench
from contnorm.bench.components import identify
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


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user, in a file that a test may edit."""
    (tmp_path / "edited_net.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module("edited_net")
    sys.modules.pop("edited_net", None)


def code_of(value: object) -> str | None:
    return identify(value, "model", None, recorded=True).code


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


@pytest.mark.parametrize("notebook", [True, False], ids=["notebook", "stdin"])
def test_class_of_a_notebook_is_identified_by_what_it_does(notebook: bool) -> None:
    edits = {
        "the same again": ("", ""),
        "method": ("** self.power", "* self.power"),
        "attribute": ("power = 1", "power = 2"),
        "variable": ("factor = 2.0", "factor = 3.0"),
        "array": ("np.arange(3)", "np.arange(4)"),
        "function": ("loss * factor", "loss / factor"),
        "base": ("(bench.Single)", "(bench.ER)"),
    }
    codes = {}
    for number, (kind, (old, new)) in enumerate(edits.items()):
        values = cell(NOTEBOOK.replace(old, new) if old else NOTEBOOK, f"<cell {number}>" if notebook else None)
        codes[kind] = identify(values["Mine"], "strategy", None, recorded=True).code
    original = identify(cell(NOTEBOOK, "<cell>" if notebook else None)["Mine"], "strategy", None, recorded=True)
    assert original.name == "python:Mine" and original.code == codes.pop("the same again")
    assert len({original.code, *codes.values()}) == 7
    unused = cell(NOTEBOOK + "\nother = 3\n", "<other cell>" if notebook else None)["Mine"]
    assert identify(unused, "strategy", None, recorded=True).code == original.code


def test_lambdas_of_a_loop_are_different_runs(stream: bench.Stream) -> None:
    def net(width: int) -> Callable[..., nn.Module]:
        return lambda shape, outputs: nn.Sequential(
            nn.Linear(12, width), nn.BatchNorm1d(width), nn.Linear(width, outputs)
        )

    results = bench.run_all(stream, [{"model": net(width), "settings": FAST} for width in (4, 8)], lanes=1)
    assert results[0].hash != results[1].hash
    assert [np.isfinite(result.acc).all() for result in results] == [True, True]
    first, second = (lambda x: x + 1), (lambda x: x + 2)
    assert code_of(first) != code_of(second)
    assert code_of(net(4)) == code_of(net(4))


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
    with pytest.raises(
        UserCodeError, match=r"strategy '.*test_identity\.py:Breaks': .*, line \d+: KeyError: 'mistake'"
    ):
        bench.run(stream, strategy=Breaks, settings=FAST)
    text = """
from contnorm import bench
class Breaks(bench.Single):
    def loss(self, *arguments):
        raise KeyError('oh')
"""
    with pytest.raises(UserCodeError, match=r"strategy 'python:Breaks': .* loss, line 5: KeyError: 'oh'"):
        bench.run(stream, strategy=cell(text)["Breaks"], settings=FAST)


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

def make(shape, outputs):
    return Net()

x, y = np.random.default_rng(0).normal(size=(60, 12)), np.arange(60) % 6
stream = bench.Stream.from_arrays(x, y, x, y, tasks=2)
print(bench.run(stream, model=make, seeds=2, lanes=2, settings={"train.max_steps": 2}, runs="runs").seeds)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["import", "stdin"])
def test_runs_of_an_imported_module_and_of_stdin(tmp_path: Path, how: str) -> None:
    """Workers must not import a module that starts runs."""
    (tmp_path / "edited_net.py").write_text(CODE)
    (tmp_path / "experiment.py").write_text(EXPERIMENT)
    command = [sys.executable, "-c", "import experiment"] if how == "import" else [sys.executable]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
        input=EXPERIMENT if how == "stdin" else None,
    )  # fmt: skip
    assert done.stdout.split("\n") == ["imported", "[0, 1]", ""], done.stderr
    assert len(list(tmp_path.glob("runs/*/*.json"))) == 2
