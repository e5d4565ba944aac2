"""Batches put together for one forward pass; without a copy where they lie behind one another already.

The engine gathers all images of a step into one tensor and hands out parts of it. Parts that are put together again are
the tensor they came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch

__all__ = ["joined", "together"]


def together(*batches: Batch) -> Batch:
    """One batch of the samples of several, in their order; without stored logits.

    Example:
        >>> x, label = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
        >>> parts = [Batch(x[:1], label[:1], label[:1]), Batch(x[1:], label[1:], label[1:])]
        >>> together(*parts).x.data_ptr() == x.data_ptr()
        True
    """
    return Batch(*(joined([getattr(b, part) for b in batches]) for part in ("x", "label", "task")))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one behind another, along their first dimension."""
    first = parts[0]
    if not _follow_each_other(parts):
        return torch.cat(list(parts))
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _follow_each_other(parts: Sequence[Tensor]) -> bool:
    """Whether the parts are one tensor, cut: the same storage, steps and shape, each beginning where the last ends."""
    first = parts[0]
    place = first.storage_offset()
    for part in parts:
        if (
            part.requires_grad
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or (part.stride(), part.shape[1:], part.dtype) != (first.stride(), first.shape[1:], first.dtype)
            or part.storage_offset() != place
        ):
            return False
        place += len(part) * part.stride(0)
    return True
