"""Public names have a docstring with an example, which the doctests run, and a page that names them."""

import re
from types import ModuleType
from typing import Any

import pytest

import contnorm as cn
from contnorm import bench, functional, testing
from tests.docs.pages import ROOT

GUIDES = ROOT / "docs" / "howto"
NAMES: dict[Any, set[str]] = {
    cn: set(cn.__all__),
    functional: set(functional.__all__),
    testing: set(testing.__all__) - {"NORM_CHECKS"},  # a dict has no docstring
    bench: set(bench.__all__),
}


@pytest.mark.parametrize("module", NAMES, ids=lambda module: module.__name__)
def test_public_names_are_documented_with_an_example(module: ModuleType) -> None:
    without = []
    for name in NAMES[module]:
        thing, text = getattr(module, name), getattr(module, name).__doc__ or ""
        plain = isinstance(thing, ModuleType) or (isinstance(thing, type) and issubclass(thing, BaseException))
        if not text or (">>>" not in text and not (plain and module is bench)):
            without.append(name)
    assert without == []


@pytest.mark.parametrize(("module", "page"), [(bench, "*.md"), (testing, "bring-your-own-norm.md")])
def test_public_names_are_in_the_guides(module: ModuleType, page: str) -> None:
    text = " ".join(path.read_text() for path in GUIDES.glob(page))
    assert [name for name in NAMES[module] if not re.search(rf"(`|\b{module.__name__[9:]}\.){name}\b", text)] == []
