"""Device code of `augment`: one program computes a block of one image."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["augment"]


@triton.jit
def augment(
    pixels_ptr, image_ptr, task_ptr, order_ptr, views_ptr, levels_ptr, out_ptr, channels, height, width, padding,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gather, permute or crop and flip, and scale: from (M, C, H, W) bytes to (B, H, W, C) floats."""
    picture = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    area = height * width
    exists = at < channels * area
    channel = at % channels
    position = at // channels
    source = channel * area + position
    inside = exists
    if order_ptr is not None:
        task = tl.load(task_ptr + picture)
        source = tl.load(order_ptr + task * channels * area + source, mask=exists, other=0)
    if views_ptr is not None:
        row = position // width + tl.load(views_ptr + 3 * picture) - padding
        column = position % width
        column = tl.where(tl.load(views_ptr + 3 * picture + 2) == 1, width - 1 - column, column)
        column += tl.load(views_ptr + 3 * picture + 1) - padding
        inside = exists & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        source = channel * area + row * width + column
    image = tl.load(image_ptr + picture).to(tl.int64)
    byte = tl.load(pixels_ptr + image * channels * area + source, mask=inside, other=0).to(tl.int32)
    level = tl.load(levels_ptr + channel * 256 + byte, mask=exists, other=0.0)
    tl.store(out_ptr + picture.to(tl.int64) * channels * area + at, level, mask=exists)
