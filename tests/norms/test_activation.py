"""EvoNorm-S0, filter response normalization (against timm's layers) and dynamic tanh, and their own parameters."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from contnorm import DynamicTanh1d, EvoNorm2d, FilterResponseNorm1d, FilterResponseNorm2d, create_norm
from tests.norms.timm_layers import TOLERANCE, output, timm_layers, with_values

ACT = {"evonorm_s0": "v", "frn": "tau"}  # the parameter of the activation


def make(norm: str, **options: Any) -> Any:
    return create_norm(norm, 4, **({"num_groups": 2} if norm == "evonorm_s0" else {}), **options)


@pytest.mark.parametrize("apply_act", [True, False])
def test_equals_installed_timm(apply_act: bool) -> None:
    layers = timm_layers()
    evonorm = (
        layers.EvoNorm2dS0(4, groups=2) if apply_act else layers.EvoNorm2dS0a(4, groups=2, eps=1e-5, apply_act=False)
    )
    for norm, theirs in (("evonorm_s0", evonorm), ("frn", layers.FilterResponseNormTlu2d(4, apply_act=apply_act))):
        ours = output(with_values(make(norm, apply_act=apply_act), ACT[norm]))
        torch.testing.assert_close(ours, output(with_values(theirs, ACT[norm])), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("norm", ACT)
def test_parameter_exists_only_with_activation(norm: str) -> None:
    assert sorted(make(norm).state_dict()) == sorted(["bias", ACT[norm], "weight"])
    assert sorted(make(norm, affine=False).state_dict()) == [ACT[norm]]
    layer, removed = make(norm, apply_act=False), make(norm)
    assert sorted(layer.state_dict()) == ["bias", "weight"] and "apply_act=False" in repr(layer)
    removed.remove_activation()
    assert repr(copy.deepcopy(removed)) == repr(layer) and sorted(removed.state_dict()) == ["bias", "weight"]


def test_initial_activations_are_silu_and_relu() -> None:
    x = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(make("frn")(x), make("frn", apply_act=False)(x).relu())
    torch.testing.assert_close(make("evonorm_s0")(x), make("evonorm_s0", apply_act=False)(x) * x.sigmoid())


def test_evonorm_has_the_same_gradients_in_both_layouts() -> None:
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


def test_threshold_below_zero_passes_negative_values() -> None:
    layer = FilterResponseNorm2d(1, eps=1e-12)
    nn.init.constant_(layer.tau, -0.5)
    y = layer(torch.tensor([[[[-1.0, 7.0], [-5.0, 5.0]]]]))
    torch.testing.assert_close(y, torch.tensor([[[[-0.2, 1.4], [-0.5, 1.0]]]]))
    y.sum().backward()
    assert layer.tau.grad.tolist() == [1.0]  # of the one value below it


def test_one_position_is_refused() -> None:
    for layer, shape in ((FilterResponseNorm1d(8), (3, 8)), (FilterResponseNorm2d(8), (3, 8, 1, 1))):
        with pytest.raises(ValueError, match="one value per channel"):
            layer(torch.randn(shape))


def test_dynamic_tanh_of_a_sequence_is_the_formula_of_its_paper() -> None:
    """The paper's layer has channels last, and one alpha."""
    generator = torch.Generator().manual_seed(0)
    x, layer = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64), DynamicTanh1d(3, dtype=torch.float64)
    assert layer.alpha.tolist() == [0.5] and sorted(layer.state_dict()) == ["alpha", "bias", "weight"]
    state = {name: torch.randn(value.shape, generator=generator).double() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    alpha, weight, bias = (state[name].clone().requires_grad_() for name in ("alpha", "weight", "bias"))
    y, expected = layer(x.transpose(1, 2)).transpose(1, 2), torch.tanh(alpha * x) * weight + bias
    torch.testing.assert_close(y, expected)
    (y * x).sum().backward(), (expected * x).sum().backward()
    for parameter, plain in ((layer.alpha, alpha), (layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(parameter.grad, plain.grad)
    layer.reset_parameters()
    assert layer.alpha.tolist() == [0.5] and layer.weight.tolist() == [1.0] * 3
