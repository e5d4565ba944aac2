"""Group norm with a Triton kernel: accurate at large means, in the layout of its input.

Torch's operator loses precision at large means, and copies channels_last input to the contiguous layout and back. This
module is the host code. Triton is imported at the first launch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.pivot import subtract_slab_pivot
from contnorm.kernels.reference import group_norm_in_layout
from contnorm.kernels.triton.launch import sizes_of
from contnorm.kernels.triton.launcher import can_use_kernels, dense, in_layout, launch, like, on_device_of
from contnorm.kernels.triton.plan import Sizes, power

SECTOR = 8  # fewest adjacent channels of a tile in channels_last layout: 32 bytes of float32
TWO_SECTORS = 16  # fewest adjacent channels if the tile still has all positions
SMALL, LARGE = 512, 8192  # values of a tile: at least, by several groups side by side, and at most
MANY_SAMPLES = 1024  # above it torch sums parameter gradients: it splits a long sum over several programs


class Tile(NamedTuple):
    group: int  # KP, lanes of a group
    lanes: int  # BC, of one or more groups
    positions: int  # BL
    blocks: int  # programs of a sample
    whole: bool  # whether a tile has all positions
    warps: int


def choose_tile(sizes: Sizes) -> Tile:
    """Choose the tile: all positions if they fit, and several groups for small maps or to fill memory sectors.

    Example:
        >>> choose_tile(Sizes(samples=20, channels=64, length=256, groups=32, last=True, itemsize=4))
        Tile(group=2, lanes=16, positions=256, blocks=4, whole=True, warps=8)
    """
    _, c, length, groups, last, _ = sizes
    group = power(c // groups)
    lanes, positions = max(group, SECTOR if last else 1), power(length)
    while lanes < group * groups and (
        lanes * positions < SMALL or (last and lanes < TWO_SECTORS and 2 * lanes * positions <= LARGE)
    ):
        lanes *= 2
    positions = max(1, min(positions, LARGE // lanes))
    blocks = -(-groups * group // lanes)
    warps = min(16, power(max(1, lanes * positions // 512)))  # sixteen values per thread, as in the other kernels
    return Tile(group, lanes, positions, blocks, positions >= length, warps)


def group_step(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: int,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """``F.group_norm`` of an input that `continual.unsupported_reason` accepts, in its dtype.

    If they are given, a residual of the input's shape is added and ReLU applied, before the only rounding.
    """
    y: Tensor = _GroupStep.apply(x, weight, bias, residual, eps, groups, relu)  # type: ignore[no-untyped-call]
    return y


class _GroupStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        groups: int,
        relu: bool,
    ) -> Tensor:
        ctx.eps, ctx.groups = eps, groups
        ctx.set_materialize_grads(False)
        x_in_layout = in_layout(x)
        y = torch.empty_like(x_in_layout)
        table = torch.empty(3 * x.shape[0] * groups, dtype=torch.float32, device=x.device)
        tensors = x_in_layout, dense(weight), dense(bias), like(residual, x_in_layout), y, table
        _run("forward", x_in_layout, groups, tensors, eps, RELU=relu)
        ctx.save_for_backward(x, weight, bias, y if relu else None, table)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return (None,) * 7
        return *(_gradients if can_use_kernels(dy) else _plain_gradients)(ctx, dy), None, None, None


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and residual."""
    x, weight, bias, y, table = ctx.saved_tensors
    x_in_layout = in_layout(x)
    dx = torch.empty_like(x_in_layout)
    part = dresidual = None
    if any(ctx.needs_input_grad[1:3]):
        part = torch.empty((2, *x.shape[:2]), dtype=torch.float32, device=x.device)
    if ctx.needs_input_grad[3]:
        dresidual = dy if y is None else torch.empty_like(dx)
    tensors = like(dy, x_in_layout), x_in_layout, y, dense(weight), table, dx, None if y is None else dresidual, part
    _run("backward", x_in_layout, ctx.groups, tensors)
    return dx, *((None, None) if part is None else _sum_over_samples(part, weight, bias)), dresidual


def _sum_over_samples(part: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the parameters, in their dtypes."""
    _, n, c = part.shape
    if n > MANY_SAMPLES:
        return tuple(None if p is None else d.to(p.dtype) for p, d in zip((weight, bias), part.sum(1), strict=True))
    grads = [None if p is None else torch.empty(c, dtype=p.dtype, device=part.device) for p in (weight, bias)]
    rows, lanes = (32, 32) if n <= 32 else (128, 8)
    with on_device_of(part):
        launch(_code().sum_over_samples, (-(-c // lanes),), part, *grads, n, c, BN=rows, BC=lanes, num_warps=4)
    return tuple(grads)


def _plain_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients with torch operators, for double backward and batched gradients."""
    x, *parameters, y, _ = ctx.saved_tensors
    needed, differentiable = ctx.needs_input_grad, torch.is_grad_enabled()
    dy = dy if y is None else torch.where(y <= 0, 0.0, dy)
    with torch.enable_grad():
        # A view of each argument, at which its gradient stops: one argument may depend on another (x may depend on a
        # tied weight), and the gradient along that path is not part of this function's gradient.
        views = [None if t is None else t.view_as(t) for t in (x, *parameters)]
        signal = subtract_slab_pivot(views[0], ctx.groups)  # type: ignore[arg-type]
        scale, offset = (None if p is None else p.to(signal.dtype) for p in views[1:])
        again = group_norm_in_layout(signal, ctx.groups, scale, offset, ctx.eps).to(x.dtype)
        inputs = [t for t, need in zip(views, needed, strict=False) if need and t is not None]
        grads = iter(torch.autograd.grad(again, inputs, dy, create_graph=differentiable) if inputs else ())
    given = [next(grads) if need and t is not None else None for t, need in zip(views, needed, strict=False)]
    return *given, dy if needed[3] else None


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
            tile.blocks,
            *rest,
            **constants,
            K=sizes.channels // groups,
            KP=tile.group,
            LAST=sizes.last,
            BC=tile.lanes,
            BL=tile.positions,
            WHOLE=tile.whole,
            num_warps=tile.warps,
        )


def _code() -> Any:
    return import_module("contnorm.kernels.triton.group_norm_device")
