"""The registry of norms: complete entries, lookup by name, creation of layers."""

from pathlib import Path

import pytest
import torch

import contnorm as cn
from contnorm.norm_entry import norm_class
from contnorm.registry import NORMS, find_norm, norm_names
from contnorm.testing import NORM_CHECKS

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", NORMS)
def test_entry_is_complete(name: str) -> None:
    spec = NORMS[name]
    assert spec.name == name and spec.title and spec.summary and spec.citation
    stem = spec.target.partition(":")[0].rsplit(".", 1)[1]
    for dim in (1, 2, 3):
        cls = norm_class(spec, dim)  # type: ignore[arg-type]
        assert getattr(cn, cls.__name__) is cls, "a public name"
    tests = HERE.parent / "layers" / f"test_{stem}.py"
    assert tests.exists() or stem in ("batch", "group", "none"), f"{tests.name} is missing"


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
    with pytest.raises(ValueError, match=r"norm 'bn8' ends in a number of groups, but 'bn' has no groups\. Use 'bn'"):
        find_norm("bn8")
    with pytest.raises(ValueError, match=r"unknown norm 'xyz'\. There are \d+: none, bn"):
        find_norm("xyz")
    with pytest.raises(TypeError, match="must be a string such as 'cn', got 8"):
        find_norm(8)  # type: ignore[arg-type]


def test_create_norm_passes_options() -> None:
    layer = cn.create_norm("bn_gn_tied", 16, dim=3, num_groups=4, eps=1e-3, momentum=None, dtype=torch.float64)
    assert type(layer) is cn.ContinualNorm3d
    assert (layer.order, layer.tied, layer.num_groups) == ("bn_gn", True, 4)
    assert (layer.eps, layer.momentum, layer.weight.dtype) == (1e-3, None, torch.float64)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gn", {"momentum": 0.1}, r"create_norm: norm 'gn' does not accept 'momentum'\. Use eps, affine"),
        ("cn", {"num_group": 4}, r"norm 'cn' does not accept 'num_group'\. Did you mean 'num_groups'\?"),
        ("cn8", {"num_groups": 4}, r"'cn8' means 8 groups, and num_groups=4 contradicts it"),
        ("cn_tied", {"tied": False}, r"tied=False contradicts the norm 'cn_tied', which has tied=True"),
        ("cn", {"dim": 4}, r"dim=4 must be 1, 2 or 3"),
        ("cm", {}, r"create_norm: unknown norm 'cm'\. Did you mean 'cn'"),
        ("ContinualNorm2d", {}, r"unknown norm 'ContinualNorm2d'\. Did you mean 'cn'\?"),
        ("group_norm", {}, r"unknown norm 'group_norm'\. Did you mean 'gn'\?"),
        ("norm", {}, r"unknown norm 'norm'\. Did you mean .*'none'"),
        ("cn", {"num_groups": 0}, r"num_groups=0 must be a whole number, 1 or more, or 'auto'"),
    ],
)
def test_create_norm_rejects_wrong_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cn.create_norm(name, 64, **options)  # type: ignore[arg-type]


def test_error_lists_divisors_near_the_wrong_number() -> None:
    with pytest.raises(ValueError, match=r"Use a divisor of 720: 8, .*24, 30, 36, 40 among others"):
        cn.create_norm("cn", 720, num_groups=25)
