"""Kernel launches on plain tensors, without autograd.

Triton and the device code are imported at the first launch. There are only two tile shapes for all sizes, because
compiling a kernel takes about a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.triton.continual.launch import dense, in_layout, like, sizes_of
from contnorm.kernels.triton.continual.plan import Sizes
from contnorm.kernels.triton.launcher import here, launch

__all__ = [
    "Limits",
    "Running",
    "fits",
    "renorm",
    "renorm_backward",
    "renorm_limits",
    "switch",
    "switch_backward",
]

MOST = 2**29  # tables are addressed in 32 bits
SHORT = 64  # positions up to which a row is short, and a tile holds several samples
_BLOCK_C = 16  # channels of a tile: at least one memory sector in channels_last layout
_TABLE = {"BN": 32, "BC": _BLOCK_C}
_CHANNELS = 512  # channels that a program for one sample processes at once


class Running(NamedTuple):
    """Running moments, and the weight of the batch in them, as a tensor on the device or a number."""

    mean: Tensor | None = None
    var: Tensor | None = None
    weight: Tensor | None = None
    momentum: float = 0.0
    moves: bool = False


class Limits(NamedTuple):
    """The limits of r and d, each a tensor on the device or a number."""

    r_tensor: Tensor | None
    r_max: float
    d_tensor: Tensor | None
    d_max: float


def fits(x: Tensor) -> bool:
    """Whether the kernels can index the rows of an input, and the values of a sample."""
    n, c = x.shape[:2]
    return n * c < MOST and x.numel() // n < 2**31


def _code(name: str) -> Any:
    return import_module(f"contnorm.kernels.triton.row_moments.{name}_kernels")


def _tile(sizes: Sizes) -> dict[str, Any]:
    samples, length = (4, SHORT) if sizes.length <= SHORT else (1, 256)
    return {"BN": samples, "BC": _BLOCK_C, "BL": length, "LAST": sizes.last, "num_warps": 8}


def _blocks(sizes: Sizes) -> int:
    return -(-sizes.channels // _BLOCK_C)


def _over_rows(kernel: Any, sizes: Sizes, *args: Any, step: tuple[int, ...] = ()) -> None:
    """Launch a kernel whose programs process whole rows."""
    tile, blocks = _tile(sizes), _blocks(sizes)
    programs = blocks * -(-sizes.samples // tile["BN"])
    launch(kernel, (programs,), *args, *sizes[:3], blocks, *step, **tile)


def _over_all(kernel: Any, sizes: Sizes, *args: Any, **constants: Any) -> None:
    """Launch a kernel whose programs process one tile each."""
    tile, blocks = _tile(sizes), _blocks(sizes)
    splits = -(-sizes.length // tile["BL"])
    programs = blocks * splits * -(-sizes.samples // tile["BN"])
    launch(kernel, (programs,), *args, *sizes[:3], blocks, splits, **tile, **constants)


def _empty(x: Tensor, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.empty(size, dtype=dtype, device=x.device)


def _like(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else torch.empty_like(parameter, memory_format=torch.contiguous_format)


def _row_sums(x: Tensor, dy: Tensor, means: Tensor, sizes: Sizes, per_row: bool) -> Tensor:
    """Compute the two sums of every row; ``means`` has one mean per row if ``per_row``, else one per channel."""
    sums = _empty(x, 2 * sizes.samples * sizes.channels, torch.float32)
    _over_rows(_code("row").sums, sizes, x, dy, means, sums, step=(sizes.channels if per_row else 0,))
    return sums


# --- switchable norm ----------------------------------------------------------------------------------------------


def switch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor,
    running: Running,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the output, and all moments for the backward pass; see `switch_kernels`."""
    x = in_layout(x)
    sizes = sizes_of(x, 1)
    n, c, length = sizes[:3]
    y, table = torch.empty_like(x), _empty(x, 2 * (n * c + n + c))
    code = _code("switch")
    moments = running[:2] if running.moves or not training else (None, None)
    params = tuple(map(dense, (weight, bias, mean_weight, var_weight)))
    with here(x):
        _over_rows(_code("row").moments, sizes, x, table)
        launch(
            code.switch_moments,
            (n + _blocks(sizes),),
            table,
            *moments,
            running.weight,
            running.momentum,
            *(n, c, length),
            **_TABLE,
            BT=_CHANNELS,
            TRAIN=training,
            num_warps=4,
        )
        _over_all(code.switch_apply, sizes, x, y, table, *params, eps)
    return y, table


