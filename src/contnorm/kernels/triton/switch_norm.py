"""Switchable norm with Triton kernels, for rows with more than one position. See `row_moments` for the method."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

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
    relu_tensors,
    row_sums,
    running_moments,
    write_row_moments,
)

__all__ = ["switch_norm"]

_CHANNELS = 512  # channels that a program for one sample processes at once


def switch_norm(
    recompute: Recompute,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    parameters: tuple[Tensor | None, Tensor | None, Tensor, Tensor],
    by_batch: bool,
    momentum: float | Tensor,
    eps: float,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """Switchable norm of rows with more than one position.

    Args:
        recompute: The same function in torch operators, for double backward. Its arguments are x, the parameters, mean
            and variance of the batch branch (or None), and eps.
        x: The input.
        running_mean: (C,), updated if ``by_batch``.
        running_var: (C,), updated if ``by_batch``.
        parameters: Weight, bias, and both vectors of logits.
        by_batch: Whether the batch branch uses the moments of the batch.
        momentum: Weight of this batch in the running moments.
        eps: Value added to the variance.
        residual: Tensor added to the result, with the input's shape, dtype and device.
        relu: Whether to apply ReLU to the result, after the residual.
    """
    running = running_moments(running_mean, running_var, momentum, by_batch)
    args: tuple[Any, ...] = recompute, running, by_batch, float(eps), relu, x, *parameters, residual
    y: Tensor = _SwitchNorm.apply(*args)  # type: ignore[no-untyped-call]
    return y


class _SwitchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        recompute: Recompute,
        running: RunningMoments,
        training: bool,
        eps: float,
        relu: bool,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean_weight: Tensor,
        var_weight: Tensor,
        residual: Tensor | None,
    ) -> Tensor:
        parameters = weight, bias, mean_weight, var_weight
        y, table = forward(x, *parameters, residual, running, training, eps, relu)
        mark_updated(running)
        ctx.recompute, ctx.training, ctx.eps = recompute, training, eps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *parameters, y if relu else None, table)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
        *inputs, y, table = ctx.saved_tensors
        if dy is None:
            return (None,) * 11
        needed = ctx.needs_input_grad[5:]
        if can_use_kernels(dy):
            grads = backward(dy, *inputs, y, table, ctx.training, ctx.eps, needed[-1])  # type: ignore[call-arg]
        else:
            n, c, *_ = sizes_of(inputs[0], 1)
            batch = (None, None) if ctx.training else table[2 * (n * c + n) :].split(c)
            dy = before_relu(dy, y)
            grads = torch_gradients(lambda *new: ctx.recompute(*new, *batch, ctx.eps), dy, inputs, needed[:-1])
            grads = *grads, dy if needed[-1] else None
        return None, None, None, None, None, *grads


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor,
    residual: Tensor | None,
    running: RunningMoments,
    training: bool,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output, and all moments for the backward pass; see `switch_norm_device`."""
    x = in_layout(x)
    sizes = sizes_of(x, 1)
    n, c, length = sizes[:3]
    y, table = torch.empty_like(x), empty_table(x, 2 * (n * c + n + c))
    added = None if residual is None else like(residual, x)
    code = _device_code()
    moments = running[:2] if running.updated or not training else (None, None)
    params = tuple(map(dense, (weight, bias, mean_weight, var_weight)))
    with on_device_of(x):
        write_row_moments(x, table, sizes)
        launch(
            code.switch_moments,
            (n + channel_blocks(sizes),),
            table,
            *moments,
            running.weight,
            running.momentum,
            *(n, c, length),
            **TABLE_TILE,
            BT=_CHANNELS,
            TRAIN=training,
            num_warps=4,
        )
        launch_over_tiles(code.switch_apply, sizes, x, added, y, table, *params, eps, RELU=relu)
    return y, table


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean_weight: Tensor,
    var_weight: Tensor,
    y: Tensor | None,
    table: Tensor,
    training: bool,
    eps: float,
    needs_residual: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias, both vectors of logits, and residual.

    ``y`` is the output, if it went through a ReLU.
    """
    x = in_layout(x)
    dy = like(dy, x)
    y, dresidual = relu_tensors(y, x, needs_residual)
    sizes = sizes_of(x, 1)
    n, c, length = sizes[:3]
    dx, back = torch.empty_like(x), empty_table(x, 8 * n + 2 * c)
    dweight, dbias, dmean, dvar = map(empty_like_parameter, (weight, bias, mean_weight, var_weight))
    params = tuple(map(dense, (weight, mean_weight, var_weight)))
    code = _device_code()
    with on_device_of(x):
        sums = row_sums(x, dy, y, dresidual, table, sizes, per_row=True)
        launch(
            code.switch_sums,
            (n + channel_blocks(sizes),),
            table,
            sums,
            back,
            *params,
            dweight,
            dbias,
            eps,
            *(n, c, length),
            **TABLE_TILE,
            BT=_CHANNELS,
            num_warps=4,
        )
        before = (dy, y) if dresidual is None else (dresidual, None)
        of_all = x, *before, dx, table, sums, back, *params, dmean, dvar, eps
        launch_over_tiles(code.switch_gradient, sizes, *of_all, BT=_CHANNELS, TRAIN=training)
    return dx, dweight, dbias, dmean, dvar, dy if needs_residual and y is None else dresidual


@cache  # looking up an imported module takes longer than the arguments of a launch
def _device_code() -> Any:
    return import_module("contnorm.kernels.triton.switch_norm_device")
