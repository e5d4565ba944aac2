"""Whether Triton kernels can run, the layouts of their inputs, and launches with a cache of compiled kernels.

Triton is imported at the first launch; importing this package does not require it.

At every launch, Triton inspects each argument to look up the compiled kernel, which takes longer than the rest of a
layer. This module caches the result under a key that is fast to compute and at least as specific as Triton's. With this
cache and that of the launches, an eager step of ResNet-18 on an H200 took 10.8 ms instead of 21.2. Settings of Triton
(such as its debug mode) must be made before the first launch of a kernel.

Triton compiles a kernel at its first launch, which waits for the compilation. The first step of a network launches
dozens of kernels one after another and would wait most of a minute. Compiled ahead, they are compiled in parallel.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from contextvars import Context, copy_context
from copy import copy
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of inputs; the kernels compute in float32

# Read once, because Triton also reads its mode at import. A C compiler builds its launcher at the first launch.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# With older versions, whose kernels were never checked, the other implementations are used.
INSTALLED = find_spec("triton") is not None and torch.__version__ >= "2.11"
COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))

# No cache for the interpreter, which compiles nothing, nor for AMD GPUs, where Triton's key has more than ours.
CACHES_KERNELS = not INTERPRETED and torch.version.hip is None
CACHE_LIMIT = 1024  # limit of the cache, for programs whose sizes keep changing

_ahead: Context | None = None  # shared by all threads: torch runs backward passes in its own threads
_launches: dict[tuple[Any, ...], Launch] = {}
_recordings = threading.local()  # each thread has a list of recorded launches, if it records
_NO_SWITCH = nullcontext()


# --- inputs -----------------------------------------------------------------------------------------------------


def can_launch(device: torch.device) -> bool:
    """Whether a kernel can be launched on this device."""
    if INTERPRETED:
        return INSTALLED
    return INSTALLED and COMPILER and device.type == "cuda"


def is_plain(x: Tensor) -> bool:
    """Whether kernels can be launched directly: a plain tensor, and no compiler, dispatch mode or functorch active."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )


def can_use_kernels(dy: Tensor) -> bool:
    """Whether kernels can compute a backward pass: no double backward, vmap or dispatch mode is active."""
    return not torch.is_grad_enabled() and not is_batched(dy) and is_plain(dy)


def is_batched(dy: Tensor) -> bool:
    """Whether a gradient is one of several at once, by ``is_grads_batched`` of `torch.autograd.grad`."""
    batched: bool = torch._C._functorch.is_legacy_batchedtensor(dy)
    return batched


