"""Every row of the catalog leads somewhere, and what it says is so."""

from pathlib import Path

import pytest

import contnorm as cn
from contnorm.factory import norm_class
from contnorm.registry import NORMS, find_norm, norm_names

HERE = Path(__file__).resolve().parent
EXAMINED_IN_CODE = {
    word.split('"')[0]
    for line in (HERE / "test_norms.py").read_text().splitlines()
    if "spec.cannot" in line
    for word in line.split('"')[1:2]
}


@pytest.mark.parametrize("name", NORMS)
def test_row_is_complete(name: str) -> None:
    spec = NORMS[name]
    assert spec.name == name and spec.title and spec.summary and spec.citation
    stem = spec.target.partition(":")[0].rsplit(".", 1)[1]
    for dim in (1, 2, 3):
        cls = norm_class(spec, dim)  # type: ignore[arg-type]
        assert getattr(cn, cls.__name__) is cls, "a public name"
    tests = HERE.parent / "layers" / f"test_{stem}.py"
    assert tests.exists() or stem in ("batch", "group", "none"), f"write {tests.name} for what only it does"


def test_what_a_row_declares_is_examined() -> None:
    declared = {cell for spec in NORMS.values() for cell in spec.cannot}
    assert {cell for cell in declared if not cell.startswith("rank")} <= EXAMINED_IN_CODE


def test_names_are_found_in_any_case_and_with_groups() -> None:
    assert norm_names() == ("none", "bn", "ln", "in", "gn", "brn", "sn", "cn", "bn_gn", "cn_tied", "bn_gn_tied")
    assert find_norm(" CN32 ") == (NORMS["cn"], 32)
    assert find_norm("bn_gn_tied4") == (NORMS["bn_gn_tied"], 4)
    with pytest.raises(ValueError, match=r"norm 'bn8' carries a number of groups, but 'bn' has no groups\. Use 'bn'"):
        find_norm("bn8")
    with pytest.raises(ValueError, match=r"unknown norm 'xyz'\. There are 11: none, bn"):
        find_norm("xyz")
    with pytest.raises(TypeError, match="must be a string such as 'cn', got 8"):
        find_norm(8)  # type: ignore[arg-type]
