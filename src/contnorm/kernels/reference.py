"""Reference implementation of continual normalization: one call each of torch's group norm and batch norm.

All other implementations are tested against it. With ``pivot=True`` the same two operators are applied to the data
minus a pivot, which keeps them accurate at large means. So the variants, which have no closed form, are as accurate as
CN itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.checks import statistics_dtype
from contnorm.kernels import Order
from contnorm.kernels.layout import beside_bias, group_norm_in_layout
from contnorm.kernels.pivot import channel_pivot, less_slab_pivot, per_channel, slab_pivot

__all__ = [
    "BatchMoments",
    "batch_step",
    "evaluate",
    "in_statistics_dtype",
    "scaled_about_pivot",
    "train",
]


class BatchMoments(NamedTuple):
    """The moments of a batch that BatchNorm stores: mean and unbiased variance of each channel."""

    mean: Tensor
    var: Tensor


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
            signal = less_slab_pivot(x, num_groups)
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
            signal = less_slab_pivot(x, num_groups)
        grouped = group_norm_in_layout(signal, num_groups, first_weight, first_bias, eps)
        y = F.batch_norm(grouped, mean, var, beside_bias(weight, bias), bias, False, 0.0, eps)
    else:
        if pivot:
            normalized = scaled_about_pivot(x, mean, var, first_weight, first_bias, eps, num_groups)
        else:
            scale = beside_bias(first_weight, first_bias)
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
    scale = torch.rsqrt(var.double() + eps)
    if weight is not None:
        scale = scale * weight.double()
    level = (at.double() - mean.double()) * scale
    if bias is not None:
        level = level + bias.double()
    firsts = level.detach().reshape(x.shape[0], num_groups, -1)[:, :, :1]
    level = (level.reshape(x.shape[0], num_groups, -1) - firsts).reshape(x.shape[0], x.shape[1])
    dtype, rank = statistics_dtype(x), x.dim()
    return (x.to(dtype) - per_channel(at, rank)) * per_channel(scale.to(dtype), rank) + per_channel(
        level.to(dtype), rank
    )


def batch_step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, moments: bool
) -> tuple[Tensor, BatchMoments | None]:
    """Torch's batch norm with batch statistics; momentum 1 with new buffers makes it return the batch moments."""
    weight = beside_bias(weight, bias)
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
