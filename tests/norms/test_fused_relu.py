"""Norms whose ``forward`` also adds a residual and applies ReLU, and `normed_relu`, which uses it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import contnorm as cn
from contnorm.norms.activation import normed_relu

FUSED = ["cn", "gn", "in", "ln"]
SEPARATE = ["brn", "sn"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", [*FUSED, *SEPARATE])
def test_residual_and_relu_equal_separate_operators(norm: str, training: bool) -> None:
    torch.manual_seed(0)
    layer = cn.create_norm(norm, 64).train(training)
    twin = copy.deepcopy(layer)
    x, residual = torch.randn(2, 3, 64, 4, 4)
    assert layer.fuses_relu == (norm in FUSED)
    assert torch.equal(normed_relu(layer, x), twin(x).relu())
    assert torch.equal(normed_relu(layer, x, residual), (twin(x) + residual).relu())
    if norm in FUSED:
        assert torch.equal(layer(x, residual), twin(x) + residual)


@pytest.mark.parametrize("norm", FUSED)
def test_residual_of_wrong_shape_raises(norm: str) -> None:
    layer = cn.create_norm(norm, 64)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ValueError, match=r"residual is \(1, 64, 4, 4\)"):
        layer(torch.randn(3, 64, 4, 4), torch.randn(1, 64, 4, 4))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("norm", FUSED)
def test_residual_of_another_dtype_under_autocast(norm: str) -> None:
    """It is cast to the dtype of the input, which the output has too."""
    torch.manual_seed(0)
    layer = cn.create_norm(norm, 64)
    x, residual = torch.randn(2, 3, 64, 4, 4)
    residual.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = normed_relu(layer, x.bfloat16(), residual)
        expected = normed_relu(layer, x.bfloat16(), residual.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().sum().backward()
    assert residual.grad is not None and residual.grad.dtype == torch.float32
    assert torch.equal(residual.grad, (y > 0).float())


class DoubledGroupNorm(cn.GroupNorm2d):
    """A layer of a user, whose ``forward`` takes the input alone."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(input)


def test_subclass_with_its_own_forward() -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 64, 4, 4)
    layer, plain = DoubledGroupNorm(64), cn.GroupNorm2d(64)
    assert not layer.fuses_relu
    assert torch.equal(normed_relu(layer, x, residual), (2 * plain(x) + residual).relu())


@pytest.mark.parametrize("norm", ["gn", "brn", "sn"])
def test_compiled_without_graph_break(norm: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = cn.create_norm(norm, 64)
    x, residual = torch.randn(2, 3, 64, 4, 4)
    compiled = torch.compile(lambda x, r: normed_relu(layer, x, r), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual), normed_relu(layer, x, residual))


@pytest.mark.parametrize("norm", FUSED)
def test_pre_hook_replaces_the_input_and_keeps_the_residual(norm: str) -> None:
    torch.manual_seed(0)
    layer = cn.create_norm(norm, 64)
    x, residual = torch.randn(2, 3, 64, 4, 4)
    expected = (layer(-x) + residual).relu()
    layer.register_forward_pre_hook(lambda _, args: (-args[0],))
    assert torch.equal(normed_relu(layer, x, residual), expected)


@pytest.mark.parametrize("norm", FUSED)
def test_forward_hook_gets_the_output_of_the_norm(norm: str) -> None:
    torch.manual_seed(0)
    layer = cn.create_norm(norm, 64)
    x, residual = torch.randn(2, 3, 64, 4, 4)
    plain, seen = layer(x), []
    layer.register_forward_hook(lambda _, __, output: seen.append(output))
    assert torch.equal(normed_relu(layer, x, residual), (plain + residual).relu())
    assert torch.equal(seen[0], plain)


def test_replaced_forward_of_a_layer() -> None:
    x, residual = torch.randn(2, 3, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    layer = cn.create_norm("gn", 64)
    layer.forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert torch.equal(normed_relu(layer, x, residual), (2 * x + residual).relu())
