"""Garbage collection is suspended while torch is imported and skipped when the process exits."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

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


class Driver:
    """A CUDA driver that sees three GPUs and notes its calls."""

    def __init__(self, result: int = 0) -> None:
        self.result = result
        self.calls: list[tuple[str, int]] = []

    def cuInit(self, flags: int) -> int:
        self.calls.append(("initialize", flags))
        return self.result

    def cuDeviceGet(self, gpu: Any, index: int) -> int:
        gpu._obj.value = 100 + index
        return 0 if index < 3 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, gpu: ctypes.c_int) -> int:
        assert isinstance(context._obj, ctypes.c_void_p)
        self.calls.append(("retain", gpu.value))
        return 0


def import_torch_with(
    driver: object, device: str | None, monkeypatch: pytest.MonkeyPatch, in_workers: bool = False
) -> None:
    """Enter the context of the first import with this driver, and wait for the thread that it starts."""
    monkeypatch.setattr(ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = threading.enumerate()
    with importing_torch(device, in_workers):
        for thread in set(threading.enumerate()) - set(before):
            thread.join()


INITIALIZED = ("initialize", 0)


@pytest.mark.parametrize(
    ("device", "in_workers", "result", "calls"),
    [
        (None, False, 0, []),
        ("cpu", False, 0, []),
        ("cuda", False, 0, [INITIALIZED, ("retain", 100)]),
        ("cuda:2", False, 0, [INITIALIZED, ("retain", 102)]),
        ("cuda:3", False, 0, [INITIALIZED]),
        ("cuda", True, 0, [INITIALIZED]),
        ("cuda", False, 999, [INITIALIZED]),
        ("cuda:x", False, 0, [INITIALIZED]),
        ("cuda:0:1", False, 0, [INITIALIZED]),
    ],
    ids=[
        "default",
        "cpu",
        "first GPU",
        "third GPU",
        "no such GPU",
        "workers",
        "driver error",
        "no index",
        "two indices",
    ],
)
def test_gpu_is_initialized_during_the_import(
    device: str | None, in_workers: bool, result: int, calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(result)
    import_torch_with(driver, device, monkeypatch, in_workers)
    assert driver.calls == calls


def test_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def no_library(name: str) -> None:
        asked.append(name)
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    common._initialize_gpu(0)
    assert asked == ["libcuda.so.1"]


def test_exit_skips_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "argv", ["contnorm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert gc.freeze in registered
