"""Kernels of switchable norm: moments of samples and channels, the output; sums and gradient of the backward pass.

One table holds all moments, in this order: mean and sum of squared deviations of each row, (N, C) each; mean and
variance of each sample (layer), (N,) each; mean and variance of each channel (batch), (C,) each. In backward, another
table holds eight sums over the channels of each sample, (N,) each, then two sums over the samples of each channel, (C,)
each.

Every program recomputes the mixture of the three moments, which is faster than a separate launch for a table of it.
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
    row,
    write_gradient,
    write_scaled,
)

__all__ = ["switch_apply", "switch_gradient", "switch_moments", "switch_sums"]


# --- loads --------------------------------------------------------------------------------------------------------


@triton.jit
def _shares(logits_ptr):
    """Return the softmax of three logits."""
    instance = tl.load(logits_ptr).to(tl.float32)
    layer = tl.load(logits_ptr + 1).to(tl.float32)
    batch = tl.load(logits_ptr + 2).to(tl.float32)
    top = tl.maximum(instance, tl.maximum(layer, batch))
    instance = tl.exp(instance - top)
    layer = tl.exp(layer - top)
    batch = tl.exp(batch - top)
    total = instance + layer + batch
    return instance / total, layer / total, batch / total


@triton.jit
def _means(table_ptr, n, c, exists, rows, N, C):
    """Return the pivot of each row, and the difference of its mean to the pivot, the layer mean and the batch mean."""
    mean = tl.load(table_ptr + n.to(tl.int64)[:, None] * C + c[None, :], mask=rows, other=0.0)
    layer = tl.load(table_ptr + 2 * N * C + n, mask=n < N, other=0.0)[:, None]
    batch = tl.load(table_ptr + 2 * N * C + 2 * N + c, mask=exists, other=0.0)[None, :]
    pivot = mean.to(tl.float32)
    off = (mean - pivot.to(tl.float64)).to(tl.float32)
    return pivot, off, (mean - layer).to(tl.float32), (mean - batch).to(tl.float32)


@triton.jit
def _variances(table_ptr, n, c, exists, rows, N, C, L):
    """Return the variances of each row, its layer and its batch."""
    square = tl.load(table_ptr + N * C + n.to(tl.int64)[:, None] * C + c[None, :], mask=rows, other=0.0)
    layer = tl.load(table_ptr + 2 * N * C + N + n, mask=n < N, other=0.0)[:, None]
    batch = tl.load(table_ptr + 2 * N * C + 2 * N + C + c, mask=exists, other=0.0)[None, :]
    return square.to(tl.float32) / (L - 1), layer.to(tl.float32), batch.to(tl.float32)


@triton.jit
def _mixed(table_ptr, mean_weight_ptr, var_weight_ptr, eps, n, c, exists, rows, N, C, L):
    """Return for each row: pivot, difference of its mean to the pivot and to the mixed mean, mixed variance, rstd.

    The mixture weights sum to one, so the mixture can be computed from differences, without loss of precision at large
    means.
    """
    pivot, off, off_layer, off_batch = _means(table_ptr, n, c, exists, rows, N, C)
    row_var, layer_var, batch_var = _variances(table_ptr, n, c, exists, rows, N, C, L)
    _, w1, w2 = _shares(mean_weight_ptr)
    u0, u1, u2 = _shares(var_weight_ptr)
    off_mixed = w1 * off_layer + w2 * off_batch
    var = tl.where(rows, u0 * row_var + u1 * layer_var + u2 * batch_var, 1.0)  # avoids division by zero in masked lanes
    return pivot, off, off_mixed, var, tl.rsqrt(var + eps)


@triton.jit
def _gain(weight_ptr, c, exists, rstd):
    gain = rstd
    if weight_ptr is not None:
        gain = rstd * parameter(weight_ptr, c, exists)[None, :]
    return gain


# --- forward ------------------------------------------------------------------------------------------------------


@triton.jit
def _sample_moments(table_ptr, n, N, C, L, BT: tl.constexpr):
    """Compute the layer moments of one sample: the variance is the mean of variances plus the variance of means."""
    total = tl.zeros((1, BT), tl.float64)
    for first in range(0, C, BT):
        c = first + tl.arange(0, BT)
        row_mean, _ = row(table_ptr, n, c, (c < C)[None, :], N, C, L - 1)
        total += row_mean
    mean = tl.sum(total, 1) / C
    spread = tl.zeros((1, BT), tl.float64)
    for first in range(0, C, BT):
        c = first + tl.arange(0, BT)
        rows = (c < C)[None, :]
        row_mean, row_var = row(table_ptr, n, c, rows, N, C, L - 1)
        off = tl.where(rows, row_mean - mean[:, None], 0.0)
        spread += row_var + off * off
    where = table_ptr + 2 * N * C + n
    tl.store(where, mean)
    tl.store(where + N, tl.sum(spread, 1) / C)


@triton.jit
def _batch_branch(
    table_ptr, run_mean_ptr, run_var_ptr, momentum_ptr, momentum, block, N, C, L,
    BN: tl.constexpr, BC: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Compute the batch moments of some channels and update the running ones; in evaluation, copy the running ones."""
    c = block * BC + tl.arange(0, BC)
    exists = c < C
    if TRAIN:
        mean, var = channel_moments(table_ptr, c, exists, N, C, L - 1, BN, BC)
        if run_mean_ptr is not None:
            weight = number_argument(momentum_ptr, momentum)
            old = tl.load(run_mean_ptr + c, mask=exists, other=0.0).to(tl.float64)
            moved = lerped(old, mean, weight).to(tl.float32)
            tl.store(run_mean_ptr + c, moved.to(run_mean_ptr.dtype.element_ty), mask=exists)
            old = tl.load(run_var_ptr + c, mask=exists, other=0.0).to(tl.float64)
            moved = lerped(old, var, weight).to(tl.float32)
            tl.store(run_var_ptr + c, moved.to(run_var_ptr.dtype.element_ty), mask=exists)
    else:
        mean = tl.load(run_mean_ptr + c, mask=exists, other=0.0).to(tl.float64)
        var = tl.load(run_var_ptr + c, mask=exists, other=0.0).to(tl.float64)
    where = table_ptr + 2 * N * C + 2 * N + c
    tl.store(where, mean, mask=exists)
    tl.store(where + C, var, mask=exists)


