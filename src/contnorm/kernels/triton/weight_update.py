"""The update of stochastic gradient descent, from bfloat16 gradients of one to three passes.

Torch casts each gradient to float32, adds those of several passes, and adds the sum to the weight: three or more passes
over memory. One kernel does all of it, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from contnorm.kernels.triton.availability import can_launch
from contnorm.kernels.triton.launcher import launch, on_device_of

__all__ = ["MOST_GRADIENTS", "can_update", "update_weight"]

MOST_GRADIENTS = 3
BLOCK = 2048


def can_update(weight: Tensor, gradients: Sequence[Tensor]) -> bool:
    """Whether the kernel supports a weight and its gradients: few gradients, all in the dense layout of the weight."""
    formats = (torch.contiguous_format, torch.channels_last) if weight.dim() == 4 else (torch.contiguous_format,)
    return (
        can_launch(weight.device)
        and weight.dtype == torch.float32
        and 1 <= len(gradients) <= MOST_GRADIENTS
        and any(all(t.is_contiguous(memory_format=form) for t in (weight, *gradients)) for form in formats)
    )


def update_weight(weight: Tensor, gradients: Sequence[Tensor], factor: float) -> None:
    """Add the sum of the gradients, from the first to the last, times a factor, to a weight that `can_update`."""
    code: Any = import_module("contnorm.kernels.triton.weight_update_device").update
    first, second, third = (*gradients, *[gradients[0]] * (MOST_GRADIENTS - len(gradients)))
    grid = (-(-weight.numel() // BLOCK),)
    with on_device_of(weight):
        launch(
            code, grid, weight, first, second, third, factor, weight.numel(),
            GRADIENTS=len(gradients), BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
