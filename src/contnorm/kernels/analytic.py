"""Continual normalization in one pass of statistics and one multiply-add, with a hand-written backward.

The statistics of group norm and batch norm can both be computed from the mean and variance of each row (one sample, one
channel). So the data is read once for statistics and once to compute the output ``y = scale * x + offset``. The
backward pass likewise needs two sums per row and one ``dx = P * dy + Q * x + R``. The derivation is in
``docs/concepts/one-pass.md``.

Notation: N samples, C channels in G groups of K, L positions, M = N * L. All tables are (N, C), (N, G) or (C,). ``x``
is always the input minus the pivot of its slab (`pivot.py`), which does not change the result and keeps it accurate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contnorm.checks import statistics_dtype
from contnorm.kernels.pivot import per_channel, subtract_slab_pivot
from contnorm.kernels.reference import BatchMoments, add_residual_and_relu, group_norm_in_layout


class Statistics(NamedTuple):
    """Tables from which, with the data, the output and the gradients are computed."""

    row_mean: Tensor  # (N, C) a1: mean over positions of the group-normalized signal
    row_square: Tensor  # (N, C) a2: mean over positions of its square
    group_mean: Tensor  # (N, C) u, repeated over the group's channels
    group_rstd: Tensor  # (N, C) r, repeated over the group's channels
    mean: Tensor  # (C,) batch mean of the group-normalized signal
    var: Tensor  # (C,) its biased batch variance
    rstd: Tensor  # (C,) i


def train(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, num_groups: int
) -> tuple[Tensor, BatchMoments]:
    """Normalize with the moments of the batch; return the output and these moments."""
    dtype = statistics_dtype(x)
    scale = None if weight is None else weight.to(dtype)
    offset = None if bias is None else bias.to(dtype)
    shifted = subtract_slab_pivot(x, num_groups)
    if torch.compiler.is_compiling():  # the compiler fuses the formula and derives the backward pass
        stats = statistics(shifted, eps, num_groups)
        y = multiply_add(shifted, scale, offset, stats)
        mean, var = stats.mean, stats.var
    else:
        y, mean, var, *_ = _ContinualNorm.apply(shifted, scale, offset, eps, num_groups)  # type: ignore[no-untyped-call]
    count = x.numel() // x.shape[1]
    return y.to(x.dtype), BatchMoments(mean.detach(), var.detach() * (count / (count - 1)))


def evaluate(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
) -> Tensor:
    """Normalize with the given moments: batch norm is then a constant scale and offset, applied by group norm."""
    dtype = statistics_dtype(x)
    scale = torch.rsqrt(var.to(dtype) + eps)
    if weight is not None:
        scale = scale * weight.to(dtype)
    offset = -mean.to(dtype) * scale
    if bias is not None:
        offset = offset + bias.to(dtype)
    shifted = subtract_slab_pivot(x, num_groups)
    return group_norm_in_layout(shifted, num_groups, scale, offset, eps).to(x.dtype)


def statistics(x: Tensor, eps: float, num_groups: int) -> Statistics:
    """Compute all tables of the forward pass, from the data minus its pivot."""
    n, c = x.shape[:2]
    if x.dim() == 2:
        mean, var = x, torch.zeros_like(x)
    else:
        var, mean = torch.var_mean(x, dim=tuple(range(2, x.dim())), correction=0)
    grouped = mean.reshape(n, num_groups, -1)
    group_mean = grouped.mean(2, keepdim=True).expand_as(grouped).reshape(n, c)
    off = mean - group_mean
    power = (var + off * off).reshape(n, num_groups, -1)
    group_rstd = torch.rsqrt(power.mean(2, keepdim=True) + eps).expand_as(grouped).reshape(n, c)
    row_mean = off * group_rstd
    within = var * group_rstd * group_rstd
    # The mean of the variances plus the variance of the means, to avoid cancellation in a difference of squares.
    between, batch_mean = torch.var_mean(row_mean, dim=0, correction=0)
    batch_var = within.mean(0) + between
    return Statistics(
        row_mean,
        within + row_mean * row_mean,
        group_mean,
        group_rstd,
        batch_mean,
        batch_var,
        torch.rsqrt(batch_var + eps),
    )


def multiply_add(x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Statistics) -> Tensor:
    """Compute the output, from the data minus its pivot."""
    gain = stats.rstd if weight is None else stats.rstd * weight
    scale = stats.group_rstd * gain
    offset = (-stats.group_mean * stats.group_rstd - stats.mean) * gain
    if bias is not None:
        offset = offset + bias
    return x * per_channel(scale, x.dim()) + per_channel(offset, x.dim())


class Gradients(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor


def gradients(
    x: Tensor, dy: Tensor, weight: Tensor | None, stats: Statistics, num_groups: int, constant: bool = False
) -> Gradients:
    """Compute the backward pass: two sums per row, small tables, one multiply-add over (dy, x).

    With ``constant``, the batch moments are constants, through which no gradient flows.
    """
    n, c = x.shape[:2]
    positions = tuple(range(2, x.dim()))
    length = x.numel() // (n * c)
    count = n * length
    gain = stats.rstd if weight is None else stats.rstd * weight

    sum_dy = dy.sum(positions) if positions else dy
    sum_dyx = (dy * x).sum(positions) if positions else dy * x
    sum_dyx = (
        sum_dyx - stats.group_mean * sum_dy
    ) * stats.group_rstd  # the sum of dy times the group-normalized signal
    d_bias = sum_dy.sum(0)
    d_weight = stats.rstd * (sum_dyx.sum(0) - stats.mean * d_bias)

    # The gradient through the batch moments, which is zero if they are constants.
    by_weight, by_bias = (torch.zeros_like(d_weight),) * 2 if constant else (d_weight, d_bias)
    slope = stats.rstd * by_weight / n
    t1 = gain * (sum_dy - by_bias / n - slope * (stats.row_mean - stats.mean))
    t2 = gain * (sum_dyx - stats.row_mean * by_bias / n - slope * (stats.row_square - stats.mean * stats.row_mean))
    s1 = _group_average(t1, num_groups) / length
    s2 = _group_average(t2, num_groups) / length

    r = stats.group_rstd
    for_dy = r * gain
    q = -r * (gain * stats.rstd * by_weight / count + s2)
    rest = r * (gain * (stats.rstd * stats.mean * by_weight - by_bias) / count - s1) - q * stats.group_mean * r
    rank = x.dim()
    dx = dy * per_channel(for_dy, rank) + x * per_channel(q * r, rank) + per_channel(rest, rank)
    return Gradients(dx, d_weight, d_bias)


def gradients_of_evaluation(
    x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, eps: float, num_groups: int
) -> Gradients:
    """Compute the backward pass of `evaluate`, from the input itself; its gradient has the input's dtype."""
    dtype = statistics_dtype(x)
    mean, var = mean.to(dtype), var.to(dtype)
    shifted = subtract_slab_pivot(x, num_groups)
    stats = statistics(shifted, eps, num_groups)._replace(mean=mean, var=var, rstd=torch.rsqrt(var + eps))
    scale = None if weight is None else weight.to(dtype)
    grads = gradients(shifted, dy.to(dtype), scale, stats, num_groups, constant=True)
    return grads._replace(x=grads.x.to(x.dtype))


