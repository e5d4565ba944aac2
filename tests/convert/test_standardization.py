"""Conversion to group norm with weight standardization, and back: the convolutions of the model."""

import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm.norms.group import is_standardized
from tests.models import ResNet

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def convolutions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def test_all_convolutions_are_standardized() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    weight, bias = model[0].weight, model[0].bias
    cn.convert_norm(model, "gn_ws", num_groups=2, weight_eps=1e-4)
    assert model[0].weight is weight and model[0].weight_eps == 1e-4
    w = weight.flatten(1)
    expected = ((w - w.mean(1, keepdim=True)) / (w.var(1, correction=0, keepdim=True) + 1e-4).sqrt()).reshape(
        weight.shape
    )
    torch.testing.assert_close(model(X), nn.functional.group_norm(nn.functional.conv2d(X, expected, bias), 2))


def test_conversion_back_restores_the_output() -> None:
    model = cn.convert_norm(ResNet(), "gn", num_groups=2).eval()
    expected, keys = model(X), list(model.state_dict())
    cn.convert_norm(model, "gn_ws", num_groups=2)
    assert all(map(is_standardized, convolutions(model))) and list(model.state_dict()) == keys
    assert not torch.allclose(model(X), expected)
    cn.convert_norm(model, "gn", only="stem.*")
    assert all(map(is_standardized, convolutions(model)))  # until no layer needs it
    assert torch.equal(cn.convert_norm(model, "gn")(X), expected)
    assert not any(map(is_standardized, convolutions(model)))


def test_model_without_convolutions_and_with_other_ones() -> None:
    model = cn.convert_norm(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), "gn_ws", num_groups=2)
    assert type(model[0]) is nn.Linear and model(torch.randn(3, 4)).shape == (3, 8)

    class Odd(nn.Conv2d):
        pass

    other = nn.Sequential(nn.Conv2d(3, 3, 1), Odd(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match="a Odd can't be standardized"):
        cn.convert_norm(other, "gn_ws", num_groups=2)
    assert type(other[0]) is nn.Conv2d and type(other[2]) is nn.BatchNorm2d
