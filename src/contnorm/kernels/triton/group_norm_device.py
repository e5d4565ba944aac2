"""Device code of `group_norm`: group norm, forward and backward, and the pivot subtraction before a batch norm.

A program processes one or more whole groups of one sample, with one lane per channel, and iterates over their positions
in tiles of (BC channels, BL positions). Sizes are runtime arguments: a kernel is compiled only for its tile and memory
layout, so that a network with many layer sizes needs few kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward", "evaluate", "forward", "subtract_channel_pivot"]

SIZES = ["N", "K", "side", "blocks"]  # not specialized: Triton would compile another kernel for 1 or a multiple of 16


@triton.jit
def _share(C, K, side, blocks, BC: tl.constexpr):
    """Return the sample of this program (64-bit), and of each lane the group within the program, channel and mask."""
    program = tl.program_id(0)
    lane = tl.arange(0, BC)
    c = program % blocks * (side * K) + lane
    return (program // blocks).to(tl.int64), lane // K, c, (lane < side * K) & (c < C)


@triton.jit
def _tile(start, c, exists, C, L, LAST: tl.constexpr, BL: tl.constexpr):
    """Return the offsets of a chunk within its sample, and its mask."""
    at = start + tl.arange(0, BL)
    if LAST:
        within = c[:, None] + at[None, :] * C
    else:
        within = c[:, None] * L + at[None, :]
    return within, exists[:, None] & (at < L)[None, :]


@triton.jit
def _place(c, at, C, L, LAST: tl.constexpr):
    if LAST:
        return c + at * C
    else:
        return c * L + at


@triton.jit
def _median_of_three(first, middle, final, mask):
    a = tl.load(first, mask=mask, other=0).to(tl.float32)
    b = tl.load(middle, mask=mask, other=0).to(tl.float32)
    c = tl.load(final, mask=mask, other=0).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def _group_sum(table, group, BC: tl.constexpr):
    """Sum over the lanes of each group, repeated on each lane; more than 32 lanes always hold a single group."""
    if BC <= 32:
        return tl.sum(tl.where(group[:, None] == group[None, :], table[None, :], 0.0), 1)
    else:
        return tl.zeros_like(table) + tl.sum(table, 0)


@triton.jit
def _row_moments(x_ptr, pivot, c, exists, C, L, LAST: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr):
    """Return mean and biased variance of each channel of this sample, minus its pivot.

    Every lane updates the mean of its values (Welford), and lanes are merged at the end (Chan). For a single chunk this
    is a two-pass computation: first the mean, then the squared deviations.
    """
    mean = tl.zeros((BC, BL), tl.float32)
    square = tl.zeros((BC, BL), tl.float32)
    for start in range(0, L, BL):
        within, mask = _tile(start, c, exists, C, L, LAST, BL)
        x = tl.load(x_ptr + within, mask=mask, other=0).to(tl.float32) - pivot[:, None]
        off = tl.where(mask, x - mean, 0.0)
        mean += off * (1.0 / (start // BL + 1))
        square += off * tl.where(mask, x - mean, 0.0)
    count = ((L - tl.arange(0, BL) + BL - 1) // BL).to(tl.float32)[None, :]
    whole = tl.sum(mean * count, 1) / L
    off = tl.where(count > 0, mean - whole[:, None], 0.0)
    return whole, tl.sum(square + off * off * count, 1) / L


@triton.jit
def _group_moments(mean, var, group, exists, K, eps, BC: tl.constexpr):
    """Return the mean and reciprocal standard deviation of each lane's group, from the moments of its rows."""
    whole = _group_sum(mean, group, BC) / K
    off = tl.where(exists, mean - whole, 0.0)
    return whole, tl.rsqrt(_group_sum(var + off * off, group, BC) / K + eps)


@triton.jit
def _parameter(pointer, c, exists, other: tl.constexpr, BC: tl.constexpr):
    if pointer is not None:
        return tl.load(pointer + c, mask=exists, other=0).to(tl.float32)
    else:
        return tl.full((BC,), other, tl.float32)


