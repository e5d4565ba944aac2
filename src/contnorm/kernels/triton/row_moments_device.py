"""Kernels over rows, and device functions that the kernels of batch renorm and switchable norm share.

A row is one sample and channel with all its positions. A tile is (BN samples, BC channels, BL positions), a table
(BN, BC). Tables of moments are float64: they are small compared with the data, and keep the precision of a mean of 1e4
with a standard deviation of 1e-2. Means are only subtracted from each other, and the differences are float32. Values
are processed minus their pivot, which is the rounded mean of the row or channel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contnorm.kernels.triton.continual.forward import row_moments
from contnorm.kernels.triton.continual.tiles import place, positions, shared_out, slab_pivot

__all__ = [
    "channel_moments",
    "lerped",
    "moments",
    "number_argument",
    "parameter",
    "row",
    "sums",
    "write_gradient",
    "write_scaled",
]


@triton.jit(do_not_specialize=["N", "blocks"])
def moments(
    x_ptr, table_ptr, N, C, L, blocks,
    BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Store the mean and the sum of squared deviations of each row: (N, C) each."""
    _, c, _, _, n, rows = shared_out(tl.program_id(0), blocks, 1, N, C, 1, 1, BN, BC, False)
    pivot = slab_pivot(x_ptr, n, tl.program_id(0) % blocks, c, rows, N, C, L, 1, 1, BN, BC, LAST, False)
    mean, square = row_moments(x_ptr, pivot, n, c, rows, 0, L, C, L, LAST, BN, BC, BL)
    where = table_ptr + n.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(where, pivot.to(tl.float64) + mean.to(tl.float64), mask=rows)
    tl.store(where + N * C, square.to(tl.float64), mask=rows)


@triton.jit
def _gradient_before_relu(dy_ptr, y_ptr, where, mask):
    """Load dy; if ``y_ptr`` is given, the output of a ReLU, it is zero where that is not positive."""
    dy = tl.load(dy_ptr + where, mask=mask, other=0).to(tl.float32)
    if y_ptr is not None:
        dy = tl.where(tl.load(y_ptr + where, mask=mask, other=0).to(tl.float32) <= 0, 0.0, dy)  # NaN keeps dy
    return dy


@triton.jit(do_not_specialize=["N", "blocks", "step"])
def sums(
    x_ptr, dy_ptr, y_ptr, dresidual_ptr, mean_ptr, sum_ptr, N, C, L, blocks, step,
    BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Store the sums of dy and of dy times (x minus pivot) of each row: (N, C) each, float32.

    ``y_ptr`` is the output, if it went through a ReLU; dy is then the gradient before it, which ``dresidual_ptr``
    takes. ``step`` is the stride of the means between samples: C for one mean per row, 0 for one mean per channel.
    """
    _, c, _, _, n, rows = shared_out(tl.program_id(0), blocks, 1, N, C, 1, 1, BN, BC, False)
    from_sample = n.to(tl.int64)[:, None]
    pivot = tl.load(mean_ptr + from_sample * step + c[None, :], mask=rows, other=0.0).to(tl.float32)
    sum_dy = tl.zeros((BN, BC, BL), tl.float32)
    sum_dyx = tl.zeros((BN, BC, BL), tl.float32)
    for chunk in range(0, L, BL):
        at, mask = positions(chunk, L, rows, BL)
        where = place(n, c, at, C, L, LAST)
        x = tl.load(x_ptr + where, mask=mask, other=0).to(tl.float32) - pivot[:, :, None]
        dy = _gradient_before_relu(dy_ptr, y_ptr, where, mask)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + where, dy.to(dresidual_ptr.dtype.element_ty), mask=mask)
        sum_dy += dy
        sum_dyx += tl.where(mask, dy * x, 0.0)
    where = sum_ptr + from_sample * C + c[None, :]
    tl.store(where, tl.sum(sum_dy, 2), mask=rows)
    tl.store(where + N * C, tl.sum(sum_dyx, 2), mask=rows)


@triton.jit
def row(table_ptr, n, c, rows, N, C, degrees):
    """Load the mean of each row, and its variance for these degrees of freedom, from the table of `moments`."""
    where = table_ptr + n.to(tl.int64)[:, None] * C + c[None, :]
    return tl.load(where, mask=rows, other=0.0), tl.load(where + N * C, mask=rows, other=0.0) / degrees


@triton.jit
def channel_moments(table_ptr, c, exists, N, C, degrees, BN: tl.constexpr, BC: tl.constexpr):
    """Return the moments of some channels; the variance is the mean of row variances plus the variance of row means."""
    total = tl.zeros((BN, BC), tl.float64)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        row_mean, _ = row(table_ptr, n, c, (n < N)[:, None] & exists[None, :], N, C, degrees)
        total += row_mean
    mean = tl.sum(total, 0) / N
    spread = tl.zeros((BN, BC), tl.float64)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        rows = (n < N)[:, None] & exists[None, :]
        row_mean, row_var = row(table_ptr, n, c, rows, N, C, degrees)
        off = tl.where(rows, row_mean - mean[None, :], 0.0)
        spread += row_var + off * off
    return mean, tl.sum(spread, 0) / N


@triton.jit
def write_scaled(
    x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, split, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """``y = scale * (x - pivot) + offset`` over one chunk of positions; tables are (BN, BC), or (1, BC).

    Then the residual is added, if there is one, and ReLU applied, if ``RELU``.
    """
    at, mask = positions(split * BL, L, rows, BL)
    where = place(n, c, at, C, L, LAST)
    x = tl.load(x_ptr + where, mask=mask, other=0).to(tl.float32) - pivot[:, :, None]
    y = x * scale[:, :, None] + offset[:, :, None]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + where, mask=mask, other=0).to(tl.float32)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps NaN
    tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_gradient(
    x_ptr, dy_ptr, y_ptr, dx_ptr, pivot, p, q, t, n, c, rows, split, C, L, LAST: tl.constexpr, BL: tl.constexpr
):  # fmt: skip
    """``dx = p * dy + q * (x - pivot) + t`` over one chunk of positions; tables as above, ``y_ptr`` as in `sums`."""
    at, mask = positions(split * BL, L, rows, BL)
    where = place(n, c, at, C, L, LAST)
    x = tl.load(x_ptr + where, mask=mask, other=0).to(tl.float32) - pivot[:, :, None]
    dy = _gradient_before_relu(dy_ptr, y_ptr, where, mask)
    dx = dy * p[:, :, None] + (x * q[:, :, None] + t[:, :, None])
    tl.store(dx_ptr + where, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def parameter(parameter_ptr, c, exists):
    return tl.load(parameter_ptr + c, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def number_argument(value_ptr, value):
    """Return a number that is either on the device or a launch argument: (1,), float64."""
    number = tl.zeros((1,), tl.float64)
    if value_ptr is not None:
        number += tl.load(value_ptr).to(tl.float64)
    else:
        number += value
    return number


@triton.jit
def lerped(old, new, weight):
    """As torch.lerp: interpolates from the nearer end, so that a weight of 1 gives exactly the new value."""
    return tl.where(weight < 0.5, old + weight * (new - old), new - (new - old) * (1.0 - weight))
