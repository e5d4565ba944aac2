"""Compiling ahead: what is launched is compiled and not run, in whatever thread, and all of it by the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import pytest
import torch

from contnorm.kernels import launching

triton = pytest.importorskip("triton", reason="Triton is not installed")


class Kernel:
    """Stands in for a Triton kernel: the GPU's own are tried in ``tests/engine/test_graphs.py``."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launched.append((grid, args, constants))

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> None:
        mode: ContextVar[Any] = import_module("triton.runtime._async_compile").active_mode
        done = mode.get().submit(object(), lambda: self.compiled.append((grid, args, constants)), lambda _: None)
        assert done is not None


needs_mode = pytest.mark.skipif(
    not hasattr(triton, "AsyncCompileMode"), reason="this Triton can't compile side by side"
)


def test_a_launch_is_a_launch() -> None:
    kernel = Kernel()
    launching.launch(kernel, (3,), 1, 2, SIZE=4)
    assert kernel.launched == [((3,), (1, 2), {"SIZE": 4})] and not kernel.compiled


@needs_mode
def test_ahead_all_threads_compile_and_none_launches() -> None:
    kernel = Kernel()
    with launching.compiling_ahead():
        launching.launch(kernel, (1,), "here")
        with ThreadPoolExecutor(1) as other:  # as a backward pass does
            other.submit(launching.launch, kernel, (2,), "there", SIZE=1).result()
    assert not kernel.launched
    assert sorted(kernel.compiled) == [((1,), ("here",), {}), ((2,), ("there",), {"SIZE": 1})]
    launching.launch(kernel, (1,), "again")
    assert kernel.launched == [((1,), ("again",), {})]


@needs_mode
def test_an_error_inside_ends_it() -> None:
    kernel = Kernel()
    with pytest.raises(KeyError), launching.compiling_ahead():
        raise KeyError
    launching.launch(kernel, (1,))
    assert kernel.launched


def test_the_interpreter_compiles_nothing_ahead() -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    assert not launching.can_compile_ahead()