@triton.jit
def _write(
    x_ptr, y_ptr, pivot, scale, offset, c, exists, C, L,
    LAST: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    for start in range(0, L, BL):
        within, mask = _tile(start, c, exists, C, L, LAST, BL)
        x = tl.load(x_ptr + within, mask=mask, other=0).to(tl.float32) - pivot[:, None]
        y = tl.fma(x, scale[:, None], offset[:, None])
        tl.store(y_ptr + within, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, table_ptr, N, C, L, K, side, blocks, eps,
    LAST: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Group norm. Stores for backward, (N, G) each: pivot, mean minus pivot, reciprocal standard deviation."""
    n, group, c, exists = _share(C, K, side, blocks, BC)
    x_ptr += n * C * L
    y_ptr += n * C * L
    first = c // K * K
    pivot = _median_of_three(
        x_ptr + _place(first, 0, C, L, LAST),
        x_ptr + _place(first + K // 2, L // 2, C, L, LAST),
        x_ptr + _place(first + K - 1, L - 1, C, L, LAST),
        exists,
    )
    row_mean, row_var = _row_moments(x_ptr, pivot, c, exists, C, L, LAST, BC, BL)
    mean, rstd = _group_moments(row_mean, row_var, group, exists, K, eps, BC)
    slabs = C // K
    at = table_ptr + n * slabs + c // K
    one = exists & (c == first)  # one lane of each group writes for it
    tl.store(at, pivot, mask=one)
    tl.store(at + N * slabs, mean, mask=one)
    tl.store(at + 2 * N * slabs, rstd, mask=one)
    scale = rstd * _parameter(weight_ptr, c, exists, 1.0, BC)
    offset = tl.fma(-mean, scale, _parameter(bias_ptr, c, exists, 0.0, BC))
    _write(x_ptr, y_ptr, pivot, scale, offset, c, exists, C, L, LAST, BL)


@triton.jit(do_not_specialize=SIZES)
def backward(
    dy_ptr, x_ptr, weight_ptr, table_ptr, dx_ptr, part_ptr, N, C, L, K, side, blocks,
    LAST: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Gradient of the input and, if requested, each sample's part of the weight and bias gradients, (N, C) each."""
    n, group, c, exists = _share(C, K, side, blocks, BC)
    dy_ptr += n * C * L
    x_ptr += n * C * L
    dx_ptr += n * C * L
    slabs = C // K
    at = table_ptr + n * slabs + c // K
    pivot = tl.load(at, mask=exists, other=0.0)
    mean = tl.load(at + N * slabs, mask=exists, other=0.0)
    rstd = tl.load(at + 2 * N * slabs, mask=exists, other=0.0)
    weight = _parameter(weight_ptr, c, exists, 1.0, BC)
    sums = tl.zeros((BC, BL), tl.float32)
    products = tl.zeros((BC, BL), tl.float32)
    for start in range(0, L, BL):
        within, mask = _tile(start, c, exists, C, L, LAST, BL)
        dy = tl.load(dy_ptr + within, mask=mask, other=0).to(tl.float32)
        x = tl.load(x_ptr + within, mask=mask, other=0).to(tl.float32) - pivot[:, None]
        sums += dy
        products += dy * ((x - mean[:, None]) * rstd[:, None])  # masked lanes have dy = 0
    along = tl.sum(sums, 1)
    against = tl.sum(products, 1)
    if part_ptr is not None:
        row = part_ptr + n * C + c
        tl.store(row, against, mask=exists)
        tl.store(row + N * C, along, mask=exists)
    count = K * L * 1.0
    along = _group_sum(along * weight, group, BC) / count
    against = _group_sum(against * weight, group, BC) / count
    for start in range(0, L, BL):
        within, mask = _tile(start, c, exists, C, L, LAST, BL)
        dy = tl.load(dy_ptr + within, mask=mask, other=0).to(tl.float32)
        x = tl.load(x_ptr + within, mask=mask, other=0).to(tl.float32) - pivot[:, None]
        normalized = (x - mean[:, None]) * rstd[:, None]
        dx = (dy * weight[:, None] - along[:, None] - normalized * against[:, None]) * rstd[:, None]
        tl.store(dx_ptr + within, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def evaluate(
    x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, y_ptr, N, C, L, K, side, blocks, eps,
    TIED: tl.constexpr, LAST: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Batch norm with given moments, with affine parameters if ``TIED``, then group norm with affine parameters.

    The batch norm scales each row and shifts it to a level. For data far from the given mean, levels are large and
    their differences small. So they are computed in float64, one number per row, and only the difference to the first
    row of the group is used: group norm is invariant to the rest.
    """
    n, group, c, exists = _share(C, K, side, blocks, BC)
    x_ptr += n * C * L
    y_ptr += n * C * L
    pivot = _median_of_three(
        x_ptr + _place(c, 0, C, L, LAST),
        x_ptr + _place(c, L // 2, C, L, LAST),
        x_ptr + _place(c, L - 1, C, L, LAST),
        exists,
    )
    weight = _parameter(weight_ptr, c, exists, 1.0, BC)
    bias = _parameter(bias_ptr, c, exists, 0.0, BC)
    running_mean = tl.load(mean_ptr + c, mask=exists, other=0).to(tl.float64)
    running_var = tl.load(var_ptr + c, mask=exists, other=1).to(tl.float64)
    gain = 1.0 / tl.sqrt(running_var + eps)
    if TIED:
        gain = gain * weight.to(tl.float64)
    level = (pivot.to(tl.float64) - running_mean) * gain
    if TIED:
        level = level + bias.to(tl.float64)
    level = tl.where(exists, level, 0.0)
    firsts = tl.where(exists & (c % K == 0), level, 0.0)
    level = (level - _group_sum(firsts, group, BC)).to(tl.float32)
    gain = gain.to(tl.float32)
    row_mean, row_var = _row_moments(x_ptr, pivot, c, exists, C, L, LAST, BC, BL)
    row_mean = tl.where(exists, tl.fma(row_mean, gain, level), 0.0)
    row_var = row_var * gain * gain
    mean, rstd = _group_moments(row_mean, row_var, group, exists, K, eps, BC)
    scale = rstd * weight
    offset = tl.fma(level - mean, scale, bias)
    _write(x_ptr, y_ptr, pivot, scale * gain, offset, c, exists, C, L, LAST, BL)


@triton.jit(do_not_specialize=["N", "chunks"])
def subtract_channel_pivot(
    x_ptr, running_ptr, y_ptr, pivot_ptr, about_ptr, N, C, L, chunks, LAST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Subtract the pivot of each channel; store the pivots, and the running mean minus the pivot."""
    program = tl.program_id(0)
    n = (program // chunks).to(tl.int64)
    within = program % chunks * BLOCK + tl.arange(0, BLOCK)
    mask = within < C * L
    if LAST:
        c = within % C
        first = within < C
    else:
        c = within // L
        first = within % L == 0
    pivot = _median_of_three(
        x_ptr + _place(c, 0, C, L, LAST),
        x_ptr + (N // 2).to(tl.int64) * C * L + _place(c, L // 2, C, L, LAST),
        x_ptr + (N - 1).to(tl.int64) * C * L + _place(c, L - 1, C, L, LAST),
        mask,
    )
    at = n * C * L + within
    x = tl.load(x_ptr + at, mask=mask, other=0).to(tl.float32)
    tl.store(y_ptr + at, x - pivot, mask=mask)
    if n == 0:
        one = mask & first
        tl.store(pivot_ptr + c, pivot, mask=one)
        if running_ptr is not None:
            running = tl.load(running_ptr + c, mask=one, other=0)
            tl.store(about_ptr + c, running - pivot, mask=one)
