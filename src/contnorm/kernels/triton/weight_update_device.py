"""Device code of `weight_update`: the step of stochastic gradient descent with bfloat16 gradients."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["update"]


@triton.jit
def update(weight_ptr, first_ptr, second_ptr, third_ptr, factor, size, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Add the sum of one to three gradients, times a factor, to a float32 weight."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    gradient = tl.load(first_ptr + at, mask=exists, other=0.0).to(tl.float32)
    if GRADIENTS > 1:
        gradient += tl.load(second_ptr + at, mask=exists, other=0.0).to(tl.float32)
    if GRADIENTS > 2:
        gradient += tl.load(third_ptr + at, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=exists, other=0.0)
    tl.store(weight_ptr + at, weight + factor * gradient, mask=exists)
