"""The CUDA driver is asked for all hardware queues before it is initialized, and a value of the user is kept."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from contnorm.bench.engine.run import find_device
from contnorm.bench.hardware_queues import VARIABLE, request_hardware_queues
from contnorm.cli.common import importing_torch
from tests.cli.test_garbage_collection import import_torch_with


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is removed at its end
    monkeypatch.delenv(VARIABLE)


def test_value_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    request_hardware_queues()
    assert os.environ[VARIABLE] == "1"


def test_queues_are_requested_before_the_driver_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def note(*_: object) -> bool:
        seen.append(os.environ.get(VARIABLE))
        return True

    import_torch_with(SimpleNamespace(cuInit=note), "cuda", monkeypatch)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(torch.cuda, "is_available", note)
    assert find_device("cuda").type == "cuda"
    assert seen == ["32", "32"]


def test_nothing_is_requested_for_a_cpu() -> None:
    find_device("cpu")
    with importing_torch("cpu"):
        pass
    assert VARIABLE not in os.environ
