"""Device code of `max_pool`: 3x3 windows, stride 2, padding 1, channels_last layout."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pool", "pool_backward"]


@triton.jit
def pool(x_ptr, y_ptr, place_ptr, size, channels, height, width, out_height, out_width, BLOCK: tl.constexpr):
    """Maximum of each window, and its index in the window (0 to 8); the first of equal values, and NaN over all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    channel = at % channels
    column = at // channels % out_width
    row = at // (channels * out_width) % out_height
    sample = at // (channels * out_width * out_height)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32) + 9
    for i in tl.static_range(9):
        y = row * 2 - 1 + i // 3
        x = column * 2 - 1 + i % 3
        inside = exists & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        value = tl.load(
            x_ptr + ((sample * height + y) * width + x) * channels + channel, mask=inside, other=float("-inf")
        ).to(tl.float32)
        better = inside & ((value > best) | (value != value) | (place == 9))
        best = tl.where(better, value, best)
        place = tl.where(better, i, place)
    tl.store(y_ptr + at, best.to(y_ptr.dtype.element_ty), mask=exists)
    tl.store(place_ptr + at, place.to(tl.uint8), mask=exists)


@triton.jit
def pool_backward(
    dy_ptr, place_ptr, dx_ptr, size, channels, height, width, out_height, out_width, BLOCK: tl.constexpr
):  # fmt: skip
    """Each position checks for which of its windows (at most four) it is the maximum, which needs no atomics."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    channel = at % channels
    x = at // channels % width
    y = at // (channels * width) % height
    sample = at // (channels * width * height)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(4):
        row = y // 2 + i // 2
        column = x // 2 + i % 2
        # Along each axis, an even position is in one window, an odd one in two.
        inside = exists & (row < out_height) & (column < out_width)
        inside = inside & ((y % 2 == 1) | (i // 2 == 0)) & ((x % 2 == 1) | (i % 2 == 0))
        window = ((sample * out_height + row) * out_width + column) * channels + channel
        chosen = tl.load(place_ptr + window, mask=inside, other=255).to(tl.int32)
        own = (y - (row * 2 - 1)) * 3 + (x - (column * 2 - 1))
        dy = tl.load(dy_ptr + window, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(chosen == own, dy, 0.0)
    tl.store(dx_ptr + at, total.to(dx_ptr.dtype.element_ty), mask=exists)
