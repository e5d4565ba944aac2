"""Weights cast together give the bits of autocast, which casts each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.precision import Bf16Weights, numerics
from contnorm.bench.engine.scheduler import resolve
from contnorm.bench.engine.trainer import Trainer
from tests.datasets import small_cifar100


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "forward"), [("single", "joint"), ("er", "joint"), ("er", "separate"), ("derpp", "separate")]
)
def test_run_equals_autocast_bitwise(root: Path, device: torch.device, strategy: str, forward: str) -> None:
    values: dict[str, Any] = {
        "stream": {"name": "split-cifar100", "tasks": 2},
        "strategy": {"name": strategy, "forward": forward},
        "norm": {"name": "cn", "groups": 4},
        "model": {"width": 8},
        "train": {"precision": "bf16", "lr": 0.01},
    }
    config, source = resolve(values, root), load_source("cifar100", root)
    with numerics(config.train):
        ours, autocast = (Trainer(config, 0, source, device) for _ in range(2))
        assert ours.bf16_weights is not None
        autocast.bf16_weights = None
        for _ in range(6):  # two tasks of four steps: the second replays
            assert torch.equal(ours.step(), autocast.step())
    for name, tensor in ours.state().items():
        assert torch.equal(tensor, autocast.state()[name]), name


def test_weights_that_autocast_does_not_cast_are_not_cast() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    half = Bf16Weights(model)
    assert half.names == ["0.weight", "0.bias"]


def test_unused_weight_has_no_gradient() -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.used(x)
            return y

    model = Half()
    half = Bf16Weights(model)
    half.refresh()
    with torch.autocast("cpu", torch.bfloat16):
        half(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    half.add_gradients()
    assert torch.equal(model.used.weight.grad, torch.ones(2, 3))  # type: ignore[arg-type]
    assert model.unused.weight.grad is None
