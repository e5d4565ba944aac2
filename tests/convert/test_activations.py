"""Conversion to norms that contain an activation, and back: which activations are replaced, kept and refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm import convert_norm, create_norm, summarize
from contnorm.bench.models.mlp import MLP
from contnorm.bench.models.resnet import ResNet18
from contnorm.norms.activation import AbsorbedActivation, ActivationNorm
from contnorm.norms.filter_response import FilterResponseNorm2d

both = pytest.mark.parametrize("norm", ["frn", "evonorm_s0"])


def images(channels: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(4, channels, 6, 6, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    """A residual block as in torchvision: one in-place ReLU after the first norm and after the sum."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        y: Tensor = self.relu(out)
        return y


class Function(nn.Module):
    """A network whose activation is a function in its code."""

    def __init__(self, function: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.conv, self.bn, self.function = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(self.bn(self.conv(x))).mean((2, 3))
        return y


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(first, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1), nn.SiLU())


def options(norm: str) -> dict[str, Any]:
    return {"num_groups": 2} if norm == "evonorm_s0" else {}


def trained(model: nn.Module, channels: int) -> nn.Module:
    """A model whose batch norms have moments and parameters other than the initial ones."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.copy_(torch.rand(len(module.weight), generator=generator) + 0.5)
                module.bias.copy_(torch.rand(len(module.bias), generator=generator) - 0.5)
    model.train()(images(channels))
    return model


@both
def test_activation_after_a_norm_in_a_sequence_is_absorbed(norm: str) -> None:
    model = convert_norm(sequence(), norm, **options(norm))
    assert isinstance(model[0][2], AbsorbedActivation)
    assert model[0][1].apply_act and not model[2].apply_act  # no activation directly follows the second
    assert isinstance(model[5], nn.SiLU)
    x = model[0][0](images())
    assert torch.equal(model[0](images()), model[0][1](x))


def test_converted_sequence_computes_the_formula() -> None:
    model = sequence().double()
    convs = [copy.deepcopy(model[0][0]), copy.deepcopy(model[1])]
    convert_norm(model, "frn")
    with torch.no_grad():
        model[0][1].tau.fill_(-0.3)
    x = images().double()

    def response(x: Tensor) -> Tensor:
        return x / (x.square().mean((2, 3), keepdim=True) + 1e-5).sqrt()

    y = response(convs[1](response(convs[0](x)).clamp(min=-0.3)))
    torch.testing.assert_close(model[:3](x), y, rtol=1e-9, atol=1e-9)


@both
@pytest.mark.parametrize("make", [sequence, lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Block(), Block())])
def test_conversion_back_restores_the_output(norm: str, make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = trained(make(), 3).eval()
    for module in model.modules():  # a norm of samples keeps no running moments
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    kinds, keys = [type(m).__name__ for m in model.modules()], list(model.state_dict())
    expected = model(images())
    convert_norm(model, norm, example_input=images(), **options(norm))
    assert not torch.allclose(model(images()), expected)
    convert_norm(model, "bn")
    assert torch.equal(model(images()), expected)
    assert [type(m).__name__ for m in model.modules()] == kinds and list(model.state_dict()) == keys


@both
def test_shared_activation_is_absorbed_after_the_norm_only(norm: str) -> None:
    torch.manual_seed(0)
    block: Any = convert_norm(Block(), norm, example_input=images(8), **options(norm))
    assert (block.bn1.apply_act, block.bn2.apply_act) == (True, False)
    assert block.relu.shared
    x = images(8)
    expected = (block.bn2(block.conv2(block.bn1(block.conv1(x)))) + x).relu()
    assert torch.equal(block(x), expected)
    assert (block.bn1(block.conv1(x)) < 0).any() or norm == "frn"
    copied, loaded = copy.deepcopy(block), pickle.loads(pickle.dumps(block))
    assert torch.equal(copied(x), expected) and torch.equal(loaded(x), expected)
    convert_norm(copied, "bn")
    assert type(copied.relu) is nn.ReLU and isinstance(block.relu, AbsorbedActivation)


@pytest.mark.slow
def test_shared_activation_compiles_in_one_graph() -> None:
    block = convert_norm(Block(), "evonorm_s0", example_input=images(8), num_groups=2)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images(8)), block(images(8)))


def test_unknown_neighbours_need_an_example_input() -> None:
    block = Block()
    kinds = [type(m) for m in block.modules()]
    with pytest.raises(
        ValueError, match=r"layer 'bn1' .*unknown whether an activation follows.*example_input="
    ) as error:
        convert_norm(block, "frn")
    assert "\n" not in str(error.value) and "The model is unchanged." in str(error.value)
    assert [type(m) for m in block.modules()] == kinds


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (Tensor.relu, "relu"),
        (torch.relu_, "relu"),
        (lambda x: F.relu(x, inplace=True), "relu"),
        (F.silu, "silu"),
        (F.leaky_relu, "leaky_relu"),
        (lambda x: F.gelu(x) if x.shape[1] == 8 else x, "gelu"),
    ],
)
def test_activation_function_is_refused(function: Any, name: str) -> None:
    model = Function(function)
    with pytest.raises(ValueError, match=f"layer 'bn' .*its activation is a call of {name} in the model's code"):
        convert_norm(model, "frn", example_input=images())
    assert type(model.bn) is nn.BatchNorm2d


@both
def test_apply_act_false_keeps_the_activations(norm: str) -> None:
    model: Any = convert_norm(Function(), norm, apply_act=False, **options(norm))
    assert torch.equal(model(images()), F.relu(model.bn(model.conv(images()))).mean((2, 3)))
    block: Any = convert_norm(Block(), norm, apply_act=False, **options(norm))
    assert type(block.relu) is nn.ReLU and not block.bn1.apply_act


def test_output_that_is_used_twice_is_not_activated() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.act = nn.BatchNorm2d(3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(x)
            return self.act(y) + y.sigmoid()

    model: Any = convert_norm(Twice(), "frn", example_input=images())
    assert not model.bn.apply_act and type(model.act) is nn.ReLU


def test_reading_the_shape_is_no_use_of_the_output() -> None:
    class Shaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.act = nn.BatchNorm2d(3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.bn(x)
            assert y.shape[1] == 3 and y.dim() == 4 and y.size(0) > 0
            z: Tensor = self.act(y)
            return z

    model: Any = convert_norm(Shaped(), "frn", example_input=images())
    assert model.bn.apply_act and isinstance(model.act, AbsorbedActivation)


def test_layer_that_is_not_called_is_refused() -> None:
    block: Any = Block()
    block.unused = nn.BatchNorm2d(8)
    with pytest.raises(ValueError, match=r"layer 'unused' .*unknown whether an activation follows"):
        convert_norm(block, "frn", example_input=images(8))
    assert isinstance(convert_norm(block, "frn", example_input=images(8), skip="unused"), Block)


def test_example_run_leaves_no_hooks_and_moments() -> None:
    block = Block()
    state = copy.deepcopy(block.state_dict())
    with pytest.raises(ValueError, match="can't be run on example_input"):
        convert_norm(block, "frn", example_input=images(5))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in block.modules())
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())


def test_conversion_between_norms_with_activation_keeps_positions() -> None:
    block: Any = convert_norm(Block(), "evonorm_s0", example_input=images(8), num_groups=2)
    wrapper, weight = block.relu, block.bn1.weight
    convert_norm(block, "frn")  # positions are known
    assert type(block.bn1) is FilterResponseNorm2d and block.bn1.weight is weight
    assert (block.bn1.apply_act, block.bn2.apply_act) == (True, False) and block.relu is wrapper
    convert_norm(block, "frn", apply_act=False)
    assert type(block.relu) is nn.ReLU
    v = torch.randn(8)
    other: Any = convert_norm(Block(), "evonorm_s0", example_input=images(8), num_groups=2)
    with torch.no_grad():
        other.bn1.v.copy_(v)
    convert_norm(other, "evonorm_s0", num_groups=4)
    assert torch.equal(other.bn1.v, v) and other.bn1.num_groups == 4


def test_partial_conversion_back_keeps_the_shared_wrapper() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.act(self.b(self.act(self.a(x))))
            return y

    model: Any = convert_norm(Two(), "evonorm_s0", example_input=images(), num_groups=1)
    convert_norm(model, "bn", only="a")
    model.eval()
    assert isinstance(model.act, AbsorbedActivation)
    assert torch.equal(model(images()), model.b(model.a(images()).relu()))
    convert_norm(model, "evonorm_s0", only="a", example_input=images(), num_groups=1)
    assert torch.equal(model(images()), model.b(model.a(images())))
    convert_norm(model, "bn")
    assert type(model.act) is nn.ReLU and model.act.training is False


class NormAct(nn.BatchNorm2d):
    """Stand-in for timm's ``BatchNormAct2d``."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self.drop(super().forward(x)))
        return y


