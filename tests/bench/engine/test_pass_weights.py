"""Leaf tensors for each pass give the bits of autograd, which sums gradients, and of autocast, which casts weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine import pass_weights
from contnorm.bench.engine.optimizers import PlainSGD
from contnorm.bench.engine.pass_weights import Bf16Weights, PassWeights
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.engine.trainer import Trainer
from contnorm.kernels.triton.availability import can_launch
from tests.datasets import small_cifar100


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "forward"), [("single", "joint"), ("er", "joint"), ("er", "separate"), ("derpp", "separate")]
)
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_run_equals_autograd_and_autocast_bitwise(
    root: Path, device: torch.device, strategy: str, forward: str, precision: str
) -> None:
    values: dict[str, Any] = {
        "stream": {"name": "split-cifar100", "tasks": 2},
        "strategy": {"name": strategy, "forward": forward},
        "norm": {"name": "cn", "groups": 4},
        "model": {"width": 8},
        "train": {"precision": precision, "lr": 0.01},
    }
    config, source = resolve(values, root), load_source("cifar100", root)
    with numerics(config.train):
        ours, plain = (Trainer(config, 0, source, device) for _ in range(2))
        if precision == "tf32":
            assert (ours.pass_weights is not None) == (device.type == "cuda" and forward == "separate")
            ours.pass_weights = PassWeights(ours.model)
        assert ours.pass_weights is not None
        plain.pass_weights = None
        for _ in range(6):  # two tasks of four steps: the second replays
            assert torch.equal(ours.step(), plain.step())
    for name, tensor in ours.state().items():
        assert torch.equal(tensor, plain.state()[name]), name


def test_weights_that_autocast_does_not_cast_are_not_cast() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    half = Bf16Weights(model)
    assert half.names == ["0.weight", "0.bias"]
    half = Bf16Weights(model, all_parameters=True)
    assert half.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [values.dtype for values in half._values()] == [torch.bfloat16] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("kind", [PassWeights, partial(Bf16Weights, all_parameters=True)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_update_equals_the_sum_and_the_optimizers_step(
    kind: Callable[[torch.nn.Module], PassWeights], passes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights on both sides of the limit, and one that only the first pass uses."""
    if not can_launch(device):
        pytest.skip("Triton can't run here")
    monkeypatch.setattr(pass_weights, "SMALL", 30)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)]
    model = torch.nn.Sequential(*layers).to(device)
    x = torch.randn(passes, 6, 8, device=device)
    ours, theirs = (kind(copy.deepcopy(model)) for _ in range(2))
    for network in (ours, theirs):
        network.refresh()
        with torch.autocast(device.type, torch.bfloat16, enabled=isinstance(network, Bf16Weights)):
            sum(network(part).float().square().sum() for part in x).backward()  # type: ignore[union-attr]
        network.passes[-1][-1].grad = None
    assert ours.update(0.1)
    theirs.add_gradients()
    PlainSGD(theirs.weights, 0.1).step()
    # The interpreter has no fused multiply-add: a weight of less than 4 may differ by one unit.
    tolerance = 0.0 if device.type == "cuda" else 2**-22
    for name, mine, other in zip(ours.names, ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance, msg=name)
        assert not torch.equal(mine, dict(model.named_parameters())[name]) or passes == 1


def test_update_is_refused_if_a_weight_has_another_gradient() -> None:
    model = torch.nn.Linear(2, 2)
    network = PassWeights(model)
    network(torch.ones(1, 2)).sum().backward()  # type: ignore[no-untyped-call]
    model.weight.grad = torch.ones(2, 2)
    assert not network.update(0.1)
    network.add_gradients()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))


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
