"""The registry of norms: complete entries, lookup by name, creation of layers."""

import pytest
import torch

import contnorm as cn
from contnorm.registry import NORMS, find_norm, norm_class, norm_names
from contnorm.testing import NORM_CHECKS


@pytest.mark.parametrize("name", NORMS)
def test_entry_is_complete(name: str) -> None:
    spec = NORMS[name]
    assert spec.name == name and spec.title and spec.summary and spec.citation
    for dim in (1, 2, 3):
        cls = norm_class(spec, dim)  # type: ignore[arg-type]
        assert getattr(cn, cls.__name__) is cls, "a public name"


def test_declared_limitations_are_tested() -> None:
    declared = {cell for spec in NORMS.values() for cell in spec.cannot}
    assert {cell for cell in declared if not cell.startswith("rank")} <= set(NORM_CHECKS)


def test_find_norm_by_name_and_groups() -> None:
    paper = ("none", "bn", "ln", "in", "gn", "brn", "sn", "cn", "bn_gn", "cn_tied", "bn_gn_tied")
    assert norm_names()[: len(paper)] == paper
    assert {"adab2n", "tbbn", "bnt", "iabn", "rbn", "evonorm_s0", "frn", "gn_ws"} <= set(norm_names())
    assert find_norm(" CN32 ") == (NORMS["cn"], 32)
    assert find_norm("bn_gn_tied4") == (NORMS["bn_gn_tied"], 4)
    assert find_norm("evonorm_s0") == (NORMS["evonorm_s0"], None)
    assert find_norm("evonorm_s0-8") == (NORMS["evonorm_s0"], 8)
    with pytest.raises(ValueError, match="unknown norm 'cn-8'"):
        find_norm("cn-8")
    with pytest.raises(ValueError, match="'bn' has no groups"):
        find_norm("bn8")
    with pytest.raises(ValueError, match=r"unknown norm 'xyz'\. There are: none, bn"):
        find_norm("xyz")


def test_create_norm_passes_options() -> None:
    layer = cn.create_norm("bn_gn_tied", 16, dim=3, num_groups=4, eps=1e-3, momentum=None, dtype=torch.float64)
    assert type(layer) is cn.ContinualNorm3d
    assert (layer.order, layer.tied, layer.num_groups) == ("bn_gn", True, 4)
    assert (layer.eps, layer.momentum, layer.weight.dtype) == (1e-3, None, torch.float64)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gn", {"momentum": 0.1}),
        ("cn", {"num_group": 4}),
        ("cn8", {"num_groups": 4}),
        ("cn_tied", {"tied": False}),
        ("cn", {"dim": 4}),
        ("ContinualNorm2d", {}),
    ],
)
def test_create_norm_rejects_wrong_options(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(options), "unknown norm") if "dim" not in options else "4d"):
        cn.create_norm(name, 64, **options)  # type: ignore[arg-type]
