"""A diverged run is recorded with its reason, and is not run a second time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.events import Diverged
from contnorm.bench.engine.scheduler import Event, Job, RunEnvironment, execute, resolve
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.records import Store
from tests.datasets import small_mnist

VALUES: dict[str, Any] = {
    "stream": {"name": "permuted-mnist", "train_per_task": 60, "tasks": 2},
    "norm": {"name": "bn"},
    "strategy": {"name": "single"},
    "train": {"lr": 1e30},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def run(root: Path, runs: Path) -> list[Event]:
    place = RunEnvironment(runs, root, torch.device("cpu"))
    return list(execute([Job(resolve(VALUES, root), 0)], place))


def test_diverged_run_is_recorded_once(root: Path, tmp_path: Path) -> None:
    last = run(root, tmp_path)[-1]
    assert isinstance(last.what, Diverged) and last.path == Store(tmp_path).path(last.job.config, 0)
    raw = json.loads(last.path.read_text())
    assert (raw["status"], raw["reason"]) == ("diverged", last.what.why) and "matrix" not in raw
    assert raw["versions"]["torch"] == torch.__version__ and raw["source"]["fingerprint"]
    assert [path.name for path in last.path.parent.iterdir()] == ["0.json"]
    before = last.path.stat().st_mtime_ns
    (event,) = run(root, tmp_path)
    assert isinstance(event.what, Diverged) and event.what.why.startswith(last.what.why)
    assert str(last.path) in event.what.why and last.path.stat().st_mtime_ns == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_first_nonfinite_tensor_is_named(root: Path, value: float, device: torch.device) -> None:
    trainer = Trainer(resolve(VALUES, root), 0, load_source("mnist", root), device)
    trainer.model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, device=device)))
    names = [name for name, _ in trainer.model.named_parameters() if name != "empty"]
    moments = [name for name, _ in trainer.model.named_buffers() if name.endswith("running_var")]
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(-3e38)  # large, and finite
        assert trainer.nonfinite_tensor() is None
        trainer.model.get_buffer(moments[0])[-1] = value
        assert trainer.nonfinite_tensor() == moments[0]
        trainer.model.get_parameter(names[1]).view(-1)[-1] = value
        assert trainer.nonfinite_tensor() == names[1]
