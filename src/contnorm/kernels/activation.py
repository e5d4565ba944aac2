"""Residual addition and ReLU after a norm, in torch operators. Fused kernels do both in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["activated"]


def activated(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """Add a residual to the output of a norm if it is not None, then apply ReLU if ``relu``.

    Example:
        >>> activated(torch.tensor([-3.0, 1.0]), torch.tensor([1.0, 1.0]), relu=True)
        tensor([0., 2.])
    """
    if residual is not None:
        y = y + residual
    return torch.relu(y) if relu else y
