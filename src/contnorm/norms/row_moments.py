"""Moments of each row (one sample, one channel), and normalization with a mean and variance for each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from contnorm.checks import statistics_dtype
from contnorm.kernels.pivot import per_channel, row_pivot


class RowMoments(NamedTuple):
    """The input minus a pivot for each row, and the moments of each row, in float64 because these tables are small."""

    shifted: Tensor  # (N, C, *)
    pivot: Tensor  # (N, C), float64
    mean: Tensor  # (N, C), float64, of the input itself
    var: Tensor  # (N, C), float64, unbiased; zero where a row has one position


def has_one_position(x: Tensor) -> bool:
    """Whether a row (one sample, one channel) has a single position.

    Example:
        >>> has_one_position(torch.zeros(4, 8)), has_one_position(torch.zeros(4, 8, 3))
        (True, False)
    """
    return x.numel() == x.shape[0] * x.shape[1]


def row_moments(x: Tensor) -> RowMoments:
    """Return the moments of each row.

    Example:
        >>> rows = row_moments(torch.tensor([[[0.0, 2.0]]]))
        >>> rows.mean.item(), rows.var.item()
        (1.0, 2.0)
    """
    wide = x.to(statistics_dtype(x))
    single = has_one_position(x)
    # The pivot of a row with one position is its value. With a pivot of zero, the mean, rounded to the dtype of the
    # data, would be subtracted from the data itself, and a large mean would cause cancellation.
    pivot = wide.detach().reshape(x.shape[0], x.shape[1]) if single else row_pivot(x)
    shifted = wide - per_channel(pivot, x.dim())
    if single:
        off = shifted.reshape(x.shape[0], x.shape[1])
        var = torch.zeros_like(off)
    else:
        var, off = torch.var_mean(shifted, dim=tuple(range(2, x.dim())), correction=1)
    return RowMoments(shifted, pivot.double(), pivot.double() + off.double(), var.double())


def normalize_rows(
    x: Tensor, rows: RowMoments, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalize with a mean and variance for each row, (N, C) or (C,) in float64, then apply weight and bias.

    Example:
        >>> x = torch.tensor([[[0.0, 2.0]]])
        >>> rows = row_moments(x)
        >>> normalize_rows(x, rows, rows.mean, rows.var / 2, None, None, 0.0)
        tensor([[[-1.,  1.]]])
    """
    dtype, rank = statistics_dtype(x), x.dim()
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    centred = rows.shifted - per_channel((mean - rows.pivot).to(dtype), rank)
    y = centred * per_channel(scale.to(dtype), rank)
    if bias is not None:
        y = y + per_channel(bias.to(dtype), rank)
    return y.to(x.dtype)
