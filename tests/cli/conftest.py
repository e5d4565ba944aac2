"""A terminal for the tests of commands: it is 200 wide, and keeps what is printed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)
