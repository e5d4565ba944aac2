"""Reference implementation of continual normalization: one call each of torch's group norm and batch norm.

All other implementations are tested against it. With ``pivot=True`` the same two operators are applied to the data
minus a pivot, which keeps them accurate at large means. So the variants, which have no closed form, are as accurate as
CN itself.

What other implementations use too is here as well: torch's group norm in the memory layout of its input, torch's batch
norm with the moments of the batch, residual addition with ReLU, and the description of an update of running moments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.checks import statistics_dtype, widest
from contnorm.kernels import Order
from contnorm.kernels.pivot import channel_pivot, per_channel, slab_pivot


class BatchMoments(NamedTuple):
    """The moments of a batch that BatchNorm stores: mean and unbiased variance of each channel."""

    mean: Tensor
    var: Tensor


class MomentUpdate(NamedTuple):
    """Running moments, and how a batch changes them; a kernel that normalizes the batch updates them in the same pass.

    Attributes:
        mean, var: (C,) buffers, contiguous.
        counter: Batch counter, incremented by one.
        weight: The weight of the batch, if it is a tensor on the device.
        momentum: The weight of the batch, if it is a number.
        factor: The factor from the biased to the unbiased variance.
    """

    mean: Tensor | None = None
    var: Tensor | None = None
    counter: Tensor | None = None
    weight: Tensor | None = None
    momentum: float = 0.0
    factor: float = 1.0


NO_UPDATE = MomentUpdate()


def moment_update(
    mean: Tensor | None, var: Tensor | None, counter: Tensor | None, momentum: float | Tensor, count: int
) -> MomentUpdate | None:
    """Describe the update of running moments by a batch of ``count`` values per channel; None if no kernel can do it.

    The moments must be contiguous. A counter, and a momentum that is a tensor, must be 0-dim and on their device.

    Example:
        >>> moment_update(torch.zeros(3), torch.ones(3), None, 0.1, count=5).factor
        1.25
    """
    if mean is None or var is None or not (mean.is_contiguous() and var.is_contiguous()):
        return None
    if counter is not None and (counter.device != mean.device or counter.dim() != 0):
        return None
    if isinstance(momentum, Tensor):
        on_device = momentum.device == mean.device and momentum.dim() == 0
        return MomentUpdate(mean, var, counter, momentum, 0.0, count / (count - 1)) if on_device else None
    return MomentUpdate(mean, var, counter, None, float(momentum), count / (count - 1))


def train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    *,
    order: Order = "gn_bn",
    tied: bool = False,
    pivot: bool = False,
    moments: bool = True,
) -> tuple[Tensor, BatchMoments | None]:
    """Normalize with the moments of the batch; return the output and, if ``moments``, these moments."""
    signal, weight, bias = in_statistics_dtype(x, weight, bias)
    first_weight, first_bias = (weight, bias) if tied else (None, None)
    batch_moments: BatchMoments | None
    if order == "gn_bn":
        if pivot:
            signal = signal - per_channel(slab_pivot(x, num_groups), x.dim())
        grouped = group_norm_in_layout(signal, num_groups, first_weight, first_bias, eps)
        y, batch_moments = batch_step(grouped, weight, bias, eps, moments)
    else:
        at = channel_pivot(x) if pivot else None
        if at is not None:
            signal = signal - per_channel(at, x.dim())
        normalized, batch_moments = batch_step(signal, first_weight, first_bias, eps, moments)
        if at is not None and batch_moments is not None:
            batch_moments = BatchMoments(batch_moments.mean + at, batch_moments.var)
        y = group_norm_in_layout(normalized, num_groups, weight, bias, eps)
    return y.to(x.dtype), batch_moments


def evaluate(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    *,
    order: Order = "gn_bn",
    tied: bool = False,
    pivot: bool = False,
) -> Tensor:
    """Normalize with the given moments."""
    signal, weight, bias = in_statistics_dtype(x, weight, bias)
    mean, var = mean.to(signal.dtype), var.to(signal.dtype)
    first_weight, first_bias = (weight, bias) if tied else (None, None)
    if order == "gn_bn":
        if pivot:
            signal = signal - per_channel(slab_pivot(x, num_groups), x.dim())
        grouped = group_norm_in_layout(signal, num_groups, first_weight, first_bias, eps)
        y = F.batch_norm(grouped, mean, var, weight_or_ones(weight, bias), bias, False, 0.0, eps)
    else:
        if pivot:
            normalized = scaled_about_pivot(x, mean, var, first_weight, first_bias, eps, num_groups)
        else:
            scale = weight_or_ones(first_weight, first_bias)
            normalized = F.batch_norm(signal, mean, var, scale, first_bias, False, 0.0, eps)
        y = group_norm_in_layout(normalized, num_groups, weight, bias, eps)
    return y.to(x.dtype)


def scaled_about_pivot(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
) -> Tensor:
    """Batch norm with given moments, minus a constant for each slab, to which the following group norm is invariant.

    For data far from the given mean, batch norm gives large values with small differences. So the level of each row is
    computed in a small float64 table, and only its difference within the slab is added to the data.
    """
    at = slab_pivot(x, num_groups)
    scale = torch.rsqrt(widest(var) + eps)
    if weight is not None:
        scale = scale * widest(weight)
    level = (widest(at) - widest(mean)) * scale
    if bias is not None:
        level = level + widest(bias)
    firsts = level.detach().reshape(x.shape[0], num_groups, -1)[..., :1]
    level = (level.reshape(x.shape[0], num_groups, -1) - firsts).reshape(x.shape[0], x.shape[1])
    dtype, rank = statistics_dtype(x), x.dim()
    return (x.to(dtype) - per_channel(at, rank)) * per_channel(scale.to(dtype), rank) + per_channel(
        level.to(dtype), rank
    )


def batch_step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, moments: bool
) -> tuple[Tensor, BatchMoments | None]:
    """Torch's batch norm with batch statistics; momentum 1 with new buffers makes it return the batch moments."""
    weight = weight_or_ones(weight, bias)
    if not moments:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps), None
    dtype = statistics_dtype(x)
    buffers = BatchMoments(x.new_zeros(x.shape[1], dtype=dtype), x.new_ones(x.shape[1], dtype=dtype))
    return F.batch_norm(x, buffers.mean, buffers.var, weight, bias, True, 1.0, eps), buffers


