"""Device code of `group_norm`: forward and backward.

A program processes one or more whole groups of one sample, with one lane per channel: a group has KP lanes, the
smallest power of two that is at least its K channels, and BC is a multiple of KP. It iterates over the positions in
tiles of (BC lanes, BL positions). If one tile has all positions (WHOLE), each value is read once and kept in registers.

The other sizes are runtime arguments, so that a network with many layer sizes needs few kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ["N", "blocks"]  # not specialized: Triton would compile another kernel for 1 or a multiple of 16


@triton.jit
def _share(C, blocks, K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr):
    """Return the sample of this program (64-bit), and the channel of each lane and whether it exists."""
    program = tl.program_id(0)
    lane = tl.arange(0, BC)
    block = program % blocks
    if K == KP:  # so that Triton sees that the channels are adjacent
        c = block * BC + lane
        exists = c < C
    else:
        c = (block * (BC // KP) + lane // KP) * K + lane % KP
        exists = (lane % KP < K) & (c < C)
    return (program // blocks).to(tl.int64), c, exists


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
def _group_sum(table, KP: tl.constexpr, BC: tl.constexpr):
    """Sum over the lanes of each group, repeated on each lane."""
    if KP == 1:
        return table
    elif KP == BC:  # without a change of layout
        return tl.zeros_like(table) + tl.sum(table, 0)
    else:
        total = tl.sum(tl.reshape(table, (BC // KP, KP)), 1)
        return tl.reshape(tl.broadcast_to(total[:, None], (BC // KP, KP)), (BC,))


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
def _group_moments(mean, var, exists, eps, K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr):
    """Return the mean and reciprocal standard deviation of each lane's group, from the moments of its rows."""
    whole = _group_sum(mean, KP, BC) / K
    off = tl.where(exists, mean - whole, 0.0)
    return whole, tl.rsqrt(_group_sum(var + off * off, KP, BC) / K + eps)


@triton.jit
def _parameter(pointer, c, exists, other: tl.constexpr, BC: tl.constexpr):
    if pointer is not None:
        return tl.load(pointer + c, mask=exists, other=0).to(tl.float32)
    else:
        return tl.full((BC,), other, tl.float32)


