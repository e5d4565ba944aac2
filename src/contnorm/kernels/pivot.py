"""Pivots: a value near the data, taken off before statistics are made, so that a large mean does not cancel.

Normalization does not see a constant shift of what it normalizes together. In floating point it does: at a mean of
1e4 and a spread of 1e-2, ``scale * x + offset`` in float32 is off by several percent, since both terms are a million
times their sum. Taking off a value amid the data first is exact (the difference of two near numbers has no rounding)
and makes every later term as small as the spread. The pivot carries no gradient: the result does not depend on it.

Any element would do but for outliers: a pivot far from the rest costs digits. So it is a median, over the first, middle
and last position of each row and, where a pivot serves several rows, over those: no single value can lead it astray.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contnorm.checks import statistics_dtype

__all__ = ["channel_pivot", "less_slab_pivot", "per_channel", "row_pivot", "slab_pivot"]


def per_channel(table: Tensor, rank: int) -> Tensor:
    """A (C,) or (N, C) table in a shape that broadcasts over an input of this rank.

    Example:
        >>> per_channel(torch.zeros(3, 5), rank=4).shape, per_channel(torch.zeros(5), rank=4).shape
        (torch.Size([3, 5, 1, 1]), torch.Size([1, 5, 1, 1]))
    """
    rows = table if table.dim() == 2 else table.unsqueeze(0)
    return rows.reshape(rows.shape + (1,) * (rank - 2))


def _samples(x: Tensor) -> Tensor:
    """(N, C, 3): the first, middle and last value of each row, without gradient; (N, C, 1) where a row has one."""
    wide = x.detach()
    if x.dim() == 2:
        return wide.to(statistics_dtype(x)).unsqueeze(2)
    corners = []
    for part in (0.0, 0.5, 1.0):
        table = wide
        for _ in range(x.dim() - 2):
            table = table.select(-1, int(part * (table.shape[-1] - 1)))
        corners.append(table.to(statistics_dtype(x)))  # before the stack: autocast refuses to stack a type not its own
    return torch.stack(corners, 2)


def _median(table: Tensor) -> Tensor:
    """Over the last dimension, the lower of two; by sorting, which exports everywhere."""
    return table.sort(-1).values.select(-1, (table.shape[-1] - 1) // 2)


def slab_pivot(x: Tensor, num_groups: int) -> Tensor:
    """(N, C): for each sample and group a value amid that slab, repeated over the group's channels."""
    n, c = x.shape[:2]
    middle = _median(_samples(x).reshape(n, num_groups, -1))
    return middle.unsqueeze(2).expand(n, num_groups, c // num_groups).reshape(n, c)


def less_slab_pivot(x: Tensor, num_groups: int) -> Tensor:
    """The input in the type of its statistics, less the pivot of each slab."""
    return x.to(statistics_dtype(x)) - per_channel(slab_pivot(x, num_groups), x.dim())


def channel_pivot(x: Tensor) -> Tensor:
    """(C,): a value amid each channel."""
    return _median(_samples(x).transpose(0, 1).flatten(1))


def row_pivot(x: Tensor) -> Tensor:
    """(N, C): a value amid each row."""
    return _median(_samples(x))
