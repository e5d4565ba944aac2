"""What often follows a norm: a residual added and a cut at zero. Fused kernels do it in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["activated"]


def activated(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """A norm's output, with a residual added where there is one, then cut off below zero where asked.

    Example:
        >>> activated(torch.tensor([-3.0, 1.0]), torch.tensor([1.0, 1.0]), relu=True)
        tensor([0., 2.])
    """
    if residual is not None:
        y = y + residual
    return torch.relu(y) if relu else y
