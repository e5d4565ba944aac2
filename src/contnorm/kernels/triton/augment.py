"""Pictures as a network sees them, in one pass: gathered, shuffled or cropped and flipped, and scaled.

Bytes have 256 values, so scaling is a table. The result is that of the plain operators to the bit, with channels next
to each other in memory, as tensor cores like it.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from contnorm.kernels.triton.launcher import here, launch

__all__ = ["viewed"]

BLOCK = 1024


def viewed(
    pixels: Tensor,
    image: Tensor,
    levels: Tensor,
    *,
    task: Tensor | None = None,
    orders: Tensor | None = None,
    views: Tensor | None = None,
    padding: int = 0,
) -> Tensor:
    """(B, C, H, W) in float32 of pictures in bytes; needs Triton.

    Args:
        pixels: (M, C, H, W) uint8, contiguous.
        image: (B,) which of them.
        levels: (C, 256) what each byte becomes.
        task, orders: (B,) and (T, C * H * W): the order of the pixels, by task.
        views: (B, 3) offsets of a crop, and whether to mirror.
        padding: Zeros on every side before the crop.
    """
    _, channels, height, width = pixels.shape
    out = torch.empty((len(image), channels, height, width), device=pixels.device).contiguous(
        memory_format=torch.channels_last
    )
    grid = len(image), -(-channels * height * width // BLOCK)
    code = import_module("contnorm.kernels.triton.augment_device")
    with here(pixels):
        launch(
            code.view_pictures,
            grid,
            pixels,
            image,
            task,
            orders,
            views,
            levels,
            out,
            channels,
            height,
            width,
            padding,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out
