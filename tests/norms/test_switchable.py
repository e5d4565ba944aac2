"""Switchable normalization: with a single weight, it is another known norm."""

import copy

import pytest
import torch
import torch.nn.functional as F

import contnorm as cn

FAR = 60.0  # a logit whose softmax is zero in float64


def corner(which: int, dim: int = 2) -> torch.nn.Module:
    layer = cn.create_norm("sn", 6, dim=dim).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for logits in (layer.mean_weight, layer.var_weight):
            logits.fill_(-FAR)
            logits[which] = FAR
    return layer


def test_layer_weight_only_is_layer_norm() -> None:
    x = torch.randn(5, 6, 40, 40, dtype=torch.float64)
    torch.testing.assert_close(corner(1)(x), F.layer_norm(x, x.shape[1:]), rtol=1e-3, atol=1e-3)


def test_instance_weight_only_is_instance_norm() -> None:
    x = torch.randn(5, 6, 3, 4, dtype=torch.float64)
    expected = (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(corner(0)(x), expected)


def test_single_weights_of_flat_input_are_layer_and_batch_norm() -> None:
    x = torch.randn(9, 6, dtype=torch.float64)
    torch.testing.assert_close(corner(1, dim=1)(x), F.layer_norm(x, (6,)))
    torch.testing.assert_close(corner(2, dim=1)(x), F.batch_norm(x, None, None, training=True))


def test_initial_moments_and_weights() -> None:
    layer = cn.SwitchNorm2d(4)
    torch.testing.assert_close(layer.running_var, torch.zeros(4))
    assert layer.mean_weight.shape == layer.var_weight.shape == (3,)
    assert layer.mean_weight is not layer.var_weight
    layer(torch.randn(4, 4, 3, 3))
    with torch.no_grad():
        layer.mean_weight.fill_(5.0)
    layer.reset_parameters()
    torch.testing.assert_close(layer.running_var, torch.zeros(4))
    torch.testing.assert_close(layer.mean_weight.detach(), torch.ones(3))


@pytest.mark.parametrize("mean", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(16, 8), (16, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_single_positions_are_exact_at_large_means(shape: tuple[int, ...], mean: float, training: bool) -> None:
    """Against float64 from the same input and moments, outputs, gradients and running moments."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) + mean
    dy = torch.randn(shape, generator=generator)
    layer = cn.create_norm("sn", 8, dim=max(1, len(shape) - 2), momentum=1.0)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    layer(x)
    exact = copy.deepcopy(layer).double()
    layer.train(training), exact.train(training)
    inputs = [x.clone().requires_grad_(), x.double().requires_grad_()]
    outputs = [layer(inputs[0]), exact(inputs[1])]
    outputs[0].backward(dy), outputs[1].backward(dy.double())
    torch.testing.assert_close(outputs[0].double(), outputs[1], rtol=0, atol=3e-6)
    assert inputs[0].grad is not None and inputs[1].grad is not None
    torch.testing.assert_close(inputs[0].grad.double(), inputs[1].grad, rtol=0, atol=3e-6)
    for ours, expected in zip(layer.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and expected.grad is not None
        torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(buffer.double(), exact.get_buffer(name).double(), rtol=1e-6, atol=1e-6)
