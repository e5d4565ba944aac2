"""Kernels of batch renorm: moments, r and d of each channel, the output; sums and gradient of the backward pass.

Mean, standard deviation, r and d of each channel are stored for the backward pass: (C,) each, float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contnorm.kernels.triton.continual.tiles import shared_out
from contnorm.kernels.triton.row_moments_device import (
    channel_moments,
    lerped,
    number_argument,
    parameter,
    write_gradient,
    write_scaled,
)

__all__ = ["renorm_apply", "renorm_gradient", "renorm_limits", "renorm_moments", "renorm_sums"]


@triton.jit
def _clipped(value, low, high):
    """Clip a value; NaN stays NaN."""
    value = tl.where(value < low, low, value)
    return tl.where(value > high, high, value)


@triton.jit
def _store_saved(saved_ptr, c, exists, C, mean, std, r, d):
    tl.store(saved_ptr + c, mean, mask=exists)
    tl.store(saved_ptr + C + c, std, mask=exists)
    tl.store(saved_ptr + 2 * C + c, r, mask=exists)
    tl.store(saved_ptr + 3 * C + c, d, mask=exists)


@triton.jit
def _load_saved(saved_ptr, c, exists, C):
    """Return for each channel: pivot, mean minus pivot, standard deviation, r and d."""
    mean = tl.load(saved_ptr + c, mask=exists, other=0.0)
    std = tl.load(saved_ptr + C + c, mask=exists, other=1.0).to(tl.float32)
    r = tl.load(saved_ptr + 2 * C + c, mask=exists, other=1.0).to(tl.float32)
    d = tl.load(saved_ptr + 3 * C + c, mask=exists, other=0.0).to(tl.float32)
    pivot = mean.to(tl.float32)
    return pivot, (mean - pivot.to(tl.float64)).to(tl.float32), std, r, d


@triton.jit(do_not_specialize=["N"])
def renorm_moments(
    table_ptr, saved_ptr, run_mean_ptr, run_var_ptr, momentum_ptr, momentum, r_max_ptr, r_max, d_max_ptr, d_max,
    N, C, L, BN: tl.constexpr, BC: tl.constexpr, UPDATE: tl.constexpr,
):  # fmt: skip
    """Compute moments, r and d of some channels from the old running moments, which are updated with ``UPDATE``."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    exists = c < C
    mean, var = channel_moments(table_ptr, c, exists, N, C, L, BN, BC)
    std = tl.sqrt(var)
    r = tl.zeros_like(mean) + 1.0
    d = tl.zeros_like(mean)
    if run_mean_ptr is not None:
        old_mean = tl.load(run_mean_ptr + c, mask=exists, other=0.0).to(tl.float64)
        old_std = tl.sqrt(tl.load(run_var_ptr + c, mask=exists, other=1.0).to(tl.float64))
        floor = tl.where(
            old_std < 1.1754943508222875e-38, 1.1754943508222875e-38, old_std
        )  # the smallest normal float32
        top = number_argument(r_max_ptr, r_max)
        reach = number_argument(d_max_ptr, d_max)
        r = _clipped(std / floor, 1.0 / top, top)
        d = _clipped((mean - old_mean) / floor, -reach, reach)
    _store_saved(saved_ptr, c, exists, C, mean, std, r, d)  # before the update: r and d use the old moments
    if UPDATE:
        weight = number_argument(momentum_ptr, momentum)
        moved = lerped(old_mean, mean, weight).to(tl.float32)
        tl.store(run_mean_ptr + c, moved.to(run_mean_ptr.dtype.element_ty), mask=exists)
        spread = lerped(old_std, std, weight)  # the average of standard deviations, stored squared
        moved = (spread * spread).to(tl.float32)
        tl.store(run_var_ptr + c, moved.to(run_var_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["N", "blocks", "splits"])
def renorm_apply(
    x_ptr, residual_ptr, y_ptr, saved_ptr, run_mean_ptr, run_var_ptr, weight_ptr, bias_ptr, eps,
    N, C, L, blocks, splits,
    BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, LAST: tl.constexpr, TRAIN: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Write the output from the stored values or, in evaluation, from the running moments, which are then stored."""
    split, c, _, exists, n, rows = shared_out(tl.program_id(0), blocks, splits, N, C, 1, 1, BN, BC, False)
    if TRAIN:
        pivot, off, std, r, d = _load_saved(saved_ptr, c, exists, C)
    else:
        mean = tl.load(run_mean_ptr + c, mask=exists, other=0.0).to(tl.float64)
        pivot = mean.to(tl.float32)
        off = tl.zeros_like(pivot)  # running moments are float32 at most
        std = tl.sqrt(tl.load(run_var_ptr + c, mask=exists, other=1.0).to(tl.float32))
        r = off + 1.0
        d = off
        if tl.program_id(0) < blocks:
            _store_saved(saved_ptr, c, exists, C, mean, std.to(tl.float64), r.to(tl.float64), d.to(tl.float64))
    scale = r / (std + eps)
    offset = d - off * scale
    if weight_ptr is not None:
        weight = parameter(weight_ptr, c, exists)
        scale = scale * weight
        offset = offset * weight
    if bias_ptr is not None:
        offset += parameter(bias_ptr, c, exists)
    write_scaled(
        x_ptr, residual_ptr, y_ptr, pivot[None, :], scale[None, :], offset[None, :], n, c, rows, split, C, L,
        LAST, BL, RELU,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def renorm_sums(
    saved_ptr, sum_ptr, back_ptr, dweight_ptr, dbias_ptr, eps, N, C, BN: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Sum dy and dy times (x minus mean) over the samples of some channels, (C,) each; store parameter gradients."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    exists = c < C
    all_dy = tl.zeros((BN, BC), tl.float64)
    all_dyx = tl.zeros((BN, BC), tl.float64)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        rows = (n < N)[:, None] & exists[None, :]
        where = sum_ptr + n.to(tl.int64)[:, None] * C + c[None, :]
        all_dy += tl.load(where, mask=rows, other=0.0).to(tl.float64)
        all_dyx += tl.load(where + N * C, mask=rows, other=0.0).to(tl.float64)
    _, off, std, r, d = _load_saved(saved_ptr, c, exists, C)
    sum_dy = tl.sum(all_dy, 0)
    against = tl.sum(all_dyx, 0) - off * sum_dy
    tl.store(back_ptr + c, sum_dy, mask=exists)
    tl.store(back_ptr + C + c, against, mask=exists)
    if dweight_ptr is not None:
        dweight = (r / (std + eps) * against + d * sum_dy).to(tl.float32)
        tl.store(dweight_ptr + c, dweight.to(dweight_ptr.dtype.element_ty), mask=exists)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + c, sum_dy.to(tl.float32).to(dbias_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["N", "blocks", "splits"])
def renorm_gradient(
    x_ptr, dy_ptr, y_ptr, dx_ptr, saved_ptr, back_ptr, weight_ptr, eps, N, C, L, blocks, splits,
    BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, LAST: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the input; no gradient flows through r, d and the running moments."""
    split, c, _, exists, n, rows = shared_out(tl.program_id(0), blocks, splits, N, C, 1, 1, BN, BC, False)
    pivot, off, std, r, _ = _load_saved(saved_ptr, c, exists, C)
    rstd = 1.0 / (std + eps)
    p = r * rstd
    if weight_ptr is not None:
        p = p * parameter(weight_ptr, c, exists)
    q = tl.zeros_like(p)
    t = tl.zeros_like(p)
    if TRAIN:
        sum_dy = tl.load(back_ptr + c, mask=exists, other=0.0).to(tl.float32)
        against = tl.load(back_ptr + C + c, mask=exists, other=0.0).to(tl.float32)
        # In a constant channel, the gradient of the standard deviation is taken as zero.
        slope = tl.where(std == 0.0, 0.0, against / tl.where(std == 0.0, 1.0, std))
        q = -p * rstd * slope / N / L
        t = -p * sum_dy / N / L - q * off
    write_gradient(
        x_ptr, dy_ptr, y_ptr, dx_ptr, pivot[None, :], p[None, :], q[None, :], t[None, :], n, c, rows, split, C, L,
        LAST, BL,
    )  # fmt: skip


@triton.jit
def renorm_limits(counter_ptr, r_ptr, d_ptr, r_max, d_max, r_start, r_length, d_start, d_length):
    """Compute the limits of r and d from the batch counter and their ramps."""
    seen = tl.load(counter_ptr).to(tl.float32)
    r_part = _clipped(tl.div_rn(seen - r_start, r_length * 1.0), 0.0, 1.0)
    d_part = _clipped(tl.div_rn(seen - d_start, d_length * 1.0), 0.0, 1.0)
    tl.store(r_ptr, 1.0 + (r_max - 1.0) * r_part)
    tl.store(d_ptr, d_max * d_part)
