"""Batch renorm with Triton kernels, and the limits of r and d in one launch. See `row_moments` for the method."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.kernels.triton.availability import Recompute, before_relu, can_use_kernels, torch_gradients
from contnorm.kernels.triton.continual.launch import dense, in_layout, like, sizes_of
from contnorm.kernels.triton.launcher import launch, on_device_of
from contnorm.kernels.triton.row_moments import (
    TABLE_TILE,
    RunningMoments,
    channel_blocks,
    empty_like_parameter,
    empty_table,
    launch_over_tiles,
    mark_updated,
    number_argument,
    relu_tensors,
    row_sums,
    running_moments,
    use_kernels,
    write_row_moments,
)

__all__ = ["RenormLimits", "batch_renorm", "renorm_limits"]


class RenormLimits(NamedTuple):
    """The limits of r and d, each a tensor on the device or a number."""

    r_tensor: Tensor | None
    r_max: float
    d_tensor: Tensor | None
    d_max: float


def batch_renorm(
    recompute: Recompute,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    parameters: tuple[Tensor | None, Tensor | None],
    by_batch: bool,
    momentum: float | Tensor,
    eps: float,
    r_max: float | Tensor,
    d_max: float | Tensor,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Batch renorm. Arguments are those of `switch_norm`; ``recompute`` takes mean, standard deviation, r and d."""
    running = running_moments(running_mean, running_var, momentum, by_batch)
    limits = RenormLimits(*number_argument(r_max), *number_argument(d_max))
    args: tuple[Any, ...] = recompute, running, limits, by_batch, float(eps), relu, x, *parameters, residual
    y: Tensor = _BatchRenorm.apply(*args)  # type: ignore[no-untyped-call]
    return y


class _BatchRenorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recompute: Recompute,
        running: RunningMoments,
        limits: RenormLimits,
        training: bool,
        eps: float,
        relu: bool,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        y, saved = forward(x, weight, bias, residual, running, limits, training, eps, relu)
        mark_updated(running)
        ctx.recompute, ctx.training, ctx.eps = recompute, training, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, y if relu else None, saved)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        *inputs, y, saved = ctx.saved_tensors
        if dy is None:
            return (None,) * 10
        needed = ctx.needs_input_grad[6:]
        if can_use_kernels(dy):
            grads = backward(dy, *inputs, y, saved, ctx.training, ctx.eps, needed[-1])  # type: ignore[call-arg]
        else:
            channels = saved.split(inputs[0].shape[1])
            dy = before_relu(dy, y)
            grads = torch_gradients(
                lambda *new: ctx.recompute(*new, *channels, ctx.training, ctx.eps), dy, inputs, needed[:-1]
            )
            grads = *grads, dy if needed[-1] else None
        return None, None, None, None, None, None, *grads


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running: RunningMoments,
    limits: RenormLimits,
    training: bool,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output, and mean, standard deviation, r and d of each channel for the backward pass."""
    x = in_layout(x)
    sizes = sizes_of(x, 1)
    n, c, length = sizes[:3]
    y, saved = torch.empty_like(x), empty_table(x, 4 * c)
    added = None if residual is None else like(residual, x)
    code = _device_code()
    with on_device_of(x):
        if training:
            table = empty_table(x, 2 * n * c)
            write_row_moments(x, table, sizes)
            launch(
                code.renorm_moments,
                (channel_blocks(sizes),),
                table,
                saved,
                *running[:4],
                *limits,
                *(n, c, length),
                **TABLE_TILE,
                UPDATE=running.updated,
                num_warps=4,
            )
        moments = (None, None) if training else running[:2]
        of_all = x, added, y, saved, *moments, dense(weight), dense(bias), eps
        launch_over_tiles(code.renorm_apply, sizes, *of_all, TRAIN=training, RELU=relu)
    return y, saved


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    saved: Tensor,
    training: bool,
    eps: float,
    needs_residual: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and residual; ``y`` is the output, if it went through a ReLU."""
    x = in_layout(x)
    dy = like(dy, x)
    y, dresidual = relu_tensors(y, x, needs_residual)
    sizes = sizes_of(x, 1)
    n, c = sizes[:2]
    dx, back, dweight, dbias = (
        torch.empty_like(x),
        empty_table(x, 2 * c),
        empty_like_parameter(weight),
        empty_like_parameter(bias),
    )
    code = _device_code()
    with on_device_of(x):
        sums = row_sums(x, dy, y, dresidual, saved, sizes, per_row=False)
        of_channels = saved, sums, back, dweight, dbias, eps, n, c
        launch(code.renorm_sums, (channel_blocks(sizes),), *of_channels, **TABLE_TILE, num_warps=4)
        before = (dy, y) if dresidual is None else (dresidual, None)
        of_all = x, *before, dx, saved, back, dense(weight), eps
        launch_over_tiles(code.renorm_gradient, sizes, *of_all, TRAIN=training)
    return dx, dweight, dbias, dy if needs_residual and y is None else dresidual


def renorm_limits(
    counter: Tensor,
    buffers: tuple[Tensor, Tensor],
    store: bool,
    final_limits: tuple[float, float],
    ramps: tuple[tuple[float, float], tuple[float, float]],
    kernel: str | None,
) -> tuple[Tensor, Tensor] | None:
    """Compute the current limits of r and d in one launch; None if the kernels cannot be used.

    Args:
        counter: The batch counter, 0-dim.
        buffers: The buffers of the current limits, 0-dim each.
        store: Whether to write the limits to these buffers.
        final_limits: The value of each limit after its ramp.
        ramps: The first and last batch of the ramp of each limit.
        kernel: The requested implementation; None reads ``CONTNORM_KERNEL``.
    """
    numbers = counter, *buffers
    if buffers[0].dtype != torch.float32 or not use_kernels(buffers[0].view(1, 1), (), (), numbers, kernel):
        return None
    limits = buffers if store else (torch.empty_like(buffers[0]), torch.empty_like(buffers[1]))
    _launch_limits(counter, limits, final_limits, ramps)
    if store:
        torch.autograd.graph.increment_version(list(buffers))
    return limits


def _launch_limits(
    counter: Tensor,
    limits: tuple[Tensor, Tensor],
    final_limits: tuple[float, float],
    ramps: tuple[tuple[float, float], tuple[float, float]],
) -> None:
    """Write the limits of r and d; each increases linearly over its ramp to its final value."""
    numbers = (*final_limits, *(part for start, end in ramps for part in (start, end - start)))
    with on_device_of(counter):
        launch(_device_code().renorm_limits, (1,), counter, *limits, *map(float, numbers), num_warps=1)


@cache  # looking up an imported module takes longer than the arguments of a launch
def _device_code() -> Any:
    return import_module("contnorm.kernels.triton.batch_renorm_device")
