"""Garbage is not looked for while torch is imported, and is again afterwards, whatever happens meanwhile."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator

import pytest

from contnorm.cli.garbage import importing_torch, leave_it_to_the_system


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Or nothing that the tests before this one left would ever be collected."""
    yield
    gc.unfreeze()


def test_none_is_looked_for_while_torch_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gc.isenabled()
    with importing_torch():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    with pytest.raises(ImportError), importing_torch():
        raise ImportError
    assert gc.isenabled()


def test_where_torch_is_there_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    frozen = gc.get_freeze_count()
    with importing_torch():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_who_looks_for_none_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    gc.disable()
    try:
        with importing_torch():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_at_the_end_it_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(atexit, "register", asked.append)
    leave_it_to_the_system()
    assert asked == [gc.freeze]
