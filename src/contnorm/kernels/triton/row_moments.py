"""Shared host code of the norms that are computed from the moments of rows: batch renorm and switchable norm.

A row is one sample and channel, with all its positions. Both norms are ``y = a * (x - m) + b``, with tables a, m and b
per row or channel that depend only on the moments of the rows. One pass over the data computes the moments, a launch on
small tables computes a, m and b, and a second pass writes the output, to which it adds a residual and applies ReLU if
they are given, before the only rounding. Backward works likewise: its first pass also writes the gradient of a residual
before a ReLU, which its second pass reads instead of dy and the output. In torch operators,
either norm launches dozens of kernels, most of them on small tables, and each costs a microsecond whatever its size.

This module checks where the kernels can run, and launches the kernels that both norms use. Triton and the device code
are imported at the first launch. There are only two tile shapes for all sizes, because compiling a kernel takes about a
second.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from contnorm.checks import updates_moments
from contnorm.kernels import resolve_kernel
from contnorm.kernels.triton import availability
from contnorm.kernels.triton.availability import TYPES, is_plain
from contnorm.kernels.triton.continual.launch import like
from contnorm.kernels.triton.continual.plan import Sizes
from contnorm.kernels.triton.launcher import launch

__all__ = [
    "TABLE_TILE",
    "RunningMoments",
    "channel_blocks",
    "empty_like_parameter",
    "empty_table",
    "fits",
    "launch_over_rows",
    "launch_over_tiles",
    "mark_updated",
    "number_argument",
    "relu_tensors",
    "row_sums",
    "running_moments",
    "use_kernels",
    "write_row_moments",
]

MOST = 2**29  # tables are addressed in 32 bits
SHORT = 64  # positions up to which a row is short, and a tile holds several samples
_BLOCK_C = 16  # channels of a tile: at least one memory sector in channels_last layout
TABLE_TILE = {"BN": 32, "BC": _BLOCK_C}


class RunningMoments(NamedTuple):
    """RunningMoments moments, and the weight of the batch in them, as a tensor on the device or a number."""

    mean: Tensor | None = None
    var: Tensor | None = None
    weight: Tensor | None = None
    momentum: float = 0.0
    updated: bool = False


def use_kernels(
    x: Tensor,
    parameters: tuple[Tensor | None, ...],
    moments: tuple[Tensor | None, ...],
    numbers: tuple[float | Tensor, ...],
    kernel: str | None,
    logits: tuple[Tensor, ...] = (),
    residual: Tensor | None = None,
) -> bool:
    """Whether to use the kernels: on CUDA by default, elsewhere (in Triton's interpreter) with ``kernel="triton"``.

    If torch has to trace the norm, or the kernels do not support an argument, the caller uses torch operators.

    Args:
        x: The input.
        parameters: The parameters per channel.
        moments: The running moments.
        numbers: Momentum and limits, which may be tensors.
        kernel: The requested implementation; None reads ``CONTNORM_KERNEL``.
        logits: The logits of the three mixed moments.
        residual: The tensor added to the output, with the input's shape, dtype and device.
    """
    if not is_plain(x) or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return False
    chosen = resolve_kernel(kernel)
    return (
        chosen in ("auto", "triton")
        and (x.is_cuda or (chosen == "triton" and x.device.type == "cpu"))
        and forward_ad._current_level < 0
        and availability.can_launch(x.device)
        and x.dtype in TYPES
        and fits(x)
        and all(_is_plain_vector(t, x, x.shape[1]) for t in (*parameters, *moments) if t is not None)
        and all(_is_plain_vector(t, x, 3) for t in logits)
        and (residual is None or type(residual) in (Tensor, Parameter))
        and not any(t.requires_grad for t in moments if t is not None)
        and all(t.dim() == 0 and t.device == x.device for t in numbers if isinstance(t, Tensor))
    )


def _is_plain_vector(t: Tensor, x: Tensor, size: int) -> bool:
    """Whether a kernel can read a vector directly: it has the right size, device and dtype, and is contiguous."""
    alike = t.shape == (size,) and t.device == x.device and t.dtype in TYPES
    return alike and type(t) in (Tensor, Parameter) and t.is_contiguous()


def fits(x: Tensor) -> bool:
    """Whether the kernels can index the rows of an input, and the values of a sample."""
    n, c = x.shape[:2]
    return n * c < MOST and x.numel() // n < 2**31


def running_moments(
    mean: Tensor | None, var: Tensor | None, momentum: float | Tensor, by_batch: bool
) -> RunningMoments:
    return RunningMoments(mean, var, *number_argument(momentum), by_batch and updates_moments(mean, momentum))


def number_argument(number: float | Tensor) -> tuple[Tensor | None, float]:
    return (number, 0.0) if isinstance(number, Tensor) else (None, float(number))


def mark_updated(running: RunningMoments) -> None:
    """Tell autograd that the running moments were updated in place, as an operator does."""
    if running.updated:
        torch.autograd.graph.increment_version([t for t in running[:2] if t is not None])


def _tile(sizes: Sizes) -> dict[str, Any]:
    samples, length = (4, SHORT) if sizes.length <= SHORT else (1, 256)
    return {"BN": samples, "BC": _BLOCK_C, "BL": length, "LAST": sizes.last, "num_warps": 8}


def channel_blocks(sizes: Sizes) -> int:
    return -(-sizes.channels // _BLOCK_C)


def launch_over_rows(kernel: Any, sizes: Sizes, *args: Any, step: tuple[int, ...] = ()) -> None:
    """Launch a kernel whose programs process whole rows."""
    tile, blocks = _tile(sizes), channel_blocks(sizes)
    programs = blocks * -(-sizes.samples // tile["BN"])
    launch(kernel, (programs,), *args, *sizes[:3], blocks, *step, **tile)


def launch_over_tiles(kernel: Any, sizes: Sizes, *args: Any, **constants: Any) -> None:
    """Launch a kernel whose programs process one tile each."""
    tile, blocks = _tile(sizes), channel_blocks(sizes)
    splits = -(-sizes.length // tile["BL"])
    programs = blocks * splits * -(-sizes.samples // tile["BN"])
    launch(kernel, (programs,), *args, *sizes[:3], blocks, splits, **tile, **constants)


def empty_table(x: Tensor, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(size, dtype=dtype, device=x.device)


def empty_like_parameter(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else torch.empty_like(parameter, memory_format=torch.contiguous_format)


def relu_tensors(y: Tensor | None, x: Tensor, needs_residual: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the output of a ReLU in the layout of x, and an empty tensor for the gradient before it, if needed.

    Without ReLU, both are None: the gradient of a residual is dy itself.
    """
    if y is None:
        return None, None
    return like(y, x), torch.empty_like(x) if needs_residual else None


def row_sums(
    x: Tensor,
    dy: Tensor,
    y: Tensor | None,
    dresidual: Tensor | None,
    means: Tensor,
    sizes: Sizes,
    per_row: bool,
) -> Tensor:
    """Compute the two sums of every row.

    Args:
        x: The input.
        dy: The gradient of the output.
        y: The output, if it went through a ReLU.
        dresidual: Where to write the gradient before the ReLU; None if it is not needed.
        means: One mean per row if ``per_row``, else one per channel.
        sizes: Sizes of the input.
        per_row: See ``means``.
    """
    sums = empty_table(x, 2 * sizes.samples * sizes.channels, torch.float32)
    tensors = x, dy, y, dresidual, means, sums
    launch_over_rows(_device_code().sums, sizes, *tensors, step=(sizes.channels if per_row else 0,))
    return sums


def write_row_moments(x: Tensor, table: Tensor, sizes: Sizes) -> None:
    """Write the mean and the sum of squared deviations of every row to a table."""
    launch_over_rows(_device_code().moments, sizes, x, table)


@cache  # looking up an imported module takes longer than the arguments of a launch
def _device_code() -> Any:
    return import_module("contnorm.kernels.triton.row_moments_device")
