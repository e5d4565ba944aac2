"""EvoNorm-S0 against timm's numbers, without its activation, and its activation's parameter."""

from __future__ import annotations

import copy

import pytest
import torch

from contnorm import EvoNorm1d, EvoNorm2d, create_norm
from contnorm.functional import evonorm_s0
from tests.norms.timm_numbers import TOLERANCE, assert_numbers, output, timm_layers, with_values


def test_numbers_of_timm() -> None:
    """`EvoNorm2dS0(4, groups=2)` of huggingface/pytorch-image-models at aa4b585 (timm 1.0.29.dev0)."""
    expected = [0.1246270099, 0.3699609496, -0.5440407015, 0.380723726, 0.1828188896]
    expected += [-0.7999499075, 1.4578498134, 0.0937237249, -0.5574508058, 0.7885138362]
    assert_numbers(output(with_values(EvoNorm2d(4, num_groups=2), "v")), expected, 15.506588866)


def test_numbers_of_timm_without_activation() -> None:
    """`EvoNorm2dS0a(4, groups=2, eps=1e-5, apply_act=False)` of the same commit, which keeps the denominator."""
    expected = [0.3458616366, 0.793593847, -1.9372230805, 0.7883980647, 0.3587804408]
    expected += [-1.6426542144, 2.195315492, -0.0365735642, -1.106943829, 1.4262565249]
    assert_numbers(output(with_values(EvoNorm2d(4, num_groups=2, apply_act=False), "v")), expected, 22.336918616)


@pytest.mark.parametrize("apply_act", [True, False])
def test_equals_installed_timm(apply_act: bool) -> None:
    layers = timm_layers()
    theirs = (
        layers.EvoNorm2dS0(4, groups=2) if apply_act else layers.EvoNorm2dS0a(4, groups=2, eps=1e-5, apply_act=False)
    )
    ours = EvoNorm2d(4, num_groups=2, apply_act=apply_act)
    torch.testing.assert_close(
        output(with_values(ours, "v")), output(with_values(theirs, "v")), rtol=TOLERANCE, atol=TOLERANCE
    )


def test_layouts_give_the_same_gradients() -> None:
    """A channels_last input has another formula of the variance."""
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(3, 8, 4, 5, generator=torch.Generator().manual_seed(0)).double().to(memory_format=layout)
        layer = EvoNorm2d(8, num_groups=2).double()
        x.requires_grad_()
        layer(x).square().sum().backward()
        results.append((x.grad, layer.v.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_parameter_exists_only_with_activation() -> None:
    assert sorted(EvoNorm2d(8, num_groups=2).state_dict()) == ["bias", "v", "weight"]
    layer = EvoNorm2d(8, num_groups=2, apply_act=False)
    assert sorted(layer.state_dict()) == ["bias", "weight"] and "apply_act=False" in repr(layer)
    removed = EvoNorm2d(8, num_groups=2)
    removed.remove_activation()
    assert repr(removed) == repr(layer) and sorted(removed.state_dict()) == ["bias", "weight"]
    assert repr(copy.deepcopy(removed)) == repr(layer)


def test_initial_values() -> None:
    layer = create_norm("evonorm_s0", 64)
    assert layer.num_groups == 32 and layer.eps == 1e-5
    assert torch.equal(layer.v, torch.ones(64)) and torch.equal(layer.bias, torch.zeros(64))


def test_one_value_in_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="num_groups=8 leaves one value"):
        EvoNorm1d(8, num_groups=8)(torch.randn(3, 8))


def test_function_without_affine() -> None:
    x = torch.tensor([[[-2.0, 2.0]]])
    assert evonorm_s0(x, 1, eps=1e-12).tolist() == [[[-1.0, 1.0]]]
    expected = x.sigmoid() * torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(evonorm_s0(x, 1, v=torch.ones(1), eps=1e-12), expected)
