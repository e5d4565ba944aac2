"""Replay of launches in eager mode, by a C++ extension that is built on first use.

In an eager loop with small batches the host is the limit, and a layer that goes through Python takes several times as
long as batch norm. The extension (``kernels/cpp/replay.cpp``) repeats the launches of an earlier call with the same
signature: sizes, layout, dtypes and alignment. The first call of a signature goes through Python, which checks its
arguments, compiles the kernels, and registers the launches here. Both paths launch the same kernels with the same
arguments, so the results are equal bit for bit, and a program may change from one to the other at any time.

The environment variable ``CONTNORM_EAGER`` selects the path: ``auto`` (the default) loads the extension if it has been
built, and otherwise builds it in the background, once, when a program has made `BUILD_AFTER` calls; ``cpp`` builds it
at the first call and waits; ``python`` does not use it. Without a C++ compiler, Python is used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from contnorm.kernels.moment_update import MomentUpdate
from contnorm.kernels.triton.continual import launch
from contnorm.kernels.triton.launcher import CACHES_KERNELS, RecordedLaunch, recording

__all__ = [
    "BUILD_AFTER",
    "CudaDriver",
    "Driver",
    "activate",
    "is_active",
    "normalize",
    "recorded_backward",
    "recorded_evaluation",
    "recorded_training",
    "start",
    "stop",
]

MODES = ("auto", "cpp", "python")
BUILD_AFTER = 2000  # calls, as of a hundred steps of a ResNet-18: a short script should not start a compiler

_log = logging.getLogger(__name__)
Description = tuple[int, tuple[int, int, int], int, int, int, bool, bool, list[tuple[str, str, Any]]]
gradients_in_python: Any = None  # set by `eager`, which imports this module


class Driver(Protocol):
    """Addresses of the functions that launch kernels, and the description of a recorded launch for them."""

    def addresses(self) -> tuple[int, int, int]:
        """Return the addresses of cuLaunchKernelEx, of a function for the current stream, and cuFuncGetParamInfo."""
        ...

    def describe(self, recorded: RecordedLaunch) -> Description | None:
        """Return handle, grid, threads, shared memory, launch attributes and arguments; None if it isn't known.

        The attributes are: thread blocks of a cluster, whether the launch is cooperative, and whether it overlaps.
        """
        ...


class CudaDriver:
    """The driver of NVIDIA GPUs, and kernels that Triton compiled for it."""

    def addresses(self) -> tuple[int, int, int]:
        driver = ctypes.CDLL("libcuda.so.1")
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        functions = driver.cuLaunchKernelEx, torch_library.aoti_torch_get_current_cuda_stream, driver.cuFuncGetParamInfo
        first, second, third = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return first, second, third

    def describe(self, recorded: RecordedLaunch) -> Description | None:
        launched, compiled, args = recorded
        if compiled is None:
            return None
        metadata = compiled.metadata
        if metadata.global_scratch_size or getattr(metadata, "profile_scratch_size", 0):
            return None
        types = list(compiled.src.signature.values())
        names = launched.kernel.arg_names
        arguments = [
            (name, kind, None if isinstance(value, Tensor) else value)
            for name, kind, value in zip(names, types, args, strict=False)
            if kind != "constexpr"
        ]
        threads = 32 * metadata.num_warps
        attributes = launched.cluster, bool(metadata.launch_cooperative_grid), bool(metadata.launch_pdl)
        first, second, third = (*launched.grid, 1, 1)[:3]
        return compiled.function, (first, second, third), threads, metadata.shared, *attributes, arguments


_extension: Any = None
_driver: Driver | None = None
_calls = 0
_state = "unused"  # then: building, active or unavailable
_lock = threading.Lock()


def _nothing(*_: Any) -> None:
    """Answer for the extension while it is not loaded: Python takes over."""


# Replays the forward pass of x, running mean and variance, weight, bias, training, momentum, eps, groups, relu,
# residual and batch counter. Returns None if Python must take over.
normalize: Callable[..., Tensor | None] = _nothing


def is_active() -> bool:
    """Whether launches are replayed."""
    return _extension is not None


def start(module: Any, driver: Driver) -> None:
    """Replay launches from now on, by a loaded extension and through a driver."""
    global _extension, _driver, normalize, _state
    module.set_up(*driver.addresses(), gradients_in_python)
    _extension, _driver, normalize, _state = module, driver, module.normalize, "active"


def activate() -> bool:
    """Build the extension if needed, and replay launches from now on; returns False if that is not possible."""
    _use(_cpp().load("replay"))
    return is_active()


def stop() -> None:
    """Go through Python from now on, and forget all registered launches."""
    global _extension, _driver, normalize, _state
    if _extension is not None:
        _extension.forget()
    _extension, _driver, normalize, _state = None, None, _nothing, "unavailable"


def _count(x: Tensor) -> None:
    """Count a call of Python, and load or build the extension when it is time."""
    global _calls
    _calls += 1
    if _state == "unused" and (_calls == 1 or _calls >= BUILD_AFTER):
        _load_or_build(x)


def _load_or_build(x: Tensor) -> None:
    global _state
    with _lock:
        if _state != "unused":
            return
        mode = os.environ.get("CONTNORM_EAGER") or "auto"  # an empty variable counts as not set
        if mode not in MODES:
            raise ValueError(f"CONTNORM_EAGER={mode!r} is not one of {', '.join(MODES)}.")
        if mode == "python" or not (x.is_cuda and CACHES_KERNELS):
            _state = "unavailable"
        elif mode == "cpp" or _cpp().is_built("replay"):
            _use(_cpp().load("replay"))
        elif _calls >= BUILD_AFTER:
            _state = "building"
            threading.Thread(target=_build, name="contnorm-build", daemon=True).start()


def _build() -> None:
    _use(_cpp().load("replay"))


def _cpp() -> Any:
    """Return the module that builds extensions, which imports what a program without a GPU does not need."""
    return import_module("contnorm.kernels.cpp.extension")


def _use(module: Any) -> None:
    global _state
    if module is None:
        _state = "unavailable"
        return
    try:
        start(module, CudaDriver())
    except (OSError, AttributeError) as error:  # a library or function that this version does not have
        _log.debug("launches are not replayed: %s", error)
        _state = "unavailable"


# --- calls through Python, which register their launches --------------------------------------------------------


def recorded_training(args: tuple[Any, ...], running: MomentUpdate) -> tuple[Tensor, Tensor]:
    """Launch the forward pass of training, and register it."""
    if _extension is None:
        _count(args[0])
        return launch.forward(*args, running)  # type: ignore[call-arg]
    with recording() as launches:
        output = launch.forward(*args, running)  # type: ignore[call-arg]
    x, weight, bias, residual, eps, groups, relu = args
    moments = running.mean, running.var
    momentum = running.momentum if running.weight is None else running.weight
    call = x, *moments, weight, bias, True, momentum, eps, groups, relu, residual, running.counter
    _register("register_forward", call, launches, ("part_ptr",))
    return output


def recorded_evaluation(args: tuple[Any, ...]) -> Tensor:
    """Launch the forward pass of evaluation, and register it."""
    if _extension is None:
        _count(args[0])
        return launch.evaluate(*args)
    with recording() as launches:
        output = launch.evaluate(*args)
    x, mean, var, weight, bias, residual, eps, groups, relu = args
    call = x, mean, var, weight, bias, False, 0.0, eps, groups, relu, residual, None
    _register("register_forward", call, launches, ("part_ptr",))
    return output


def recorded_backward(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Launch the backward pass of training, and register it."""
    if _extension is None:
        return launch.backward(dy, x, *rest)
    with recording() as launches:
        gradients = launch.backward(dy, x, *rest)
    y, weight, bias, table, _, groups, relu, residual = rest
    call = dy, x, y, weight, bias, table, groups, relu, residual
    _register("register_backward", call, launches, ("part_ptr", "slab_ptr"))
    return gradients


def _register(
    function: str, call: tuple[Any, ...], launches: Sequence[RecordedLaunch], scratch: tuple[str, ...]
) -> None:
    """Register launches, if all of them are known; otherwise this signature always goes through Python."""
    extension, driver = _extension, _driver
    if extension is None or driver is None or not launches:
        return
    described = [driver.describe(each) for each in launches]
    if any(each is None for each in described):
        return
    sizes = [_scratch_size(name, launches) for name in scratch]
    try:
        if function == "register_forward":
            extension.register_forward(call, described, *sizes)
        else:
            extension.register_backward(*call, described, *sizes)
    except ValueError as error:  # a kernel with arguments that the extension does not know
        _log.debug("launches are not replayed: %s", error)


def _scratch_size(name: str, launches: Sequence[RecordedLaunch]) -> int:
    """Return the number of values of a scratch tensor, by the name of the argument; 0 if there is none."""
    for launched, _, args in launches:
        for argument, value in zip(launched.kernel.arg_names, args, strict=False):
            if argument == name and isinstance(value, Tensor):
                return value.numel()
    return 0
