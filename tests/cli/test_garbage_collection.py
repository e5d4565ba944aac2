"""Garbage collection is suspended while torch is imported and skipped when the process exits."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from contnorm.cli import common
from contnorm.cli.common import importing_torch
from contnorm.cli.main import load_command, main


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


def test_collection_is_paused_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = []
    imported = importlib.import_module

    def recorded(name: str) -> ModuleType:
        states.append(gc.isenabled())
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", recorded)
    load_command("show")
    assert states[0] is False and gc.isenabled()
    with pytest.raises(KeyError), common.collection_paused():
        raise KeyError
    assert gc.isenabled()


def test_driver_of_a_gpu_is_initialized_during_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    libraries = {"libcuda.so.1": SimpleNamespace(cuInit=called.append)}
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    for device in (None, "cpu", "cuda:1"):
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        before = threading.enumerate()
        with importing_torch(device):
            for thread in set(threading.enumerate()) - set(before):
                thread.join()
    assert called == [0]
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    common._initialize_driver()  # a machine without a GPU


def _no_library(name: str) -> None:
    raise OSError(name)


def test_exit_skips_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "argv", ["contnorm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert gc.freeze in registered
