"""How a kernel is launched; and how many are compiled ahead, side by side, before the first of them is.

Triton compiles a kernel when it is first launched, and the launch waits for it. A network meets dozens in its first
step, one after another, and would wait most of a minute. Compiled ahead, they are all under way at once.

At every launch Triton looks at each argument again to find the code compiled for its like, which takes longer than the
rest of a layer. What it found once is kept here, under a key that is quick to make and no coarser than Triton's own;
settings of Triton itself (its debug mode, say) have to be made before a kernel's first launch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import Context, copy_context
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from contnorm.kernels.triton.availability import INSTALLED, INTERPRETED

__all__ = ["Launch", "can_compile_ahead", "compiling_ahead", "here", "launch"]

# The interpreter compiles nothing; and for AMD's GPUs Triton looks at more of a tensor than is in our key.
KEEPS = not INTERPRETED and torch.version.hip is None
MOST_KEPT = 1024  # where sizes never come to an end

_ahead: Context | None = None  # one for all threads: a backward pass runs in threads of torch's own
_launches: dict[tuple[Any, ...], Launch] = {}
_ALREADY = nullcontext()


def here(x: Tensor) -> Any:
    """Inside, kernels are launched on the tensor's device: Triton's is the current one, which need not be it."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _ALREADY
    return torch.cuda.device(x.device)


class Launch:
    """A kernel with its grid and its constants: called with the rest of its arguments, it launches.

    Where kernels are being compiled ahead, a call has the kernel compiled, and launches nothing.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, *args: Any) -> None:
        if _ahead is not None:  # Triton finds its mode in the context
            _ahead.copy().run(self.kernel.warmup, *args, grid=self.grid, **self.constants)
        elif not KEEPS:
            self.kernel[self.grid](*args, **self.constants)
        else:
            key = _key(args)
            known = self._compiled.get(key)
            if known is None or self.kernel.pre_run_hooks:
                self._keep(key, len(args), self.kernel[self.grid](*args, **self.constants))
            else:
                run, constants = known
                run(*args, *constants)

    def _keep(self, key: tuple[Any, ...], given: int, compiled: Any) -> None:
        """Keep what a launch gave back, where it is a compiled kernel and all its arguments are known."""
        compiled = compiled.result() if hasattr(compiled, "result") else compiled  # one that was compiled ahead
        names = getattr(self.kernel, "arg_names", [])[given:]
        if not hasattr(compiled, "packed_metadata") or not self.constants.keys() >= set(names):
            return
        if len(self._compiled) >= MOST_KEPT:
            self._compiled.clear()
        constants = tuple(self.constants[name] for name in names)  # in the kernel's order, without Triton's options
        self._compiled[key] = compiled[(*self.grid, 1, 1)[:3]], constants


def _key(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that Triton compiles by: of a tensor its type and whether it is aligned, of a whole number its value.

    True is apart from 1, which it equals: Triton has a type of its own for it.
    """
    kinds = [
        (arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,))
        if isinstance(arg, Tensor)
        else (float if isinstance(arg, float) else (arg,) if isinstance(arg, bool) else arg)
        for arg in args
    ]
    return torch.cuda.current_device(), *kinds


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel whose grid and constants are put together for each launch."""
    key = id(kernel), grid, *constants, *constants.values()
    known = _launches.get(key)
    if known is None or known.kernel is not kernel:
        if len(_launches) >= MOST_KEPT:
            _launches.clear()
        known = _launches[key] = Launch(kernel, grid, constants)
    known(*args)


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
