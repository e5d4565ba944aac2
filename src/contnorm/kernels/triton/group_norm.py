"""Group norm with a Triton kernel, as a step of other norms: accurate at large means, in the layout of its input.

Torch's operator loses precision at large means, copies channels_last input to the contiguous layout and back, and
returns its result in the dtype of its input; here the caller chooses the dtype. This module is the host code, including
the other kernels of the paper's variants. Triton is imported at the first launch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.pivot import subtract_slab_pivot
from contnorm.kernels.reference import group_norm_in_layout
from contnorm.kernels.triton.availability import can_use_kernels, torch_gradients
from contnorm.kernels.triton.continual.launch import dense, in_layout, like, sizes_of
from contnorm.kernels.triton.continual.plan import Sizes, power
from contnorm.kernels.triton.launcher import launch, on_device_of

__all__ = ["ShiftedInput", "batch_then_group_norm", "group_step", "subtract_channel_pivot"]

BLOCK = 1024
LANES = (2, 8, 32, 128, 512, 2048, 8192)  # few sizes, because a kernel is compiled for each
SECTOR = 8  # minimum number of adjacent channels in channels_last layout: 32 bytes of float32
SMALL, LARGE = 2048, 8192  # values of a tile: if one tile holds all data of a program, and if there are several


class ShiftedInput(NamedTuple):
    """An input minus the pivot of each channel.

    Attributes:
        signal: The shifted input, in float32.
        pivot: (C,), the pivots.
        about: (C,), the running mean minus the pivot; undefined without a running mean.
    """

    signal: Tensor
    pivot: Tensor
    about: Tensor


class Tile(NamedTuple):
    lanes: int  # BC, for the channels of `side` groups
    positions: int  # BL
    side: int  # groups side by side
    blocks: int  # of groups

    @property
    def warps(self) -> int:
        """Number of warps: sixteen values per thread, as in the other kernels."""
        return min(16, max(4, power(self.lanes * self.positions // 512)))


def choose_tile(sizes: Sizes) -> Tile:
    """Choose the tile: one group per program or, in channels_last layout, enough groups to fill memory sectors.

    Example:
        >>> choose_tile(Sizes(samples=20, channels=64, length=256, groups=32, last=True, itemsize=4))
        Tile(lanes=8, positions=256, side=4, blocks=8)
    """
    _, c, length, groups, last, _ = sizes
    k = c // groups
    lanes = next(lanes for lanes in LANES if lanes >= (max(k, SECTOR) if last else k))
    side = min(groups, lanes // k if last and lanes <= 32 else 1)
    positions = max(1, (SMALL if lanes * length <= SMALL else LARGE) // lanes)
    return Tile(lanes, positions, side, -(-groups // side))


def group_step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int, dtype: torch.dtype
) -> Tensor:
    """``F.group_norm`` with the result in this dtype, for inputs that `continual.unsupported_reason` accepts."""
    y: Tensor = _GroupStep.apply(x, weight, bias, eps, groups, dtype)  # type: ignore[no-untyped-call]
    return y


class _GroupStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.eps, ctx.groups, ctx.dtype = eps, groups, dtype
        ctx.set_materialize_grads(False)
        x_in_layout = in_layout(x)
        y = torch.empty_like(x_in_layout, dtype=dtype)
        table = torch.empty(3 * x.shape[0] * groups, dtype=torch.float32, device=x.device)
        _run("forward", x_in_layout, groups, (x_in_layout, dense(weight), dense(bias), y, table), eps)
        ctx.save_for_backward(x, weight, bias, table)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 6
        return *(_gradients if can_use_kernels(dy) else _plain_gradients)(ctx, dy), None, None, None


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, table = ctx.saved_tensors
    x_in_layout = in_layout(x)
    dx = torch.empty_like(x_in_layout)
    if not any(ctx.needs_input_grad[1:3]):
        _run("backward", x_in_layout, ctx.groups, (like(dy, x_in_layout), x_in_layout, dense(weight), table, dx, None))
        return dx, None, None
    part = torch.empty((2, *x.shape[:2]), dtype=torch.float32, device=x.device)
    _run("backward", x_in_layout, ctx.groups, (like(dy, x_in_layout), x_in_layout, dense(weight), table, dx, part))
    dweight, dbias = part.sum(1).unbind()
    return dx, None if weight is None else dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype)


def _plain_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients with torch operators, for double backward and batched gradients."""

    def recompute(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        signal = subtract_slab_pivot(x, ctx.groups)
        scale, offset = (None if p is None else p.to(signal.dtype) for p in (weight, bias))
        return group_norm_in_layout(signal, ctx.groups, scale, offset, ctx.eps).to(ctx.dtype)

    *saved, _ = ctx.saved_tensors
    return torch_gradients(recompute, dy, saved, ctx.needs_input_grad[:3])


def batch_then_group_norm(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: int,
    tied: bool,
) -> Tensor:
    """Batch norm with given moments, then group norm, in one pass; without gradients."""
    x_in_layout = in_layout(x)
    y = torch.empty_like(x_in_layout)
    tensors = x_in_layout, *map(dense, (mean, var, weight, bias)), y
    _run("evaluate", x_in_layout, groups, tensors, eps, TIED=tied)
    return y


class _SubtractPivot(torch.autograd.Function):
    """Subtract the pivot, which gets no gradient because the normalized result does not depend on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, running_mean: Tensor | None) -> tuple[Tensor, ...]:
        ctx.dtype = x.dtype
        x_in_layout = in_layout(x)
        sizes = sizes_of(x_in_layout, 1)
        signal = torch.empty_like(x_in_layout, dtype=torch.float32)
        pivot, about = (torch.empty(sizes.channels, dtype=torch.float32, device=x.device) for _ in range(2))
        chunks = -(-sizes.channels * sizes.length // BLOCK)
        with on_device_of(x):
            launch(
                _code().subtract_channel_pivot,
                (sizes.samples * chunks,),
                x_in_layout,
                running_mean,
                signal,
                pivot,
                about,
                *sizes[:3],
                chunks,
                LAST=sizes.last,
                BLOCK=BLOCK,
                num_warps=4,
            )
        ctx.mark_non_differentiable(pivot, about)
        return signal, pivot, about

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        return dy.to(ctx.dtype), None


def subtract_channel_pivot(x: Tensor, running_mean: Tensor | None) -> ShiftedInput:
    """Subtract from each channel the median of three of its values: the first, one in the middle, and the last."""
    return ShiftedInput(*_SubtractPivot.apply(x, running_mean))  # type: ignore[no-untyped-call]


def _run(
    kernel: str, x: Tensor, groups: int, tensors: tuple[Tensor | None, ...], *rest: float, **constants: Any
) -> None:
    sizes = sizes_of(x, groups)
    tile = choose_tile(sizes)
    with on_device_of(x):
        launch(
            getattr(_code(), kernel),
            (sizes.samples * tile.blocks,),
            *tensors,
            *sizes[:3],
            sizes.channels // groups,
            tile.side,
            tile.blocks,
            *rest,
            **constants,
            LAST=sizes.last,
            BC=tile.lanes,
            BL=tile.positions,
            num_warps=tile.warps,
        )


def _code() -> Any:
    return import_module("contnorm.kernels.triton.group_norm_device")
