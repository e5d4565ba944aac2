"""Norms by name: options reach the layer, and those that don't fit are named."""

import pytest
import torch

import contnorm as cn


def test_options_reach_the_layer() -> None:
    layer = cn.create_norm("bn_gn_tied", 16, dim=3, num_groups=4, eps=1e-3, momentum=None, dtype=torch.float64)
    assert type(layer) is cn.ContinualNorm3d
    assert (layer.order, layer.tied, layer.num_groups) == ("bn_gn", True, 4)
    assert (layer.eps, layer.momentum, layer.weight.dtype) == (1e-3, None, torch.float64)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gn", {"momentum": 0.1}, r"create_norm: norm 'gn' takes no 'momentum'\. It takes eps, affine"),
        ("cn", {"num_group": 4}, r"norm 'cn' takes no 'num_group'\. Did you mean 'num_groups'\?"),
        ("cn8", {"num_groups": 4}, r"'cn8' asks for 8 groups and num_groups=4 for others"),
        ("cn_tied", {"tied": False}, r"tied=False contradicts the norm 'cn_tied', which is tied=True"),
        ("cn", {"dim": 4}, r"dim=4 must be 1, 2 or 3"),
        ("cm", {}, r"create_norm: unknown norm 'cm'\. Did you mean 'cn'"),
        ("ContinualNorm2d", {}, r"unknown norm 'ContinualNorm2d'\. Did you mean 'cn'\?"),
        ("group_norm", {}, r"unknown norm 'group_norm'\. Did you mean 'gn'\?"),
        ("norm", {}, r"unknown norm 'norm'\. Did you mean 'none'"),
        ("cn", {"num_groups": 0}, r"num_groups=0 must be a whole number, 1 or more, or 'auto'"),
    ],
)
def test_what_does_not_fit_is_named(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        cn.create_norm(name, 64, **options)  # type: ignore[arg-type]


def test_divisors_near_the_wanted_number_are_named_where_there_are_many() -> None:
    with pytest.raises(ValueError, match=r"Use a divisor of 720: 8, .*24, 30, 36, 40 among others"):
        cn.create_norm("cn", 720, num_groups=25)