def _group_average(table: Tensor, num_groups: int) -> Tensor:
    grouped = table.reshape(table.shape[0], num_groups, -1)
    return grouped.mean(2, keepdim=True).expand_as(grouped).reshape(table.shape)


class _ContinualNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, num_groups: int
    ) -> tuple[Tensor, ...]:
        stats = statistics(x, eps, num_groups)
        return multiply_add(x, weight, bias, stats), stats.mean, stats.var, *stats[:4], stats.rstd

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.eps, ctx.num_groups = inputs
        _, mean, var, row_mean, row_square, group_mean, group_rstd, rstd = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight, row_mean, row_square, group_mean, group_rstd, mean, var, rstd)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *saved = ctx.saved_tensors
        # For double backward the statistics must depend on x in the graph; the saved ones are constants.
        stats = statistics(x, ctx.eps, ctx.num_groups) if torch.is_grad_enabled() else Statistics(*saved)
        grads = gradients(x, dy, weight, stats, ctx.num_groups)
        return grads.x, None if weight is None else grads.weight, grads.bias if ctx.has_bias else None, None, None


# --- with residual and ReLU, in torch operators: for double backward, functorch and forward-mode AD -------------


def plain_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, groups: int, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output and the moments of the batch (the biased variance); torch derives the backward pass."""
    shifted = subtract_slab_pivot(x, groups)
    stats = statistics(shifted, eps, groups)
    scale, offset = (None if p is None else p.to(shifted.dtype) for p in (weight, bias))
    y = add_residual_and_relu(multiply_add(shifted, scale, offset, stats), residual, relu).to(x.dtype)
    return y, stats.mean.detach(), stats.var.detach()


def plain_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of x, weight, bias and residual; the output is there if it has a residual and a ReLU."""
    shifted = subtract_slab_pivot(x, groups)
    stats = statistics(shifted, eps, groups)
    scale, offset = (None if p is None else p.to(shifted.dtype) for p in (weight, bias))
    wide = dy.to(shifted.dtype)
    if relu:
        sign = multiply_add(shifted, scale, offset, stats).detach() if y is None else y
        wide = wide.masked_fill(sign <= 0, 0.0)
    grads = gradients(shifted, wide, scale, stats, groups)
    return grads.x.to(x.dtype), grads.weight, grads.bias, wide.to(dy.dtype)


def plain_evaluation(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float, groups: int, relu: bool,
) -> Tensor:  # fmt: skip
    """Compute the output with given moments."""
    return add_residual_and_relu(evaluate(x, mean, var, weight, bias, eps, groups), residual, relu)


def keep_for_evaluation(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what `backward_of_evaluation` needs, for kernels that have no backward pass of their own."""
    x, mean, var, weight, bias, residual, ctx.eps, ctx.groups, ctx.relu = inputs
    ctx.residual = residual is not None
    ctx.save_for_backward(x, mean, var, weight, bias, output if ctx.relu else None)


def backward_of_evaluation(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, mean, var, weight, bias and residual; the moments have none."""
    x, mean, var, weight, bias, y = ctx.saved_tensors
    if y is not None:
        dy = dy.masked_fill(y <= 0, 0.0)
    dx, dweight, dbias = gradients_of_evaluation(x, dy, mean, var, weight, ctx.eps, ctx.groups)
    return dx, None, None, typed(dweight, weight), typed(dbias, bias), dy if ctx.residual else None


class Evaluation(torch.autograd.Function):
    """Evaluation by a kernel without a backward pass of its own; ``settings`` are eps, groups and relu."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], settings: tuple[Any, ...], *tensors: Tensor | None) -> Tensor:
        output = kernel(*tensors, *settings)
        keep_for_evaluation(ctx, (*tensors, *settings), output)
        return output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *backward_of_evaluation(ctx, dy)


def typed(gradient: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Cast the gradient of a parameter to the parameter's dtype; None if there is no parameter."""
    return None if parameter is None else gradient.to(parameter.dtype)