@triton.jit(do_not_specialize=["N"])
def switch_moments(
    table_ptr, run_mean_ptr, run_var_ptr, momentum_ptr, momentum, N, C, L,
    BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Compute layer moments (first N programs, one sample each) and batch moments (the others, some channels each)."""
    program = tl.program_id(0)
    if program < N:
        _sample_moments(table_ptr, program + tl.arange(0, 1), N, C, L, BT)
    else:
        _batch_branch(
            table_ptr, run_mean_ptr, run_var_ptr, momentum_ptr, momentum, program - N, N, C, L, BN, BC, TRAIN
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "blocks", "splits"])
def switch_apply(
    x_ptr, residual_ptr, y_ptr, table_ptr, weight_ptr, bias_ptr, mean_weight_ptr, var_weight_ptr, eps,
    N, C, L, blocks, splits,
    BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, LAST: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    split, c, _, exists, n, rows = shared_out(tl.program_id(0), blocks, splits, N, C, 1, 1, BN, BC, False)
    pivot, off, off_mixed, _, rstd = _mixed(
        table_ptr, mean_weight_ptr, var_weight_ptr, eps, n, c, exists, rows, N, C, L
    )
    gain = _gain(weight_ptr, c, exists, rstd)
    offset = (off_mixed - off) * gain
    if bias_ptr is not None:
        offset += parameter(bias_ptr, c, exists)[None, :]
    write_scaled(x_ptr, residual_ptr, y_ptr, pivot, gain, offset, n, c, rows, split, C, L, LAST, BL, RELU)


# --- backward -----------------------------------------------------------------------------------------------------


@triton.jit
def _pulls(
    table_ptr, sum_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, eps, n, c, exists, rows, N, C, L
):  # fmt: skip
    """Return for each row: the sums of dy and of dy times the normalized value; the gradients of its mixed mean and
    variance; the results of `_mixed` except rstd, and the gain."""
    pivot, off, off_mixed, var, rstd = _mixed(
        table_ptr, mean_weight_ptr, var_weight_ptr, eps, n, c, exists, rows, N, C, L
    )
    where = sum_ptr + n.to(tl.int64)[:, None] * C + c[None, :]
    sum_dy = tl.load(where, mask=rows, other=0.0)
    against = (tl.load(where + N * C, mask=rows, other=0.0) + (off_mixed - off) * sum_dy) * rstd
    gain = _gain(weight_ptr, c, exists, rstd)
    to_mean = -gain * sum_dy
    to_var = -0.5 * gain * rstd * against
    return sum_dy, against, to_mean, to_var, pivot, off, off_mixed, var, gain


@triton.jit
def _sums_of_sample(
    table_ptr, sum_ptr, back_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, eps, n, N, C, L, BT: tl.constexpr
):  # fmt: skip
    """Sum over the channels of one sample: the gradients of its layer moments, and its part of the logit gradients.

    The gradient of a logit is its softmax weight times the sum of gradient times (its moment minus the mixture). This
    is a difference, which stays accurate at large means.
    """
    to_mean = tl.zeros((1, BT), tl.float64)
    to_var = tl.zeros((1, BT), tl.float64)
    m0 = tl.zeros((1, BT), tl.float64)
    m1 = tl.zeros((1, BT), tl.float64)
    m2 = tl.zeros((1, BT), tl.float64)
    v0 = tl.zeros((1, BT), tl.float64)
    v1 = tl.zeros((1, BT), tl.float64)
    v2 = tl.zeros((1, BT), tl.float64)
    for first in range(0, C, BT):
        c = first + tl.arange(0, BT)
        exists = c < C
        rows = exists[None, :]
        _, _, pull_mean, pull_var, _, _, off_mixed, var, _ = _pulls(
            table_ptr, sum_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, eps, n, c, exists, rows, N, C, L
        )
        _, _, off_layer, off_batch = _means(table_ptr, n, c, exists, rows, N, C)
        row_var, layer_var, batch_var = _variances(table_ptr, n, c, exists, rows, N, C, L)
        to_mean += pull_mean
        to_var += pull_var
        m0 += pull_mean * off_mixed
        m1 += pull_mean * (off_mixed - off_layer)
        m2 += pull_mean * (off_mixed - off_batch)
        v0 += pull_var * (row_var - var)
        v1 += pull_var * (layer_var - var)
        v2 += pull_var * (batch_var - var)
    where = back_ptr + n
    tl.store(where, tl.sum(to_mean, 1))
    tl.store(where + N, tl.sum(to_var, 1))
    tl.store(where + 2 * N, tl.sum(m0, 1))
    tl.store(where + 3 * N, tl.sum(m1, 1))
    tl.store(where + 4 * N, tl.sum(m2, 1))
    tl.store(where + 5 * N, tl.sum(v0, 1))
    tl.store(where + 6 * N, tl.sum(v1, 1))
    tl.store(where + 7 * N, tl.sum(v2, 1))


@triton.jit
def _sums_of_channels(
    table_ptr, sum_ptr, back_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, dweight_ptr, dbias_ptr, eps, block,
    N, C, L, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sum over the samples of some channels: the gradients of their batch moments, and of weight and bias."""
    c = block * BC + tl.arange(0, BC)
    exists = c < C
    to_mean = tl.zeros((BN, BC), tl.float64)
    to_var = tl.zeros((BN, BC), tl.float64)
    d_weight = tl.zeros((BN, BC), tl.float64)
    d_bias = tl.zeros((BN, BC), tl.float64)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        rows = (n < N)[:, None] & exists[None, :]
        sum_dy, normalized, pull_mean, pull_var, _, _, _, _, _ = _pulls(
            table_ptr, sum_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, eps, n, c, exists, rows, N, C, L
        )
        to_mean += pull_mean
        to_var += pull_var
        d_weight += normalized
        d_bias += sum_dy
    where = back_ptr + 8 * N + c
    tl.store(where, tl.sum(to_mean, 0), mask=exists)
    tl.store(where + C, tl.sum(to_var, 0), mask=exists)
    if dweight_ptr is not None:
        dweight = tl.sum(d_weight, 0).to(tl.float32)
        tl.store(dweight_ptr + c, dweight.to(dweight_ptr.dtype.element_ty), mask=exists)
    if dbias_ptr is not None:
        dbias = tl.sum(d_bias, 0).to(tl.float32)
        tl.store(dbias_ptr + c, dbias.to(dbias_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["N"])
def switch_sums(
    table_ptr, sum_ptr, back_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, dweight_ptr, dbias_ptr, eps, N, C, L,
    BN: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute the sums of samples and channels, with programs assigned as in `switch_moments`."""
    program = tl.program_id(0)
    if program < N:
        _sums_of_sample(
            table_ptr, sum_ptr, back_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, eps,
            program + tl.arange(0, 1), N, C, L, BT,
        )  # fmt: skip
    else:
        _sums_of_channels(
            table_ptr, sum_ptr, back_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, dweight_ptr, dbias_ptr, eps,
            program - N, N, C, L, BN, BC,
        )  # fmt: skip


@triton.jit
def _logit(back_ptr, d_ptr, share, N, BT: tl.constexpr):
    total = tl.zeros((BT,), tl.float64)
    for first in range(0, N, BT):
        n = first + tl.arange(0, BT)
        total += tl.load(back_ptr + n, mask=n < N, other=0.0)
    tl.store(d_ptr, (share * tl.sum(total, 0)).to(tl.float32).to(d_ptr.dtype.element_ty))


@triton.jit
def _logits(back_ptr, mean_weight_ptr, var_weight_ptr, dmean_ptr, dvar_ptr, N, BT: tl.constexpr):
    """Compute the gradients of both vectors of logits, from the sums of all samples."""
    w0, w1, w2 = _shares(mean_weight_ptr)
    _logit(back_ptr + 2 * N, dmean_ptr, w0, N, BT)
    _logit(back_ptr + 3 * N, dmean_ptr + 1, w1, N, BT)
    _logit(back_ptr + 4 * N, dmean_ptr + 2, w2, N, BT)
    u0, u1, u2 = _shares(var_weight_ptr)
    _logit(back_ptr + 5 * N, dvar_ptr, u0, N, BT)
    _logit(back_ptr + 6 * N, dvar_ptr + 1, u1, N, BT)
    _logit(back_ptr + 7 * N, dvar_ptr + 2, u2, N, BT)


@triton.jit(do_not_specialize=["N", "blocks", "splits"])
def switch_gradient(
    x_ptr, dy_ptr, y_ptr, dx_ptr, table_ptr, sum_ptr, back_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr,
    dmean_ptr, dvar_ptr, eps, N, C, L, blocks, splits,
    BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, BT: tl.constexpr, LAST: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the input; the first program also computes the gradients of the logits."""
    split, c, _, exists, n, rows = shared_out(tl.program_id(0), blocks, splits, N, C, 1, 1, BN, BC, False)
    _, _, pull_mean, pull_var, pivot, off, _, _, gain = _pulls(
        table_ptr, sum_ptr, weight_ptr, mean_weight_ptr, var_weight_ptr, eps, n, c, exists, rows, N, C, L
    )
    _, _, off_layer, off_batch = _means(table_ptr, n, c, exists, rows, N, C)
    w0, w1, w2 = _shares(mean_weight_ptr)
    u0, u1, u2 = _shares(var_weight_ptr)
    layer_pull = tl.load(back_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None] * w1
    layer_var_pull = tl.load(back_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None] * u1
    to_mean = w0 * pull_mean + (layer_pull + 2.0 * layer_var_pull * off_layer) / C
    to_var = u0 * pull_var + layer_var_pull / C
    if TRAIN:
        where = back_ptr + 8 * N + c
        batch_pull = tl.load(where, mask=exists, other=0.0).to(tl.float32)[None, :] * w2
        batch_var_pull = tl.load(where + C, mask=exists, other=0.0).to(tl.float32)[None, :] * u2
        to_mean += (batch_pull + 2.0 * batch_var_pull * off_batch) / N
        to_var += batch_var_pull / N
    q = 2.0 * to_var / (L - 1)
    t = to_mean / L - q * off
    write_gradient(x_ptr, dy_ptr, y_ptr, dx_ptr, pivot, gain, q, t, n, c, rows, split, C, L, LAST, BL)
    if tl.program_id(0) == 0:
        _logits(back_ptr, mean_weight_ptr, var_weight_ptr, dmean_ptr, dvar_ptr, N, BT)
