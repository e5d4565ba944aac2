"""Norms whose ``forward`` also adds a residual and applies ReLU, and `normed_relu`, which uses it."""

import copy

import pytest
import torch
from torch import Tensor

import contnorm as cn
from contnorm.norms.activation import normed_relu

FUSED = ["cn", "gn", "in", "ln"]


def layer_and_data(norm: str) -> tuple[cn.ContinualNorm2d, Tensor, Tensor]:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 64, 4, 4)
    return cn.create_norm(norm, 64), x, residual  # type: ignore[return-value]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("norm", [*FUSED, "sn"])
def test_residual_and_relu_equal_separate_operators(norm: str, training: bool) -> None:
    layer, x, residual = layer_and_data(norm)
    twin = copy.deepcopy(layer.train(training))
    assert layer.fuses_relu == (norm in FUSED)
    assert torch.equal(normed_relu(layer, x), twin(x).relu())
    assert torch.equal(normed_relu(layer, x, residual), (twin(x) + residual).relu())
    if norm in FUSED:
        assert torch.equal(layer(x, residual), twin(x) + residual)


@pytest.mark.parametrize("norm", FUSED)
def test_residual_of_wrong_shape_raises(norm: str) -> None:
    layer, x, residual = layer_and_data(norm)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=r"residual is \(1, 64, 4, 4\)"):
        layer(x, residual[:1])
    torch.testing.assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("norm", FUSED)
def test_residual_of_another_dtype_under_autocast(norm: str) -> None:
    """It is cast to the dtype of the input, which the output has too; each gets a gradient in its own dtype."""
    layer, x, residual = layer_and_data(norm)
    residual.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = normed_relu(layer, x.bfloat16(), residual)
        expected = normed_relu(layer, x.bfloat16(), residual.bfloat16())
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().sum().backward()
    assert residual.grad is not None and torch.equal(residual.grad, (y > 0).float())


class DoubledGroupNorm(cn.GroupNorm2d):
    """A layer of a user, whose ``forward`` takes the input alone."""

    def forward(self, input: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(input)


def test_forward_of_a_user_is_called_with_the_input_alone() -> None:
    plain, x, residual = layer_and_data("gn")
    assert not DoubledGroupNorm.fuses_relu
    assert torch.equal(normed_relu(DoubledGroupNorm(64), x, residual), (2 * plain(x) + residual).relu())
    plain.forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert torch.equal(normed_relu(plain, x, residual), (2 * x + residual).relu())


@pytest.mark.parametrize("norm", ["gn", "brn"])
def test_compiled_without_graph_break(norm: str) -> None:
    torch._dynamo.reset()
    layer, x, residual = layer_and_data(norm)
    compiled = torch.compile(lambda x, r: normed_relu(layer, x, r), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, residual), normed_relu(layer, x, residual))


@pytest.mark.parametrize("norm", FUSED)
def test_hooks_get_the_input_and_the_output_of_the_norm(norm: str) -> None:
    layer, x, residual = layer_and_data(norm)
    negated, seen = layer(-x), []
    layer.register_forward_pre_hook(lambda _, args: (-args[0],))
    assert torch.equal(normed_relu(layer, x, residual), (negated + residual).relu())
    layer.register_forward_hook(lambda _, __, output: seen.append(output))
    assert torch.equal(normed_relu(layer, x, residual), (negated + residual).relu())
    assert torch.equal(seen[0], negated)
