"""A console for the tests of commands: 200 columns wide, prints to memory."""

from __future__ import annotations

import io

import pytest
from rich.console import Console


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)