@both
def test_layer_with_its_own_activation(norm: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(NormAct(3, nn.SiLU()), nn.Conv2d(3, 4, 1), NormAct(4, nn.Identity())).eval()
    expected = model(images())
    convert_norm(model, norm, **({"num_groups": 1} if options(norm) else {}))
    assert (model[0].apply_act, model[2].apply_act) == (True, False)
    bare = create_norm(norm, 3, **({"num_groups": 1} if options(norm) else {}))
    assert torch.equal(model[0](images()), bare(images()))
    convert_norm(model, "bn")
    assert type(model[0].act) is nn.SiLU and torch.equal(model(images()), expected)


@both
def test_networks_of_the_bench_are_converted_as_they_are_built(norm: str) -> None:
    torch.manual_seed(0)
    built = ResNet18(3, 5, 8, norm=lambda channels: create_norm(norm, channels, **options(norm)))
    torch.manual_seed(0)
    network = ResNet18(3, 5, 8, norm=nn.BatchNorm2d)
    x = torch.randn(2, 3, 32, 32)
    before = network.eval()(x)
    convert_norm(network, norm, example_input=x, **options(norm))
    assert list(network.state_dict()) == list(built.state_dict())
    assert torch.equal(network(x), built(x))
    absorbing = [m for m in network.modules() if isinstance(m, ActivationNorm)]
    assert len(absorbing) == 20 and sum(m.apply_act for m in absorbing) == 9
    assert torch.equal(convert_norm(network, "bn")(x), before)


def test_perceptron_of_the_bench_is_converted() -> None:
    network = MLP(12, 5, 16, norm=lambda channels: create_norm("cn", channels, dim=1, num_groups=2))
    convert_norm(network, "evonorm_s0", example_input=torch.randn(2, 12))
    assert isinstance(network.norm1, ActivationNorm) and network.norm1.apply_act
    assert network.norm1.num_groups == 2
    assert "evonorm_s0" in str(summarize(network))


@both
def test_one_activation_module_after_several_norms_of_a_sequence_is_absorbed_by_each(norm: str) -> None:
    relu = nn.ReLU(inplace=True)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), relu, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), relu]
    model = nn.Sequential(*layers, nn.Conv2d(8, 8, 1), relu).eval()
    before = model(images())
    followed = convert_norm(copy.deepcopy(model), norm, example_input=images(), **options(norm))
    convert_norm(model, norm, **options(norm))
    assert isinstance(model[1], ActivationNorm) and isinstance(model[4], ActivationNorm)
    assert model[1].apply_act and model[4].apply_act
    assert torch.equal(model(images()), followed(images()))
    convert_norm(model, "bn")
    assert model[2] is model[5] is model[7] is relu and torch.equal(model(images()), before)
