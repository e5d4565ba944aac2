"""Documentation of the public names of `contnorm.bench`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from contnorm import bench

GUIDES = Path(__file__).resolve().parents[3] / "docs" / "howto"


@pytest.mark.parametrize("public", bench.__all__)
def test_public_name_is_documented(public: str) -> None:
    guides = " ".join(path.read_text() for path in GUIDES.glob("*.md"))
    assert getattr(bench, public).__doc__, f"contnorm.bench.{public} needs a docstring"
    assert re.search(rf"\bbench\.{public}\b", guides), f"no page of docs/howto names bench.{public}"
