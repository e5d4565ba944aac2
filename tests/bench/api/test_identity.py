"""Identity of networks and strategies that are passed as Python objects, and the code that worker processes execute."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from contnorm import bench
from contnorm.errors import UserError

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


def test_file_that_was_edited_after_the_import_is_rejected(stream: bench.Stream, user_module: ModuleType) -> None:
    first = bench.run(stream, model=user_module.make, settings=FAST, runs="runs").hash
    Path("edited_net.py").write_text(CODE.replace("torch.relu", "torch.tanh"))
    for model in (user_module.make, user_module.Net()):
        with pytest.raises(UserError, match=r"edited_net\.py.*reload"):
            bench.run(stream, model=model, settings=FAST, runs="runs")
    importlib.reload(user_module)
    assert bench.run(stream, model=user_module.make, settings=FAST, runs="runs").hash != first


def test_attributes_of_a_network_are_part_of_its_identity(stream: bench.Stream, user_module: ModuleType) -> None:
    nets = []
    for options in ({}, {"scale": 2.0}, {"activation": torch.tanh}, {"activation": nn.functional.gelu}):
        torch.manual_seed(0)
        nets.append(user_module.Net(**options))
    nets[0].register_buffer("offset", torch.ones(1), persistent=False)
    nets.append(user_module.Net())
    nets[-1].load_state_dict(nets[0].state_dict())
    hashes = [bench.run(stream, model=net, settings=FAST, runs="runs").hash for net in nets]
    assert len(set(hashes)) == len(nets)
    assert bench.run(stream, model=nets[1], settings=FAST, runs="runs").hash == hashes[1]


def test_network_with_code_of_no_file_needs_a_tag(stream: bench.Stream, user_module: ModuleType) -> None:
    hooked = user_module.Net()
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    for net in (hooked, user_module.Net(activation=lambda x: x)):
        with pytest.raises(UserError, match="tag="):
            bench.run(stream, model=net, settings=FAST, runs="runs")
        assert bench.run(stream, model=net, settings=FAST).seeds == [0]


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
print(bench.run(stream, model=make, seeds=2, lanes=2, settings={"train.max_steps": 2}).seeds)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["import", "spawn"])
def test_runs_of_an_imported_module(tmp_path: Path, how: str) -> None:
    """Workers must not import a module that starts runs; nor is the main module of a spawned process importable."""
    (tmp_path / "edited_net.py").write_text(CODE)
    (tmp_path / "experiment.py").write_text(EXPERIMENT)
    code = "import experiment"
    if how == "spawn":
        (tmp_path / "experiment.py").write_text(
            "if __name__ != '__main__':\n"
            + textwrap.indent(EXPERIMENT, "    ")
            + "\ndef nothing(): pass\n"
            + "if __name__ == '__main__':\n    import multiprocessing as mp\n"
            + "    child = mp.get_context('spawn').Process(target=nothing)\n    child.start()\n    child.join()\n"
        )
    command = [sys.executable, "-c", code] if how == "import" else [sys.executable, "experiment.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split("\n") == ["imported", "[0, 1]", ""], done.stderr
    assert done.stderr == ""


class WithAttribute(bench.Strategy):
    def __init__(self, config: Any = None, factor: float = 1.0) -> None:
        super().__init__(config)
        self.factor = factor

    def loss(self, model: Any, head: Any, stream: Any) -> Any:
        return head.cross_entropy(bench.forward(model, stream), stream).mean() * self.factor, None


def test_attribute_of_a_strategy_that_is_no_setting_is_named(tmp_path: Path) -> None:
    stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=20)
    with pytest.raises(UserError, match=r"strategy=WithAttribute: has attributes that are no settings \(factor\)"):
        bench.run(stream, strategy=WithAttribute(factor=2.0), runs=tmp_path, lanes=1, settings=FAST)
