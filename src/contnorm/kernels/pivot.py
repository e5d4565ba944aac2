"""Pivots: values near the data that are subtracted before statistics are computed, to avoid cancellation.

Mathematically, normalization is invariant to a constant shift of the values that are normalized together. In floating
point it is not: at a mean of 1e4 and a standard deviation of 1e-2, ``scale * x + offset`` in float32 is wrong by
several percent, since both terms are a million times larger than their sum. Subtracting a value within the range of the
data first is exact (the difference of two nearby numbers has no rounding error), and makes all later terms as small as
the standard deviation. The pivot has no gradient, because the result does not depend on it.

A pivot far from the other values, such as an outlier, would lose precision. So the pivot is a median, over the first,
middle and last position of each row and, if it is used for several rows, over these rows. A single outlier does not
affect it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contnorm.checks import statistics_dtype


def per_channel(table: Tensor, rank: int) -> Tensor:
    """Reshape a (C,) or (N, C) table so that it broadcasts over an input of this rank.

    Example:
        >>> per_channel(torch.zeros(3, 5), rank=4).shape, per_channel(torch.zeros(5), rank=4).shape
        (torch.Size([3, 5, 1, 1]), torch.Size([1, 5, 1, 1]))
    """
    rows = table if table.dim() == 2 else table.unsqueeze(0)
    return rows.reshape(rows.shape + (1,) * (rank - 2))


def _samples(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the first, middle and last value of each row, (N, C, 3), without gradient; (N, C, 1) for (N, C) input."""
    wide = x.detach()
    if x.dim() == 2:
        return wide.to(dtype).unsqueeze(2)
    corners = []
    for halves in (0, 1, 2):
        table = wide
        for _ in range(x.dim() - 2):
            table = table.select(-1, halves * (table.shape[-1] - 1) // 2)  # of integers, which exporters keep variable
        corners.append(table.to(dtype))  # cast first: autocast does not stack other dtypes
    return torch.stack(corners, 2)


def _median(table: Tensor) -> Tensor:
    """Return the (lower) median over the last dimension, by sorting, which all exporters support."""
    return table.sort(-1).values.select(-1, (table.shape[-1] - 1) // 2)


def slab_pivot(x: Tensor, num_groups: int) -> Tensor:
    """Return the pivot of each slab (one sample, one group), repeated over the group's channels: (N, C).

    Compilers of torch can't fuse a sort. For them, the pivot is the median of three values of the slab.
    """
    n, c = x.shape[:2]
    values = _samples(x, statistics_dtype(x)).reshape(n, num_groups, -1)
    if torch.compiler.is_compiling():
        last = values.shape[2] - 1
        one, other, third = (values.select(2, place) for place in (0, last // 2, last))
        middle = torch.stack([torch.minimum(one, other), torch.minimum(torch.maximum(one, other), third)], 2)
        repeated = middle.unsqueeze(2).expand(n, num_groups, c // num_groups, 2).reshape(n, c, 2)
        return repeated.amax(2)  # a table in memory, which loops can read in order
    middle = _median(values)
    return middle.unsqueeze(2).expand(n, num_groups, c // num_groups).reshape(n, c)


def subtract_slab_pivot(x: Tensor, num_groups: int) -> Tensor:
    """Return the input, in the dtype of its statistics, minus the pivot of each slab."""
    return x.to(statistics_dtype(x)) - per_channel(slab_pivot(x, num_groups), x.dim())


def channel_pivot(x: Tensor) -> Tensor:
    """Return the pivot of each channel: (C,)."""
    return _median(_samples(x, statistics_dtype(x)).transpose(0, 1).flatten(1))


def row_pivot(x: Tensor) -> Tensor:
    """Return the pivot of each row: (N, C)."""
    return _median(_samples(x, statistics_dtype(x)))
