"""Image augmentation in one pass: gather, permute or crop and flip, and scale.

Bytes have 256 values, so scaling is a table lookup. The result is bit-exact with that of torch operators. It is in
channels_last layout, which is fast on tensor cores. One kernel replaces several torch operators,
each of which is a pass over the images.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from contnorm.kernels.triton.launcher import launch, on_device_of

__all__ = ["augmented"]

BLOCK = 1024


def augmented(
    pixels: Tensor,
    image: Tensor,
    levels: Tensor,
    *,
    task: Tensor | None = None,
    orders: Tensor | None = None,
    views: Tensor | None = None,
    padding: int = 0,
) -> Tensor:
    """Return augmented images, (B, C, H, W) in float32, from images in bytes; requires Triton.

    Args:
        pixels: (M, C, H, W) uint8, contiguous.
        image: (B,), indices of the images in ``pixels``.
        levels: (C, 256), the float value of each byte.
        task, orders: (B,) and (T, C * H * W), the task of each image and the pixel permutation of each task.
        views: (B, 3), the two offsets of the crop, and whether to flip the image.
        padding: Number of zeros added on every side before the crop.
    """
    _, channels, height, width = pixels.shape
    out = torch.empty((len(image), channels, height, width), device=pixels.device).contiguous(
        memory_format=torch.channels_last
    )
    grid = len(image), -(-channels * height * width // BLOCK)
    code = import_module("contnorm.kernels.triton.augment_device")
    with on_device_of(pixels):
        launch(
            code.augment,
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