def is_untraced() -> bool:
    """Whether no exporter, tracer or transform is active, which would have to trace into the kernels."""
    return (
        not torch.compiler.is_exporting()  # an exported program should not need custom operators
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def is_transformed() -> bool:
    """Whether functorch or forward-mode AD is active; neither can trace into the operators."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: Tensor) -> bool:
    """Whether a tensor is in channels_last layout."""
    if x.dim() == 3:
        return x.transpose(1, 2).is_contiguous()
    return x.dim() > 3 and x.is_contiguous(memory_format=_CHANNELS_LAST[x.dim()])


def in_layout(x: Tensor) -> Tensor:
    """Return the tensor itself if it is contiguous or channels_last, else a contiguous copy."""
    return x if x.is_contiguous() or channels_last(x) else x.contiguous()


def like(other: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a tensor, if there is one, in the layout of x, which is contiguous or channels_last."""
    if other is None or x.is_contiguous():
        return dense(other)
    return other if channels_last(other) else other.movedim(1, -1).contiguous().movedim(-1, 1)


def dense(parameter: Tensor | None) -> Tensor | None:
    """Return a contiguous (C,) tensor; the parameter may be a slice or expanded."""
    return None if parameter is None else parameter.contiguous()


def check_parameters(x: Tensor, *channels: Tensor | None) -> None:
    """Check shape and device of parameters and moments, because a kernel would read out of bounds otherwise."""
    shape, device = x.shape[1:2], x.device
    for each in channels:
        if each is not None and (each.shape != shape or each.device != device):
            raise RuntimeError(
                f"an input of shape {tuple(x.shape)} on {device} needs parameters and moments of shape {tuple(shape)} "
                f"there, got {tuple(each.shape)} on {each.device}. Move the layer with layer.to(x.device)."
            )


# --- launches ---------------------------------------------------------------------------------------------------


def on_device_of(x: Tensor) -> Any:
    """Context manager that makes the tensor's device current, because Triton launches on the current device."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(x.device)


@lru_cache(maxsize=64)
def _has_clusters(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def has_clusters(x: Tensor) -> bool:
    """Whether the tensor's device can run several programs as a cluster, with a common barrier."""
    return CACHES_KERNELS and x.is_cuda and _has_clusters(x.get_device())


class Launch:
    """A kernel with its grid and constants. Calling it with the other arguments launches the kernel.

    With ``cluster`` above one, so many consecutive programs run at the same time and can wait for each other. Inside
    `compiling_ahead`, a call only compiles the kernel.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: dict[str, Any], cluster: int = 1) -> None:
        self.kernel = kernel
        self.cluster = cluster
        self.grid = grid
        self.constants = constants
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], Any]] = {}

    def __call__(self, *args: Any) -> None:
        if _ahead is not None:  # Triton reads its compile mode from the context
            _ahead.copy().run(self.kernel.warmup, *args, grid=self.grid, **self.constants)
        elif not CACHES_KERNELS:
            self.kernel[self.grid](*args, **self.constants)
            self._record(None, args)
        else:
            key = _key(args)
            known = self._compiled.get(key)
            if self.cluster > 1 and known is None:  # compiles without a launch, which would be one without clusters
                compiled = self.kernel.warmup(*args, grid=self.grid, **self.constants)
                self._cache(key, len(args), in_clusters(compiled, self.cluster))
                known = self._compiled[key]
            if known is None or (self.kernel.pre_run_hooks and self.cluster == 1):
                self._cache(key, len(args), self.kernel[self.grid](*args, **self.constants))
                known = self._compiled.get(key)
            else:
                run, constants, _ = known
                run(*args, *constants)
            self._record(None if known is None or self.kernel.pre_run_hooks else known[2], args)

    def _cache(self, key: tuple[Any, ...], num_args: int, compiled: Any) -> None:
        """Cache the result of a launch if it is a compiled kernel and all its constants are known."""
        compiled = compiled.result() if hasattr(compiled, "result") else compiled  # a future, if compiled ahead
        names = getattr(self.kernel, "arg_names", [])[num_args:]
        if not hasattr(compiled, "packed_metadata") or not self.constants.keys() >= set(names):
            return
        if len(self._compiled) >= CACHE_LIMIT:
            self._compiled.clear()
        constants = tuple(self.constants[name] for name in names)  # in the kernel's order, without Triton's options
        grid = (self.grid[0] // self.cluster, *self.grid[1:], 1, 1)[:3]  # Triton counts clusters
        self._compiled[key] = compiled[grid], constants, compiled

    def _record(self, compiled: Any, args: tuple[Any, ...]) -> None:
        launches: list[RecordedLaunch] | None = getattr(_recordings, "launches", None)
        if launches is not None:
            launches.append(RecordedLaunch(self, compiled, args))


class RecordedLaunch(NamedTuple):
    """A launch that was executed, Triton's compiled kernel if it is cached, and its arguments without the constants."""

    launch: Launch
    compiled: Any
    args: tuple[Any, ...]


@contextmanager
def recording() -> Iterator[list[RecordedLaunch]]:
    """Context manager that records the launches of this thread."""
    launches: list[RecordedLaunch] = []
    _recordings.launches = launches
    try:
        yield launches
    finally:
        _recordings.launches = None


def in_clusters(compiled: Any, size: int) -> Any:
    """Return a copy of a compiled kernel that is launched in clusters of several programs.

    Triton has clusters only as one program in several thread blocks. Its launcher takes their number from the kernel's
    metadata, and the code of a kernel that was compiled for one thread block does not depend on it.
    """
    compiled = compiled.result() if hasattr(compiled, "result") else compiled  # a future, if compiled ahead
    compiled._init_handles()
    own = copy(compiled)
    make_backend = import_module("triton.compiler.compiler").make_backend
    own.metadata = compiled.metadata._replace(num_ctas=size)
    own.packed_metadata = make_backend(own.metadata.target).pack_metadata(own.metadata)
    return own


def _key(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the cache key: all properties that Triton specializes for.

    For a tensor, these are its dtype and alignment; for an integer, its value. Booleans are kept apart from the
    integers they equal, because Triton has a separate type for them.
    """
    kinds = [
        (arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,))
        if isinstance(arg, Tensor)
        else (float if isinstance(arg, float) else (arg,) if isinstance(arg, bool) else arg)
        for arg in args
    ]
    return torch.cuda.current_device(), *kinds


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a kernel with a grid, arguments and constants; the `Launch` object is cached."""
    key = id(kernel), grid, *constants, *constants.values()
    known = _launches.get(key)
    if known is None or known.kernel is not kernel:
        if len(_launches) >= CACHE_LIMIT:
            _launches.clear()
        known = _launches[key] = Launch(kernel, grid, constants)
    known(*args)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Context manager in which launches only compile kernels, so outputs are undefined; on exit all are compiled."""
    global _ahead
    mode = import_module("triton").AsyncCompileMode
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers, mode(workers):
        _ahead = copy_context()
        try:
            yield
        finally:
            _ahead = None


def can_compile_ahead() -> bool:
    """Whether kernels can be compiled ahead; the interpreter compiles nothing."""
    return INSTALLED and not INTERPRETED
