"""Max-pooling of a ResNet's stem, 3x3 two apart, the same bits every time.

Torch's backward pass adds into positions from several windows at once, which is slow where the order of those sums is
held fixed. Here each position asks the windows it lies in.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.kernels.launching import launch
from contnorm.kernels.triton_here import usable

__all__ = ["StemPool", "max_pool"]

BLOCK = 1024


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        n, c, height, width = ctx.shape = x.shape
        ctx.out = (height + 1) // 2, (width + 1) // 2
        y = _empty_like(x, (n, c, *ctx.out))
        place = torch.empty(y.numel(), dtype=torch.uint8, device=x.device)
        _launch("pool", y.numel(), ctx, x.movedim(1, -1).contiguous(), y, place)
        ctx.save_for_backward(place)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (place,) = ctx.saved_tensors
        dx = _empty_like(dy, ctx.shape)
        _launch("pool_backward", dx.numel(), ctx, dy.movedim(1, -1).contiguous(), place, dx)
        return dx


def _empty_like(x: Tensor, shape: Any) -> Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _launch(kernel: str, size: int, ctx: Any, *tensors: Tensor) -> None:
    code: Any = getattr(import_module("contnorm.kernels.max_pool_device"), kernel)
    _, channels, *area = ctx.shape
    launch(code, (-(-size // BLOCK),), *tensors, size, channels, *area, *ctx.out, BLOCK=BLOCK, num_warps=4)


def max_pool(x: Tensor) -> Tensor:
    """``F.max_pool2d(x, 3, 2, 1)`` with channels next to each other in memory; needs Triton."""
    y: Tensor = _MaxPool.apply(x)  # type: ignore[no-untyped-call]
    return y


class StemPool(nn.Module):
    """Max-pooling by windows of 3x3, two apart; by our kernel on a GPU, where channels lie next to each other.

    Example:
        >>> StemPool()(torch.arange(16.0).view(1, 1, 4, 4)).flatten()
        tensor([ 5.,  7., 13., 15.])
    """

    def forward(self, x: Tensor) -> Tensor:
        fast = x.is_cuda and x.is_contiguous(memory_format=torch.channels_last) and usable(x.device)
        return max_pool(x) if fast else F.max_pool2d(x, 3, 2, 1)
