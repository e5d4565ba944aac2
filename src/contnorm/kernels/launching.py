"""How a kernel is launched; and how many are compiled ahead, side by side, before the first of them is.

Triton compiles a kernel when it is first launched, and the launch waits for it. A network meets dozens in its first
step, one after another, and would wait most of a minute. Compiled ahead, they are all under way at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from importlib import import_module
from typing import Any

from contnorm.kernels.triton_here import INSTALLED, INTERPRETED

__all__ = ["can_compile_ahead", "compiling_ahead", "launch"]

_ahead: Context | None = None  # one for all threads: a backward pass runs in threads of torch's own


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel; where kernels are being compiled ahead, have it compiled, and launch nothing."""
    if _ahead is None:
        kernel[grid](*args, **constants)
    else:
        _ahead.copy().run(kernel.warmup, *args, grid=grid, **constants)  # Triton finds its mode in the context


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, what is launched is compiled and not run, so outputs hold anything; all is compiled at the end."""
    global _ahead
    mode = import_module("triton").AsyncCompileMode
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers, mode(workers):
        _ahead = copy_context()
        try:
            yield
        finally:
            _ahead = None


def can_compile_ahead() -> bool:
    """Whether the Triton that is here can: older ones, and its interpreter, can't."""
    return INSTALLED and not INTERPRETED and hasattr(import_module("triton"), "AsyncCompileMode")
