"""EvoNorm-S0 and filter response normalization against timm's numbers, and the parameters of their activations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from contnorm import EvoNorm2d, FilterResponseNorm1d, FilterResponseNorm2d, create_norm
from tests.norms.timm_numbers import TOLERANCE, assert_numbers, output, timm_layers, with_values

ACT = {"evonorm_s0": "v", "frn": "tau"}  # the parameter of the activation
# fmt: off
# Of huggingface/pytorch-image-models at aa4b585 (timm 1.0.29.dev0): `EvoNorm2dS0(4, groups=2)`, without activation
# `EvoNorm2dS0a(4, groups=2, eps=1e-5, apply_act=False)`, which keeps the denominator, and `FilterResponseNormTlu2d(4)`,
# with and without activation. Every fifth value, and the sum.
TIMM: dict[tuple[str, bool], tuple[list[float], float]] = {
    ("evonorm_s0", True): (
        [0.1246270099, 0.3699609496, -0.5440407015, 0.380723726, 0.1828188896,
         -0.7999499075, 1.4578498134, 0.0937237249, -0.5574508058, 0.7885138362],
        15.506588866,
    ),
    ("evonorm_s0", False): (
        [0.3458616366, 0.793593847, -1.9372230805, 0.7883980647, 0.3587804408,
         -1.6426542144, 2.195315492, -0.0365735642, -1.106943829, 1.4262565249],
        22.336918616,
    ),
    ("frn", True): (
        [0.3388649804, 0.7797455065, 0.6065761136, 0.8210534737, 0.2837557039,
         0.2182080827, 1.8880108547, 0.6065761136, 0.1737798294, 1.5943105522],
        40.691068294,
    ),
    ("frn", False): (
        [0.3388649804, 0.7797455065, -1.7268027488, 0.8210534737, 0.2837557039,
         -1.7209860774, 1.8880108547, 0.0025786127, -0.9629283922, 1.5943105522],
        20.619444099,
    ),
}
# fmt: on


def make(norm: str, **options: Any) -> Any:
    return create_norm(norm, 4, **({"num_groups": 2} if norm == "evonorm_s0" else {}), **options)


@pytest.mark.parametrize(("norm", "apply_act"), TIMM)
def test_numbers_of_timm(norm: str, apply_act: bool) -> None:
    layer = with_values(make(norm, apply_act=apply_act), ACT[norm])
    assert_numbers(output(layer), *TIMM[norm, apply_act])


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