def in_statistics_dtype(
    x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cast half precision to float32 once, so that the intermediate result is not rounded to half precision."""
    dtype = statistics_dtype(x)
    return x.to(dtype), None if weight is None else weight.to(dtype), None if bias is None else bias.to(dtype)


def group_norm_in_layout(x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.group_norm`` whose output is channels_last where the input is.

    Example:
        >>> x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
        >>> group_norm_in_layout(x, 2, None, None, 1e-5).is_contiguous(memory_format=torch.channels_last)
        True
    """
    signal = x.contiguous() if backward_would_crash(x, weight, bias) else x
    y = F.group_norm(signal, num_groups, weight_or_ones(weight, bias), bias, eps)
    if x.dim() > 3 and x.stride(1) == 1 and not x.is_contiguous():
        return y.movedim(1, -1).contiguous().movedim(-1, 1)  # no copy if it already has that layout
    return y


def backward_would_crash(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the backward pass of torch's group norm would crash the process, if the input is channels_last.

    On a CPU it writes a gradient of x even if x requires none. A contiguous input avoids the crash.
    """
    if x.device.type != "cpu" or x.requires_grad or not torch.is_grad_enabled():
        return False
    return any(p is not None and p.requires_grad for p in parameters)


def weight_or_ones(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return the weight, or ones if there is only a bias, with which the backward passes of torch's norms fail."""
    return torch.ones_like(bias) if weight is None and bias is not None else weight


def add_residual_and_relu(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Add a residual to the output of a norm if it is not None, then apply ReLU if ``relu``.

    Example:
        >>> add_residual_and_relu(torch.tensor([-3.0, 1.0]), torch.tensor([1.0, 1.0]), relu=True)
        tensor([0., 2.])
    """
    if residual is not None:
        y = y + residual
    return torch.relu(y) if relu else y
