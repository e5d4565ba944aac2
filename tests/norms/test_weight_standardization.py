"""Convolutions with standardized weights, against timm's layer and a formula in numpy."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from contnorm import GroupNorm2d, WSGroupNorm2d, create_norm
from contnorm.kernels.convolution import Convolution
from contnorm.norms.group import is_standardized, standardize, standardized_weight, unstandardize
from tests.norms.timm_layers import timm_layers, values


def convolution() -> nn.Conv2d:
    conv = nn.Conv2d(2, 3, (2, 3)).double()
    with torch.no_grad():
        conv.weight.copy_(values((3, 2, 2, 3), 0.2))
        assert conv.bias is not None
        conv.bias.copy_(values((3,)))
    return conv


def test_equals_installed_timm() -> None:
    theirs = timm_layers().StdConv2d(2, 3, (2, 3), padding=0, bias=True).double()
    theirs.load_state_dict(convolution().state_dict())
    x = values((1, 2, 3, 5))
    torch.testing.assert_close(standardize(convolution())(x), theirs(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(5, 3, 3, 3), (4, 6, 1, 1), (4, 3, 5), (2, 3, 1, 2, 2)])
def test_weight_has_zero_mean_and_unit_variance(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.01 + 3
    w = weight.numpy().reshape(shape[0], -1)
    expected = (w - w.mean(1, keepdims=True)) / np.sqrt(w.var(1, keepdims=True) + 1e-6)
    actual = standardized_weight(weight).numpy().reshape(shape[0], -1)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_gradients_are_numerically_correct() -> None:
    conv: Any = standardize(nn.Conv2d(2, 3, 2, bias=False).double())
    x = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.func.functional_call(conv, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(function, (x, conv.weight))


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, Convolution])
def test_standardized_convolution_is_the_same_object(kind: Any) -> None:
    conv = kind(3, 4, 2)
    before, weight = copy.deepcopy(conv), conv.weight
    assert standardize(conv) is conv and conv.weight is weight and is_standardized(conv)
    assert list(conv.state_dict()) == list(before.state_dict())
    loaded = pickle.loads(pickle.dumps(conv))
    x = torch.randn(2, 3, *[4] * (weight.dim() - 2), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(x), conv(x)) and torch.equal(copy.deepcopy(conv)(x), conv(x))
    assert not torch.allclose(conv(x), before(x))
    unstandardize(conv)
    assert type(conv) is kind and vars(conv).keys() == vars(before).keys()
    assert torch.equal(conv(x), before(x))


def test_what_cannot_be_standardized_is_refused() -> None:
    with pytest.raises(ValueError, match="a Linear can't be standardized, only Conv1d"):
        standardize(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="one weight, which always standardizes to zero"):
        standardize(nn.Conv2d(4, 4, 1, groups=4))


def test_layer_itself_is_a_group_norm() -> None:
    x = torch.randn(2, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(WSGroupNorm2d(8, num_groups=2)(x), GroupNorm2d(8, num_groups=2)(x))
    assert create_norm("gn_ws", 8, num_groups=2, weight_eps=1e-4).weight_eps == 1e-4