def switch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor,
    table: Tensor,
    training: bool,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and both vectors of logits."""
    x = in_layout(x)
    dy = like(dy, x)
    sizes = sizes_of(x, 1)
    n, c, length = sizes[:3]
    dx, back = torch.empty_like(x), _empty(x, 8 * n + 2 * c)
    dweight, dbias, dmean, dvar = map(_like, (weight, bias, mean_weight, var_weight))
    params = tuple(map(dense, (weight, mean_weight, var_weight)))
    code = _code("switch")
    with here(x):
        sums = _row_sums(x, dy, table, sizes, per_row=True)
        launch(
            code.switch_sums,
            (n + _blocks(sizes),),
            table,
            sums,
            back,
            *params,
            dweight,
            dbias,
            eps,
            *(n, c, length),
            **_TABLE,
            BT=_CHANNELS,
            num_warps=4,
        )
        of_all = x, dy, dx, table, sums, back, *params, dmean, dvar, eps
        _over_all(code.switch_gradient, sizes, *of_all, BT=_CHANNELS, TRAIN=training)
    return dx, dweight, dbias, dmean, dvar


# --- batch renorm -------------------------------------------------------------------------------------------------


def renorm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    limits: Limits,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the output, and mean, standard deviation, r and d of each channel for the backward pass."""
    x = in_layout(x)
    sizes = sizes_of(x, 1)
    n, c, length = sizes[:3]
    y, kept = torch.empty_like(x), _empty(x, 4 * c)
    code = _code("renorm")
    with here(x):
        if training:
            table = _empty(x, 2 * n * c)
            _over_rows(_code("row").moments, sizes, x, table)
            launch(
                code.renorm_moments,
                (_blocks(sizes),),
                table,
                kept,
                *running[:4],
                *limits,
                *(n, c, length),
                **_TABLE,
                MOVE=running.moves,
                num_warps=4,
            )
        moments = (None, None) if training else running[:2]
        _over_all(code.renorm_apply, sizes, x, y, kept, *moments, dense(weight), dense(bias), eps, TRAIN=training)
    return y, kept


def renorm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, kept: Tensor, training: bool, eps: float
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias."""
    x = in_layout(x)
    dy = like(dy, x)
    sizes = sizes_of(x, 1)
    n, c = sizes[:2]
    dx, back, dweight, dbias = torch.empty_like(x), _empty(x, 2 * c), _like(weight), _like(bias)
    code = _code("renorm")
    with here(x):
        sums = _row_sums(x, dy, kept, sizes, per_row=False)
        of_channels = kept, sums, back, dweight, dbias, eps, n, c
        launch(code.renorm_sums, (_blocks(sizes),), *of_channels, **_TABLE, num_warps=4)
        of_all = x, dy, dx, kept, back, dense(weight), eps
        _over_all(code.renorm_gradient, sizes, *of_all, TRAIN=training)
    return dx, dweight, dbias


def renorm_limits(
    counter: Tensor,
    limits: tuple[Tensor, Tensor],
    tops: tuple[float, float],
    ramps: tuple[tuple[float, float], tuple[float, float]],
) -> None:
    """Write the limits of r and d; each increases linearly over its ramp to its final value."""
    numbers = (*tops, *(part for start, end in ramps for part in (start, end - start)))
    with here(counter):
        launch(_code("renorm").renorm_limits, (1,), counter, *limits, *map(float, numbers), num_warps=1)
