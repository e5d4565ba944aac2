"""Continual normalization on a CPU by a compiled kernel, with about the memory traffic of batch norm.

The formulas are those of `analytic`; ``continual.cpp`` has the arithmetic. This module checks where the kernel can run,
and connects it to autograd. Where a compiler, an exporter, functorch or forward-mode AD traces the operators, torch
operators compute the same formulas, and so they do for double backward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contnorm.kernels import analytic, reference
from contnorm.kernels.reference import BatchMoments, MomentUpdate
from contnorm.kernels.triton.launcher import (
    can_use_kernels,
    channels_last,
    check_parameters,
    in_layout,
    is_plain,
    is_untraced,
    like,
)

SOURCE = Path(__file__).with_name("continual.cpp")
# Contraction and reordering of operations would let the result depend on the compiler. The last two flags only drop the
# error number of `sqrt` and floating-point exceptions, which nobody reads; NaN and infinity propagate.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)

_SIZES = [c_int64] * 4
_SIGNATURES = {
    "contnorm_cn_train": [c_void_p] * 9 + _SIZES + [c_int, c_int, c_double, c_double, c_int, c_int],
    "contnorm_cn_evaluate": [c_void_p] * 7 + _SIZES + [c_int, c_int, c_double, c_int, c_int],
    "contnorm_cn_backward": [c_void_p] * 10 + _SIZES + [c_int, c_int, c_int, c_int],
}

TYPES = (torch.float32, torch.bfloat16)  # dtypes of inputs; the kernel computes in float32, with tables in float64
# Number of values from which `auto` uses the kernel. Smaller inputs would gain as well, but a first use, which compiles
# for a few seconds, should be one that lasts.
SMALLEST = 2**16


def open_library(path: Path) -> ctypes.CDLL:
    """Load a compiled library, and declare the types of its functions."""
    loaded = ctypes.CDLL(str(path))
    for name, types in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, c_int
    return loaded


@cache
def library() -> ctypes.CDLL | str:
    """Return the library, or why there is none; decided once per process, so that a run does not change kernels."""
    build = import_module("contnorm.kernels.build")  # imports what a program without this kernel does not need
    try:
        return open_library(build.compile_library(SOURCE, FLAGS))
    except (build.BuildError, OSError) as error:  # OSError: the folder does not allow execution, or libgomp is missing
        return str(error)


def unavailable_reason() -> str | None:
    """Return why the kernel can't be used on this machine; None if it can. Compiles it at the first call."""
    loaded = library()
    return loaded if isinstance(loaded, str) else None


def call(name: str, tensors: Sequence[Tensor | None], x: Tensor, groups: int, *rest: float) -> None:
    """Call a function of the library, which must be available: tensors, sizes and layout of x, then other arguments."""
    n, c = x.shape[:2]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    adjacent = x.dim() == 2 or (channels_last(x) and not x.is_contiguous())  # values of a position
    sizes = n, c, x.numel() // (n * c), groups, adjacent, x.dtype == torch.bfloat16
    if getattr(library(), name)(*pointers, *sizes, *rest, torch.get_num_threads()) != 0:
        raise MemoryError(f"{name}: there is not enough memory for the tables of the kernel.")


def unsupported_reason(x: Tensor) -> str | None:
    """Return why the kernel cannot run on this input; None if it can. Compiles the kernel at the first call."""
    if x.device.type != "cpu":
        return f"it needs a CPU, and the input is on {x.device}"
    if x.dtype not in TYPES:
        return f"it computes in float32, and the input is {x.dtype}"
    if torch.compiler.is_compiling():  # the compiled graph has torch operators
        return None
    return unavailable_reason()


def auto_selects(x: Tensor) -> bool:
    """Whether ``auto`` selects the kernel: for large inputs on a CPU, if nothing traces the operators."""
    return (
        x.device.type == "cpu"
        and is_plain(x)  # before the size, which an exporter would take as a limit of the batch
        and is_untraced()
        and x.numel() >= SMALLEST
        and unsupported_reason(x) is None  # last, because it may compile the kernel
    )


def moment_update(
    mean: Tensor | None, var: Tensor | None, counter: Tensor | None, momentum: float | Tensor, count: int
) -> MomentUpdate | None:
    """Describe the update of running moments by a batch of ``count`` values per channel; None if the kernel can't."""
    update = reference.moment_update(mean, var, counter, momentum, count)
    if update is None or update.weight is not None or mean is None or not (is_plain(mean) and is_untraced()):
        return None
    writable = all(type(t) is Tensor and t.dtype == torch.float32 and not t.is_inference() for t in (mean, var))
    return update if writable else None


