"""Pivots: a value near the data, taken off before statistics are made, so that a large mean does not cancel.

Normalization does not see a constant shift of what it normalizes together. In floating point it does: at a mean of
1e4 and a spread of 1e-2, ``scale * x + offset`` in float32 is off by several percent, since both terms are a million
times their sum. Taking off any element of the slab first is exact (the difference of two near numbers has no rounding)
and makes every later term as small as the spread. The pivot carries no gradient: the result does not depend on it.
"""

from __future__ import annotations

from torch import Tensor

from contnorm.checks import statistics_dtype

__all__ = ["channel_pivot", "per_channel", "slab_pivot"]


def per_channel(table: Tensor, rank: int) -> Tensor:
    """A (C,) or (N, C) table in a shape that broadcasts over an input of this rank.

    Example:
        >>> per_channel(torch.zeros(3, 5), rank=4).shape, per_channel(torch.zeros(5), rank=4).shape
        (torch.Size([3, 5, 1, 1]), torch.Size([1, 5, 1, 1]))
    """
    rows = table if table.dim() == 2 else table.unsqueeze(0)
    return rows.reshape(rows.shape + (1,) * (rank - 2))


def _first_position(x: Tensor) -> Tensor:
    """(N, C): the value at the first position of each sample and channel, without gradient."""
    table = x.detach()
    for _ in range(x.dim() - 2):
        table = table.select(-1, 0)
    return table.to(statistics_dtype(x))


def slab_pivot(x: Tensor, num_groups: int) -> Tensor:
    """(N, C): for each sample and group the first element of that slab, repeated over the group's channels."""
    firsts = _first_position(x).reshape(x.shape[0], num_groups, -1)
    return firsts[:, :, :1].expand_as(firsts).reshape(x.shape[0], x.shape[1])


def channel_pivot(x: Tensor) -> Tensor:
    """(C,): the first element of each channel."""
    return _first_position(x)[0]
