"""The fused kernels of continual norm in eager mode: autograd functions, and the replay of their launches by C++.

A custom torch operator in Python costs about 60 microseconds per call, three times as much as the launch: with twenty
layers that is milliseconds per step. So eager code uses autograd functions, and the forward kernel itself updates the
running moments, which saves a launch. Torch processes every argument and output of an autograd function. To reduce this
overhead, settings are passed as one tuple, and tensors that only the backward pass needs are not outputs.

In an eager loop with small batches the host is still the limit, and a layer that goes through Python takes several
times as long as batch norm. The extension ``kernels/replay.cpp``, which is built on first use, repeats the launches of
an earlier call with the same signature: sizes, layout, dtypes and alignment. The first call of a signature goes through
Python, which checks its arguments, compiles the kernels, and registers the launches here. Both paths launch the same
kernels with the same arguments, so the results are equal bit for bit, and a program may change from one to the other at
any time.

The environment variable ``CONTNORM_EAGER`` selects the path: ``auto`` (the default) loads the extension if it has been
built, and otherwise builds it in the background, once, when a program has made `BUILD_AFTER` calls; ``cpp`` builds it
at the first call and waits; ``python`` does not use it. Without a C++ compiler, Python is used.
``python -m contnorm.kernels.build`` builds it ahead, so that also the first steps have it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contnorm.kernels import analytic
from contnorm.kernels.reference import NO_UPDATE, BatchMoments, MomentUpdate
from contnorm.kernels.triton import launch
from contnorm.kernels.triton.launcher import CACHES_KERNELS, RecordedLaunch, can_use_kernels, recording

MODES = ("auto", "cpp", "python")
BUILD_AFTER = 200  # calls, as of ten steps of a ResNet-18: a program that tries a few batches starts no compiler

_log = logging.getLogger(__name__)
Description = tuple[int, tuple[int, int, int], int, int, int, bool, bool, list[tuple[str, str, Any]]]


# --- autograd ---------------------------------------------------------------------------------------------------


def train(args: tuple[Any, ...], running: MomentUpdate | None) -> tuple[Tensor, BatchMoments | None]:
    """Return the output, and the moments of the batch, or None if ``running`` was given and has been updated."""
    output: Any = _Training.apply(*args[:4], (args[4:], running))  # type: ignore[no-untyped-call]
    if running is not None:
        return output, None
    y, table = output
    return y, BatchMoments(*launch.moments_in(table, y.shape[1]))


def evaluate(*args: Any) -> Tensor:
    output: Tensor = analytic.Evaluation.apply(_launch_evaluation, args[6:], *args[:6])  # type: ignore[no-untyped-call]
    return output


class _Training(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, rest: Any
    ) -> Tensor | tuple[Tensor, ...]:
        settings, running = rest
        args = x, weight, bias, residual, *settings
        output = _launch_training(args, running or NO_UPDATE)
        keep_for_training(ctx, args, output)
        if running is None:
            ctx.mark_non_differentiable(output[1])
            return output
        updated = [t for t in running[:3] if t is not None]
        torch.autograd.graph.increment_version(updated)  # tells autograd of the in-place update, as an operator does
        return output[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 5
        return *_gradients(dy, *ctx.saved_tensors, ctx.eps, ctx.groups, ctx.relu, ctx.residual), None


def keep_for_training(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, ctx.eps, ctx.groups, ctx.relu = inputs
    y, table = output
    ctx.set_materialize_grads(False)
    ctx.residual = residual is not None
    # Without a residual, the sign of the output is recomputed from the tables: saving y would need as much memory as x.
    ctx.save_for_backward(x, y if ctx.relu and ctx.residual else None, weight, bias, table)


def gradients(
    run: Any, dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, table: Tensor,
    eps: float, groups: int, relu: bool, residual: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the gradients of x, weight, bias and residual by a function or, if it is None, by torch operators."""
    if run is None:
        grads = analytic.plain_backward(dy, x, y, weight, bias, eps, groups, relu)
    else:
        grads = run(dy, x, y, weight, bias, table, eps, groups, relu, residual)
    dx, dweight, dbias, masked = grads
    dresidual = (masked if relu else dy) if residual else None
    return dx, analytic.typed(dweight, weight), analytic.typed(dbias, bias), dresidual