def train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    residual: Tensor | None = None,
    relu: bool = False,
    running: MomentUpdate | None = None,
) -> tuple[Tensor, BatchMoments | None]:
    """Normalize with the moments of the batch, add the residual (of the input's shape, dtype and device), apply ReLU.

    Returns the output, and the moments of the batch (with the biased variance), or None if ``running`` was given and
    has been updated.
    """
    check_parameters(x, weight, bias, *(() if running is None else running[:2]))
    if not (is_plain(x) and is_untraced()):
        y, mean, var = analytic.plain_training(x, weight, bias, residual, eps, num_groups, relu)
        return y, BatchMoments(mean, var)
    settings = eps, num_groups, relu
    y, moments = _Training.apply(x, weight, bias, residual, settings, running)  # type: ignore[no-untyped-call]
    if running is None:
        return y, BatchMoments(*moments)
    if running.counter is not None:
        running.counter.add_(1)
    return y, None


def evaluate(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Normalize with the given moments, add the residual, apply ReLU."""
    check_parameters(x, mean, var, weight, bias)
    if not (is_plain(x) and is_untraced()):
        return analytic.plain_evaluation(x, mean, var, weight, bias, residual, eps, num_groups, relu)
    settings = eps, num_groups, relu
    y: Tensor = analytic.Evaluation.apply(_evaluate, settings, x, mean, var, weight, bias, residual)  # type: ignore[no-untyped-call]
    return y


class _Training(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        settings: tuple[float, int, bool],
        running: MomentUpdate | None,
    ) -> tuple[Tensor, Tensor]:
        eps, groups, relu = settings
        ctx.settings, ctx.residual = settings, residual is not None
        data, (n, c) = _readable(x), x.shape[:2]
        added = None if residual is None else like(_readable(residual), data)
        y = torch.empty_like(data)
        table = _scratch(2 * (n * (c + groups) + c), torch.float64)
        moments = _scratch(2 * c).view(2, c)
        mean, var, momentum = (None, None, 0.0) if running is None else (running.mean, running.var, running.momentum)
        tensors = data, _floats(weight), _floats(bias), added, y, table, moments, mean, var
        call("contnorm_cn_train", tensors, data, groups, momentum, eps, relu)
        if running is not None:  # tells autograd of the in-place update, as an operator does
            torch.autograd.graph.increment_version([t for t in running[:2] if t is not None])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(moments)
        # Without a residual, the sign of the output is computed again: saving y would need as much memory as x.
        ctx.save_for_backward(x, y if relu and ctx.residual else None, weight, bias, table)
        return y, moments

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 6
        x, y, weight, bias, table = ctx.saved_tensors
        eps, groups, relu = ctx.settings
        dx: Tensor | None
        masked: Tensor | None
        if can_use_kernels(dy):
            data = _readable(x)
            saved = None if y is None else like(_readable(y), data)  # hooks on saved tensors may change its layout
            dx = torch.empty_like(data) if ctx.needs_input_grad[0] or y is not None else None
            masked = None if y is None else torch.empty_like(data)
            dweight, dbias = _scratch(2 * x.shape[1]).view(2, -1)
            given = like(_readable(dy), data), data, saved, _floats(weight), _floats(bias), table
            call("contnorm_cn_backward", (*given, dx, dweight, dbias, masked), data, groups, relu)
        else:
            dx, dweight, dbias, masked = analytic.plain_backward(dy, x, y, weight, bias, eps, groups, relu)
        dresidual = (masked if relu else dy) if ctx.residual else None
        return dx, analytic.typed(dweight, weight), analytic.typed(dbias, bias), dresidual, None, None


def _evaluate(x: Tensor, *rest: Any) -> Tensor:
    *vectors, residual, eps, groups, relu = rest
    data = _readable(x)
    added = None if residual is None else like(_readable(residual), data)
    y = torch.empty_like(data)
    call("contnorm_cn_evaluate", (data, *map(_floats, vectors), added, y), data, groups, eps, relu)
    return y


def _readable(x: Tensor) -> Tensor:
    """Return a tensor whose memory has its values, contiguous or channels_last: the tensor itself, or a copy."""
    if x._is_zerotensor():  # it has no memory
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    data = x.detach().resolve_neg()
    return data if data.is_contiguous() else in_layout(data)


def _scratch(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate memory that the kernel writes to, whatever the default dtype and device of the program are."""
    return torch.empty(size, dtype=dtype, device="cpu")


def _floats(vector: Tensor | None) -> Tensor | None:
    """Return a parameter or moment as contiguous float32, which the kernel reads."""
    return None if vector is None else vector.detach().float().contiguous()
