"""Conversion to group norm with weight standardization, and back: which convolutions are standardized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from contnorm import WSGroupNorm2d, convert_norm, create_norm
from contnorm.bench.models.resnet import ResNet18
from contnorm.convert.standardization import standardize_convolutions
from contnorm.norms.activation import normed_relu
from contnorm.norms.weight_standardization import is_standardized
from tests.convert.test_activations import Block, images, sequence


def test_convolutions_before_norms_are_standardized() -> None:
    model = sequence()
    weight = model[0][0].weight
    keys = list(nn.Sequential(*model[:2]).state_dict())
    convert_norm(model, "gn_ws", num_groups=2)
    assert [is_standardized(conv) for conv in (model[0][0], model[1], model[4])] == [True, True, False]
    assert model[0][0].weight is weight and model[0][1].standardized == (model[0][0],)
    assert set(keys) - set(nn.Sequential(*model[:2]).state_dict()) <= {
        f"0.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    w = weight.flatten(1)
    expected = (w - w.mean(1, keepdim=True)) / (w.var(1, correction=0, keepdim=True) + 1e-6).sqrt()
    y = nn.functional.conv2d(images(), expected.reshape(weight.shape), model[0][0].bias)
    torch.testing.assert_close(model[0](images()), nn.functional.group_norm(y, 2).relu())


@pytest.mark.parametrize("other", ["bn", "gn"])
def test_conversion_back_restores_the_output(other: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block()).eval()
    groups = {"num_groups": 2} if other == "gn" else {}
    expected = convert_norm(model, other, **groups)(images())
    convert_norm(model, "gn_ws", num_groups=2, example_input=images(), weight_eps=1e-4)
    assert is_standardized(model[1].conv1) and is_standardized(model[1].conv2) and not is_standardized(model[0])
    assert model[1].conv1.weight_eps == 1e-4
    assert not torch.allclose(model(images()), expected)
    assert torch.equal(convert_norm(model, other, **groups)(images()), expected)
    assert not any(is_standardized(m) for m in model.modules())


def test_partial_conversion_back() -> None:
    model = convert_norm(sequence(), "gn_ws", num_groups=2)
    convert_norm(model, "gn", only="2")
    assert is_standardized(model[0][0]) and not is_standardized(model[1])


def test_unknown_convolution_needs_an_example_input() -> None:
    block = Block()
    with pytest.raises(ValueError, match=r"layer 'bn1' .*unknown which convolution precedes it\. Give example_input="):
        convert_norm(block, "gn_ws", num_groups=2)
    assert type(block.conv1) is nn.Conv2d and type(block.bn1) is nn.BatchNorm2d


def test_model_without_convolutions_needs_none() -> None:
    class Perceptron(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.fc(x))
            return y

    model: Any = convert_norm(Perceptron(), "gn_ws", num_groups=2)
    assert type(model.fc) is nn.Linear and model(torch.randn(3, 4)).shape == (3, 8)


def test_other_convolutions_are_refused() -> None:
    class Odd(nn.Conv2d):
        pass

    model = nn.Sequential(Odd(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match=r"the convolution '0' before it: a Odd can't be standardized.*unchanged"):
        convert_norm(model, "gn_ws", num_groups=2)
    assert type(model[1]) is nn.BatchNorm2d


def test_all_convolutions_of_a_network_of_the_bench() -> None:
    network = ResNet18(3, 5, 8, norm=lambda channels: WSGroupNorm2d(channels, num_groups=2))
    plain = list(network.state_dict())
    standardize_convolutions(network)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 20 and all(map(is_standardized, convolutions))
    assert list(network.state_dict()) == plain
    convert_norm(network, "bn")
    assert not any(map(is_standardized, convolutions))


class ConvolvedShortcut(nn.Module):
    """Adds the output of a convolution without a norm to that of a norm."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.conv, self.short = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.norm = create_norm(norm, 8, **({} if norm == "bn" else {"num_groups": 2}))

    def forward(self, x: Tensor) -> Tensor:
        return normed_relu(self.norm, self.conv(x), self.short(x))


@pytest.mark.parametrize("norm", ["bn", "gn", "cn"])
def test_convolution_of_a_shortcut_is_not_standardized(norm: str) -> None:
    model = ConvolvedShortcut(norm)
    convert_norm(model, "gn_ws", num_groups=2, example_input=images())
    assert is_standardized(model.conv) and not is_standardized(model.short)