def _gradients(dy: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """Compute the gradients by a launch if possible; the extension calls this for signatures that it can't replay."""
    return gradients(_launch_backward if can_use_kernels(dy) else None, dy, *saved)


# --- replay -----------------------------------------------------------------------------------------------------


class CudaDriver:
    """The driver of NVIDIA GPUs, and kernels that Triton compiled for it. Tests have a driver in software."""

    def addresses(self) -> tuple[int, int, int]:
        """Return the addresses of cuLaunchKernelEx, of a function for the current stream, and cuFuncGetParamInfo."""
        driver = ctypes.CDLL("libcuda.so.1")
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"))
        functions = driver.cuLaunchKernelEx, torch_library.aoti_torch_get_current_cuda_stream, driver.cuFuncGetParamInfo
        first, second, third = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return first, second, third

    def describe(self, recorded: RecordedLaunch) -> Description | None:
        """Return handle, grid, threads, shared memory, launch attributes and arguments; None if it isn't known.

        The attributes are: thread blocks of a cluster, whether the launch is cooperative, and whether it overlaps.
        """
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
_driver: Any = None
_calls = 0
_state = "unused"  # then: building, active or unavailable
_lock = threading.Lock()


# Replays the forward pass of x, running mean and variance, weight, bias, training, momentum, eps, groups, relu,
# residual and batch counter. Returns None if Python must take over. None while the extension is not loaded.
normalize: Callable[..., Tensor | None] | None = None


def is_active() -> bool:
    """Whether launches are replayed."""
    return _extension is not None


def start(module: Any, driver: Any) -> None:
    """Replay launches from now on, by a loaded extension and through a driver."""
    global _extension, _driver, normalize, _state
    module.set_up(*driver.addresses(), _gradients)
    _extension, _driver, normalize, _state = module, driver, module.normalize, "active"


def stop() -> None:
    """Go through Python from now on, and forget all registered launches."""
    global _extension, _driver, normalize, _state
    if _extension is not None:
        _extension.forget()
    _extension, _driver, normalize, _state = None, None, None, "unavailable"


def activate() -> bool:
    """Build the extension if needed, and replay launches from now on; returns False if that is not possible."""
    global _state
    module = import_module("contnorm.kernels.build").load_extension("replay")
    try:
        if module is not None:
            start(module, CudaDriver())
    except (OSError, AttributeError) as error:  # a library or function that this version does not have
        _log.debug("launches are not replayed: %s", error)
    if not is_active():
        _state = "unavailable"
    return is_active()


def _count(x: Tensor) -> None:
    """Count a call of Python, and load or build the extension when it is time."""
    global _calls, _state
    _calls += 1
    if _state != "unused" or 1 < _calls < BUILD_AFTER:
        return
    with _lock:
        mode = os.environ.get("CONTNORM_EAGER") or "auto"  # an empty variable counts as not set
        if mode not in MODES:
            raise ValueError(f"CONTNORM_EAGER={mode!r} is not one of {', '.join(MODES)}.")
        if _state != "unused":  # another thread was faster
            return
        if mode == "python" or not (x.is_cuda and CACHES_KERNELS):
            _state = "unavailable"
        elif mode == "cpp" or import_module("contnorm.kernels.build").is_built("replay"):
            activate()
        elif _calls >= BUILD_AFTER:
            _state = "building"
            _log.info("CN: building the C++ host path in the background; until it is there, steps go through Python")
            threading.Thread(target=activate, name="contnorm-build", daemon=True).start()


# --- calls through Python, which register their launches --------------------------------------------------------


def _launch_training(args: tuple[Any, ...], running: MomentUpdate) -> tuple[Tensor, Tensor]:
    x, weight, bias, residual, *settings = args
    momentum = running.momentum if running.weight is None else running.weight
    call = x, running.mean, running.var, weight, bias, True, momentum, *settings, residual, running.counter
    output: tuple[Tensor, Tensor] = _launch(launch.forward, (*args, running), call)
    return output


def _launch_evaluation(*args: Any) -> Tensor:
    *tensors, residual, eps, groups, relu = args
    call = *tensors, False, 0.0, eps, groups, relu, residual, None
    output: Tensor = _launch(launch.evaluate, args, call)
    return output


def _launch_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    *tensors, _, groups, relu, residual = args
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None]
    gradients = _launch(launch.backward, args, (*tensors, groups, relu, residual), backward=True)
    return gradients


def _launch(run: Callable[..., Any], args: tuple[Any, ...], call: tuple[Any, ...], backward: bool = False) -> Any:
    """Launch a pass, and register its launches for a call if all are known; otherwise it always goes through Python."""
    extension, driver = _extension, _driver
    if extension is None or driver is None:
        if not backward:
            _count(args[0])
        return run(*args)
    with recording() as launches:
        results = run(*args)
    described = [driver.describe(each) for each in launches]
    if not launches or any(each is None for each in described):
        return results
    scratch = {"part_ptr": 0, "slab_ptr": 0}  # number of values of these tensors
    for launched, _, given in launches:
        for name, value in zip(launched.kernel.arg_names, given, strict=False):
            if name in scratch and isinstance(value, Tensor):
                scratch[name] = scratch[name] or value.numel()
    try:
        if backward:
            extension.register_backward(*call, described, *scratch.values())
        else:
            extension.register_forward(call, described, scratch["part_ptr"])
    except ValueError as error:  # a kernel with arguments that the extension does not know
        _log.debug("launches are not replayed: %s", error)
    return results
