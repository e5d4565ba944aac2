"""Garbage collection is suspended while torch is imported and skipped when the process exits."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator

import pytest

from contnorm.cli.common import importing_torch
from contnorm.cli.main import main


@pytest.fixture(autouse=True)
def unfreeze() -> Iterator[None]:
    """Without this, objects of earlier tests would never be collected."""
    yield
    gc.unfreeze()


def test_collection_suspended_during_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gc.isenabled()
    with importing_torch():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    with pytest.raises(ImportError), importing_torch():
        raise ImportError
    assert gc.isenabled()


def test_collection_unchanged_if_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    frozen = gc.get_freeze_count()
    with importing_torch():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_collection_stays_disabled_if_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    gc.disable()
    try:
        with importing_torch():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_exit_skips_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "argv", ["contnorm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert gc.freeze in registered
