"""Concatenation of batches for one forward pass, without a copy if they are adjacent in memory.

The engine gathers all images of a step into one tensor and passes slices of it to the strategy. Concatenating these
slices gives a view of the original tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch

__all__ = ["joined", "together"]


def together(*batches: Batch) -> Batch:
    """Concatenate batches in order; stored logits are dropped.

    Example:
        >>> x, label = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
        >>> parts = [Batch(x[:1], label[:1], label[:1]), Batch(x[1:], label[1:], label[1:])]
        >>> together(*parts).x.data_ptr() == x.data_ptr()
        True
    """
    return Batch(*(joined([getattr(b, part) for b in batches]) for part in ("x", "label", "task")))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension."""
    first = parts[0]
    if not _adjacent(parts):
        return torch.cat(list(parts))
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether the parts are consecutive slices of one tensor: same storage, strides and shape, and no gap."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        if (
            part.requires_grad
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or (part.stride(), part.shape[1:], part.dtype) != (first.stride(), first.shape[1:], first.dtype)
            or part.storage_offset() != offset
        ):
            return False
        offset += len(part) * part.stride(0)
    return True