@triton.jit
def _store_output(y, residual_ptr, y_ptr, within, mask, RELU: tl.constexpr):
    if residual_ptr is not None:
        y += tl.load(residual_ptr + within, mask=mask, other=0).to(tl.float32)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps NaN
    tl.store(y_ptr + within, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write(
    x_ptr, residual_ptr, y_ptr, pivot, scale, offset, c, exists, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    for start in range(0, L, BL):
        within, mask = _tile(start, c, exists, C, L, LAST, BL)
        x = tl.load(x_ptr + within, mask=mask, other=0).to(tl.float32) - pivot[:, None]
        _store_output(tl.fma(x, scale[:, None], offset[:, None]), residual_ptr, y_ptr, within, mask, RELU)


@triton.jit
def _normalize(x, mask, weight, bias, L, eps, K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr):
    """Normalize a tile with all positions; return it with the mean and reciprocal standard deviation of each group."""
    count = L * K
    x = tl.where(mask, x, 0.0)
    mean = _group_sum(tl.sum(x, 1), KP, BC) / count
    off = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(_group_sum(tl.sum(off * off, 1), KP, BC) / count + eps)
    return tl.fma(off, (rstd * weight)[:, None], bias[:, None]), mean, rstd


@triton.jit
def _store_moments(table_ptr, n, c, exists, pivot, mean, rstd, N, C, K: tl.constexpr):
    slabs = C // K
    at = table_ptr + n * slabs + c // K
    one = exists & (c % K == 0)  # one lane of each group writes for it
    tl.store(at, pivot, mask=one)
    tl.store(at + N * slabs, mean, mask=one)
    tl.store(at + 2 * N * slabs, rstd, mask=one)


@triton.jit(do_not_specialize=SIZES)
def forward(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, table_ptr, N, C, L, blocks, eps,
    RELU: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Group norm, then the residual is added, if there is one, and ReLU applied, if ``RELU``.

    Stores for backward, (N, G) each: pivot, mean minus pivot, reciprocal standard deviation.
    """
    n, c, exists = _share(C, blocks, K, KP, BC)
    x_ptr += n * C * L
    y_ptr += n * C * L
    if residual_ptr is not None:
        residual_ptr += n * C * L
    first = c // K * K
    pivot = _median_of_three(
        x_ptr + _place(first, 0, C, L, LAST),
        x_ptr + _place(first + K // 2, L // 2, C, L, LAST),
        x_ptr + _place(first + K - 1, L - 1, C, L, LAST),
        exists,
    )
    weight = _parameter(weight_ptr, c, exists, 1.0, BC)
    bias = _parameter(bias_ptr, c, exists, 0.0, BC)
    if WHOLE:
        within, mask = _tile(0, c, exists, C, L, LAST, BL)
        x = tl.load(x_ptr + within, mask=mask, other=0).to(tl.float32) - pivot[:, None]
        y, mean, rstd = _normalize(x, mask, weight, bias, L, eps, K, KP, BC)
        _store_output(y, residual_ptr, y_ptr, within, mask, RELU)
    else:
        row_mean, row_var = _row_moments(x_ptr, pivot, c, exists, C, L, LAST, BC, BL)
        mean, rstd = _group_moments(row_mean, row_var, exists, eps, K, KP, BC)
        scale = rstd * weight
        offset = tl.fma(-mean, scale, bias)
        _write(x_ptr, residual_ptr, y_ptr, pivot, scale, offset, c, exists, C, L, LAST, BL, RELU)
    _store_moments(table_ptr, n, c, exists, pivot, mean, rstd, N, C, K)


@triton.jit
def _load_gradient(
    dy_ptr, x_ptr, y_ptr, start, pivot, mean, rstd, c, exists, C, L, LAST: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """Return the offsets of a chunk, its mask, dy before the ReLU (zero where masked) and the normalized input."""
    within, mask = _tile(start, c, exists, C, L, LAST, BL)
    dy = tl.load(dy_ptr + within, mask=mask, other=0).to(tl.float32)
    if y_ptr is not None:
        dy = tl.where(tl.load(y_ptr + within, mask=mask, other=0).to(tl.float32) <= 0, 0.0, dy)
    x = tl.load(x_ptr + within, mask=mask, other=0).to(tl.float32) - pivot[:, None]
    return within, mask, dy, (x - mean[:, None]) * rstd[:, None]


@triton.jit
def _store_gradient(dx_ptr, dresidual_ptr, within, mask, dy, normalized, weight, along, against, rstd):
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + within, dy.to(dresidual_ptr.dtype.element_ty), mask=mask)
    dx = (dy * weight[:, None] - along[:, None] - normalized * against[:, None]) * rstd[:, None]
    tl.store(dx_ptr + within, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _group_gradient(part_ptr, n, c, exists, sums, products, weight, N, C, L, K: tl.constexpr, KP: tl.constexpr,
                    BC: tl.constexpr):  # fmt: skip
    """Store this sample's part of the parameter gradients; return what the gradient of the input needs of a group."""
    along = tl.sum(sums, 1)
    against = tl.sum(products, 1)
    if part_ptr is not None:
        row = part_ptr + n * C + c
        tl.store(row, against, mask=exists)
        tl.store(row + N * C, along, mask=exists)
    count = L * K
    return _group_sum(along * weight, KP, BC) / count, _group_sum(against * weight, KP, BC) / count


@triton.jit(do_not_specialize=SIZES)
def backward(
    dy_ptr, x_ptr, y_ptr, weight_ptr, table_ptr, dx_ptr, dresidual_ptr, part_ptr, N, C, L, blocks,
    K: tl.constexpr, KP: tl.constexpr, LAST: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradient of the input and, if requested, each sample's part of the weight and bias gradients, (N, C) each.

    ``y_ptr`` is the output, if it went through a ReLU, and ``dresidual_ptr`` takes the gradient before the ReLU.
    """
    n, c, exists = _share(C, blocks, K, KP, BC)
    dy_ptr += n * C * L
    x_ptr += n * C * L
    dx_ptr += n * C * L
    if y_ptr is not None:
        y_ptr += n * C * L
    if dresidual_ptr is not None:
        dresidual_ptr += n * C * L
    slabs = C // K
    at = table_ptr + n * slabs + c // K
    pivot = tl.load(at, mask=exists, other=0.0)
    mean = tl.load(at + N * slabs, mask=exists, other=0.0)
    rstd = tl.load(at + 2 * N * slabs, mask=exists, other=0.0)
    weight = _parameter(weight_ptr, c, exists, 1.0, BC)
    if WHOLE:
        within, mask, dy, normalized = _load_gradient(
            dy_ptr, x_ptr, y_ptr, 0, pivot, mean, rstd, c, exists, C, L, LAST, BL
        )  # fmt: skip
        along, against = _group_gradient(part_ptr, n, c, exists, dy, dy * normalized, weight, N, C, L, K, KP, BC)
        _store_gradient(dx_ptr, dresidual_ptr, within, mask, dy, normalized, weight, along, against, rstd)
    else:
        sums = tl.zeros((BC, BL), tl.float32)
        products = tl.zeros((BC, BL), tl.float32)
        for start in range(0, L, BL):
            _, _, dy, normalized = _load_gradient(
                dy_ptr, x_ptr, y_ptr, start, pivot, mean, rstd, c, exists, C, L, LAST, BL
            )  # fmt: skip
            sums += dy
            products += dy * normalized
        along, against = _group_gradient(part_ptr, n, c, exists, sums, products, weight, N, C, L, K, KP, BC)
        for start in range(0, L, BL):
            within, mask, dy, normalized = _load_gradient(
                dy_ptr, x_ptr, y_ptr, start, pivot, mean, rstd, c, exists, C, L, LAST, BL
            )  # fmt: skip
            _store_gradient(dx_ptr, dresidual_ptr, within, mask, dy, normalized, weight, along, against, rstd)


@triton.jit(do_not_specialize=["N"])
def sum_over_samples(part_ptr, dweight_ptr, dbias_ptr, N, C, BN: tl.constexpr, BC: tl.constexpr):
    """Sum the parts of the weight and bias gradients that `backward` has stored, over the samples in a fixed order."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    against = tl.zeros((BN, BC), tl.float32)
    along = tl.zeros((BN, BC), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        at = part_ptr + n.to(tl.int64)[:, None] * C + c[None, :]
        mask = (n < N)[:, None] & (c < C)[None, :]
        against += tl.load(at, mask=mask, other=0.0)
        along += tl.load(at + N * C, mask=mask, other=0.0)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + c, tl.sum(against, 0).to(dweight_ptr.dtype.element_ty), mask=c < C)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + c, tl.sum(along, 0).to(dbias_ptr.dtype.element_ty), mask=c < C)
