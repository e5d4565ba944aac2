"""Garbage collection is suspended while a command is imported and skipped when the process exits."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator

import pytest

from contnorm.cli.common import collection_paused
from contnorm.cli.main import main


@pytest.fixture(autouse=True)
def unfreeze() -> Iterator[None]:
    """Without this, objects of earlier tests would never be collected."""
    yield
    gc.unfreeze()


def test_collection_is_suspended_during_an_import() -> None:
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    with pytest.raises(ImportError), collection_paused():
        raise ImportError
    assert gc.isenabled()


def test_exit_skips_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "argv", ["contnorm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert gc.freeze in registered
