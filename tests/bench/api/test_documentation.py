"""Documentation of the public names of `contnorm.bench`."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from contnorm import bench

GUIDES = Path(__file__).resolve().parents[3] / "docs" / "howto"


@pytest.mark.parametrize("public", bench.__all__)
def test_public_name_is_documented(public: str) -> None:
    documented = getattr(bench, public)
    guides = " ".join(path.read_text() for path in GUIDES.glob("*.md"))
    assert documented.__doc__, f"contnorm.bench.{public} needs a docstring"
    assert re.search(rf"\bbench\.{public}\b", guides), f"no page of docs/howto names bench.{public}"
    if isinstance(documented, ModuleType) or (isinstance(documented, type) and issubclass(documented, BaseException)):
        return
    assert ">>>" in documented.__doc__, f"the docstring of contnorm.bench.{public} needs an example"
