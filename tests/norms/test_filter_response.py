"""Filter response normalization against timm's numbers, and its threshold."""

from __future__ import annotations

import pytest
import torch

from contnorm import FilterResponseNorm1d, FilterResponseNorm2d, create_norm
from tests.norms.timm_numbers import TOLERANCE, assert_numbers, output, timm_layers, with_values


def test_numbers_of_timm() -> None:
    """`FilterResponseNormTlu2d(4)` of huggingface/pytorch-image-models at aa4b585 (timm 1.0.29.dev0)."""
    expected = [0.3388649804, 0.7797455065, 0.6065761136, 0.8210534737, 0.2837557039]
    expected += [0.2182080827, 1.8880108547, 0.6065761136, 0.1737798294, 1.5943105522]
    assert_numbers(output(with_values(FilterResponseNorm2d(4), "tau")), expected, 40.691068294)


def test_numbers_of_timm_without_activation() -> None:
    """`FilterResponseNormTlu2d(4, apply_act=False)` of the same commit."""
    expected = [0.3388649804, 0.7797455065, -1.7268027488, 0.8210534737, 0.2837557039]
    expected += [-1.7209860774, 1.8880108547, 0.0025786127, -0.9629283922, 1.5943105522]
    assert_numbers(output(with_values(FilterResponseNorm2d(4, apply_act=False), "tau")), expected, 20.619444099)


@pytest.mark.parametrize("apply_act", [True, False])
def test_equals_installed_timm(apply_act: bool) -> None:
    theirs = with_values(timm_layers().FilterResponseNormTlu2d(4, apply_act=apply_act), "tau")
    ours = with_values(FilterResponseNorm2d(4, apply_act=apply_act), "tau")
    torch.testing.assert_close(output(ours), output(theirs), rtol=TOLERANCE, atol=TOLERANCE)


def test_initial_threshold_is_relu() -> None:
    x = torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    linear = FilterResponseNorm2d(8, apply_act=False)
    assert torch.equal(create_norm("frn", 8)(x), linear(x).relu())


def test_threshold_below_zero_passes_negative_values() -> None:
    layer = FilterResponseNorm2d(1, eps=1e-12)
    with torch.no_grad():
        layer.tau.fill_(-0.5)
    y = layer(torch.tensor([[[[-1.0, 7.0], [-5.0, 5.0]]]]))
    torch.testing.assert_close(y, torch.tensor([[[[-0.2, 1.4], [-0.5, 1.0]]]]))
    y.sum().backward()
    assert layer.tau.grad.tolist() == [1.0]  # of the one value below it


def test_one_position_is_refused() -> None:
    with pytest.raises(ValueError, match="one value per channel"):
        FilterResponseNorm1d(8)(torch.randn(3, 8))
    with pytest.raises(ValueError, match="one value per channel"):
        FilterResponseNorm2d(8)(torch.randn(3, 8, 1, 1))


def test_parameter_exists_only_with_activation() -> None:
    assert sorted(FilterResponseNorm2d(8).state_dict()) == ["bias", "tau", "weight"]
    assert sorted(FilterResponseNorm2d(8, apply_act=False).state_dict()) == ["bias", "weight"]
    assert sorted(FilterResponseNorm2d(8, affine=False).state_dict()) == ["tau"]
