"""Backward kernels, in one, two or three launches as the forward ones: sums per row, tables, gradient.

Each row needs two sums, of dy and of dy times (x minus its pivot). The rest is small tables and
``dx = P * dy + Q * x + R``. With a ReLU, dy is masked when it is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contnorm.kernels.triton.tiles import (
    arrive,
    channel_tables,
    full_end,
    group_sum,
    in_order,
    lanes,
    load_chunks,
    load_groups,
    load_partials,
    load_program,
    load_rows,
    masked_gradient,
    moments_and_tables,
    place,
    positions,
    scale_and_offset,
    shared_out,
    slab_pivot,
    split_range,
    store_groups,
    store_partial,
    store_split,
    wait,
    with_activation,
)


@triton.jit
def _both(
    x_ptr, dy_ptr, y_ptr, pivot, scale, offset, where, mask, RELU: tl.constexpr
):  # fmt: skip
    """Load a tile of x minus its pivot, and of dy masked by the ReLU."""
    x = tl.load(x_ptr + where, mask=mask, other=0).to(tl.float32) - pivot[:, :, None]
    return x, masked_gradient(dy_ptr, y_ptr, x, scale, offset, where, mask, RELU)


@triton.jit
def _with_chunk(
    sum_dy, sum_dyx, x_ptr, dy_ptr, y_ptr, pivot, scale, offset, n, c, rows, chunk, stop, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Return the sums of each lane with the values of one more chunk."""
    at, mask = positions(chunk, stop, rows, BL, FULL)
    where = place(n, c, at, C, L, LAST)
    x, dy = _both(x_ptr, dy_ptr, y_ptr, pivot, scale, offset, where, mask, RELU)
    return sum_dy + tl.where(mask, dy, 0.0), sum_dyx + tl.where(mask, dy * x, 0.0)


@triton.jit
def _row_sums(
    x_ptr, dy_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L,
    LAST: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr,
    FULL: tl.constexpr = False, STAGES: tl.constexpr = 1,
):  # fmt: skip
    """Return the sums of dy and of dy times x of each row between two positions; per lane, then across lanes."""
    sum_dy = tl.zeros((BN, BC, BL), tl.float32)
    sum_dyx = tl.zeros((BN, BC, BL), tl.float32)
    end = full_end(start, stop, BL, FULL)
    for chunk in tl.range(start, end, BL, num_stages=STAGES):
        sum_dy, sum_dyx = _with_chunk(
            sum_dy, sum_dyx, x_ptr, dy_ptr, y_ptr, pivot, scale, offset, n, c, rows, chunk, stop, C, L,
            LAST, BL, RELU, FULL > 0,
        )  # fmt: skip
    if FULL == 2:
        if end < stop:
            sum_dy, sum_dyx = _with_chunk(
                sum_dy, sum_dyx, x_ptr, dy_ptr, y_ptr, pivot, scale, offset, n, c, rows, end, stop, C, L,
                LAST, BL, RELU, False,
            )  # fmt: skip
    return tl.sum(sum_dy, 2), tl.sum(sum_dyx, 2)


@triton.jit
def _merged_sums(part_ptr, n, c, rows, N, C, splits, SP: tl.constexpr):
    split = tl.arange(0, SP)
    there = (split < splits)[:, None, None] & rows[None, :, :]
    where = part_ptr + (split[:, None, None] * N + n.to(tl.int64)[None, :, None]) * C + c[None, None, :]
    sum_dy = tl.sum(tl.load(where, mask=there, other=0.0), 0)
    return sum_dy, tl.sum(tl.load(where + splits * N * C, mask=there, other=0.0), 0)


@triton.jit
def slab_sums(
    sum_dy, against, row_mean, row_square, mean, rstd, gain, d_weight, d_bias, rows, N, L,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Return two averages over each slab, which the group step subtracts: of the gradient, and of gradient x signal."""
    slope = (rstd * d_weight / N)[None, :]
    share = (d_bias / N)[None, :]
    t1 = gain[None, :] * (sum_dy - share - slope * (row_mean - mean[None, :]))
    t2 = gain[None, :] * (against - row_mean * share - slope * (row_square - mean[None, :] * row_mean))
    s1 = group_sum(tl.where(rows, t1, 0.0), BN, BC, KP) / K / L
    s2 = group_sum(tl.where(rows, t2, 0.0), BN, BC, KP) / K / L
    return s1, s2


@triton.jit
def coefficients(group_mean, group_rstd, mean, rstd, gain, d_weight, d_bias, s1, s2, N, L):
    """Return P, Q and R of each row."""
    slope = gain * rstd * d_weight / N / L
    level = gain * (rstd * mean * d_weight - d_bias) / N / L
    q = -group_rstd * (slope[None, :] + s2)
    rest = group_rstd * (level[None, :] - s1) - q * group_mean * group_rstd
    return group_rstd * gain[None, :], q * group_rstd, rest


@triton.jit
def store_gradient(dx_ptr, dr_ptr, x, dy, p, q, r, where, mask):
    dx = dy * p[:, :, None] + (x * q[:, :, None] + r[:, :, None])
    tl.store(dx_ptr + where, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dr_ptr is not None:
        tl.store(dr_ptr + where, dy.to(dr_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_chunk(
    x_ptr, dy_ptr, y_ptr, dx_ptr, dr_ptr, pivot, scale, offset, p, q, r, n, c, rows, chunk, stop, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    at, mask = positions(chunk, stop, rows, BL, FULL)
    where = place(n, c, at, C, L, LAST)
    x, dy = _both(x_ptr, dy_ptr, y_ptr, pivot, scale, offset, where, mask, RELU)
    store_gradient(dx_ptr, dr_ptr, x, dy, p, q, r, where, mask)


@triton.jit
def _write(
    x_ptr, dy_ptr, y_ptr, dx_ptr, dr_ptr, pivot, scale, offset, p, q, r, n, c, rows, start, stop, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr,
    FULL: tl.constexpr = False, STAGES: tl.constexpr = 1, REVERSE: tl.constexpr = True,
):  # fmt: skip
    end = full_end(start, stop, BL, FULL)
    chunks = (end - start + BL - 1) // BL
    if FULL == 2:
        if end < stop:
            _write_chunk(
                x_ptr, dy_ptr, y_ptr, dx_ptr, dr_ptr, pivot, scale, offset, p, q, r, n, c, rows, end, stop, C, L,
                LAST, BL, RELU, False,
            )  # fmt: skip
    for i in tl.range(chunks, num_stages=STAGES):
        chunk = start + in_order(i, chunks, REVERSE) * BL
        _write_chunk(
            x_ptr, dy_ptr, y_ptr, dx_ptr, dr_ptr, pivot, scale, offset, p, q, r, n, c, rows, chunk, stop,
            C, L, LAST, BL, RELU, FULL > 0,
        )  # fmt: skip


@triton.jit
def store_parameter_gradients(dweight_ptr, dbias_ptr, c, exists, d_weight, d_bias):
    tl.store(dweight_ptr + c, d_weight, mask=exists)
    tl.store(dbias_ptr + c, d_bias, mask=exists)


@triton.jit
def backward_one(
    x_ptr, dy_ptr, y_ptr, weight_ptr, bias_ptr, table_ptr,
    dx_ptr, dr_ptr, dweight_ptr, dbias_ptr, N, C, L, eps,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    LAST: tl.constexpr, SINGLE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Process a block of groups over all samples; with ``SINGLE``, x and dy are read once."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    c, group, exists = lanes(tl.program_id(0), C, K, KP, BC, True)
    n = tl.arange(0, BN)
    rows = (n < N)[:, None] & exists[None, :]
    pivot = slab_pivot(x_ptr, n, tl.program_id(0), group, rows, N, C, L, K, KP, BN, BC, LAST, True)
    group_mean, group_rstd = load_groups(table_ptr + 2 * N * C, n, group, rows, N, C, K)
    mean, rstd, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    if SINGLE:
        at, mask = positions(0, L, rows, BL)
        where = place(n, c, at, C, L, LAST)
        x, dy = _both(x_ptr, dy_ptr, y_ptr, pivot, scale, offset, where, mask, RELU)
        sum_dy = tl.sum(dy, 2)
        sum_dyx = tl.sum(tl.where(mask, dy * x, 0.0), 2)
    else:
        sum_dy, sum_dyx = _row_sums(
            x_ptr, dy_ptr, y_ptr, pivot, scale, offset, n, c, rows, 0, L, C, L, LAST, BN, BC, BL, RELU
        )
    against = (sum_dyx - group_mean * sum_dy) * group_rstd
    d_bias = tl.sum(sum_dy, 0)
    d_weight = rstd * (tl.sum(against, 0) - mean * d_bias)
    store_parameter_gradients(dweight_ptr, dbias_ptr, c, exists, d_weight, d_bias)
    row_mean, row_square = load_rows(table_ptr, n, c, rows, N, C)
    s1, s2 = slab_sums(
        sum_dy, against, row_mean, row_square, mean, rstd, gain, d_weight, d_bias, rows, N, L, K, KP, BN, BC
    )
    p, q, r = coefficients(group_mean, group_rstd, mean, rstd, gain, d_weight, d_bias, s1, s2, N, L)
    if SINGLE:
        store_gradient(dx_ptr, dr_ptr, x, dy, p, q, r, where, mask)
    else:
        _write(
            x_ptr, dy_ptr, y_ptr, dx_ptr, dr_ptr, pivot, scale, offset, p, q, r, n, c, rows, 0, L, C, L,
            LAST, BL, RELU,
        )  # fmt: skip


@triton.jit
def backward_rows(
    x_ptr, dy_ptr, y_ptr, weight_ptr, bias_ptr, table_ptr, part_ptr,
    N, C, L, eps, blocks, splits, span,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    LAST: tl.constexpr, WHOLE: tl.constexpr, RELU: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the two sums of each row in one split of its positions: (splits, N, C) each."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    program = tl.program_id(0)
    split, c, group, exists, n, rows = shared_out(program, blocks, splits, N, C, K, KP, BN, BC, WHOLE)
    pivot = slab_pivot(x_ptr, n, program % blocks, group, rows, N, C, L, K, KP, BN, BC, LAST, WHOLE)
    scale = pivot
    offset = pivot
    if RELU and y_ptr is None:
        group_mean, group_rstd = load_groups(table_ptr + 2 * N * C, n, group, rows, N, C, K)
        mean, _, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
        scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    start, stop = split_range(split, L, span)
    sum_dy, sum_dyx = _row_sums(
        x_ptr, dy_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L, LAST, BN, BC, BL, RELU, FULL, STAGES
    )
    store_split(part_ptr, split, splits, n, c, rows, N, C, sum_dy, sum_dyx)


@triton.jit
def _sums_of_rows(part_ptr, table_ptr, n, c, group, rows, N, C, splits, K: tl.constexpr, SP: tl.constexpr):
    """Return the sums of each row: of dy, and of dy times the group-normalized x."""
    sum_dy, sum_dyx = _merged_sums(part_ptr, n, c, rows, N, C, splits, SP)
    group_mean, group_rstd = load_groups(table_ptr + 2 * N * C, n, group, rows, N, C, K)
    return sum_dy, (sum_dyx - group_mean * sum_dy) * group_rstd


@triton.jit
def backward_tables(
    part_ptr, slab_ptr, weight_ptr, table_ptr, dweight_ptr, dbias_ptr, N, C, L, eps, splits,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SP: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Compute the parameter gradients, then the averages over each slab, (N, G) each.

    With ``SINGLE``, a program has all samples at once, and loads everything before its first sum; otherwise it reads
    the sums of all samples twice, in blocks.
    """
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    c, group, exists = lanes(tl.program_id(0), C, K, KP, BC, True)
    mean, rstd, gain, _ = channel_tables(mean_ptr, var_ptr, weight_ptr, None, c, exists, eps)
    d_bias = tl.zeros_like(mean)
    d_weight = tl.zeros_like(mean)
    if SINGLE:
        n = tl.arange(0, BN)
        rows = (n < N)[:, None] & exists[None, :]
        sum_dy, against = _sums_of_rows(part_ptr, table_ptr, n, c, group, rows, N, C, splits, K, SP)
        row_mean, row_square = load_rows(table_ptr, n, c, rows, N, C)
        d_bias = tl.sum(sum_dy, 0)
        d_weight = tl.sum(against, 0)
    else:
        for first in range(0, N, BN):
            n = first + tl.arange(0, BN)
            rows = (n < N)[:, None] & exists[None, :]
            sum_dy, against = _sums_of_rows(part_ptr, table_ptr, n, c, group, rows, N, C, splits, K, SP)
            d_bias += tl.sum(sum_dy, 0)
            d_weight += tl.sum(against, 0)
    d_weight = rstd * (d_weight - mean * d_bias)
    store_parameter_gradients(dweight_ptr, dbias_ptr, c, exists, d_weight, d_bias)
    if SINGLE:
        s1, s2 = slab_sums(
            sum_dy, against, row_mean, row_square, mean, rstd, gain, d_weight, d_bias, rows, N, L, K, KP, BN, BC
        )
        store_groups(slab_ptr, n, c, group, rows, N, C, s1, s2, K)
    else:
        for first in range(0, N, BN):
            n = first + tl.arange(0, BN)
            rows = (n < N)[:, None] & exists[None, :]
            sum_dy, against = _sums_of_rows(part_ptr, table_ptr, n, c, group, rows, N, C, splits, K, SP)
            row_mean, row_square = load_rows(table_ptr, n, c, rows, N, C)
            s1, s2 = slab_sums(
                sum_dy, against, row_mean, row_square, mean, rstd, gain, d_weight, d_bias, rows, N, L, K, KP, BN, BC
            )
            store_groups(slab_ptr, n, c, group, rows, N, C, s1, s2, K)


@triton.jit
def _parameter_gradients(sum_dy, sum_dyx, group_mean, group_rstd, mean, rstd):
    """Return the gradients of weight and bias, from the rows of all samples."""
    d_bias = tl.sum(sum_dy, 0)
    return rstd * (tl.sum((sum_dyx - group_mean * sum_dy) * group_rstd, 0) - mean * d_bias), d_bias


@triton.jit
def backward_apply(
    x_ptr, dy_ptr, y_ptr, weight_ptr, bias_ptr, table_ptr, part_ptr, slab_ptr,
    dx_ptr, dr_ptr, dweight_ptr, dbias_ptr, N, C, L, eps, blocks, splits, span,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, SP: tl.constexpr,
    NP: tl.constexpr, LAST: tl.constexpr, TABLES: tl.constexpr, RELU: tl.constexpr,
    FULL: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the gradient in one split of the positions of some samples; with ``TABLES``, first compute the tables."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    program = in_order(tl.program_id(0), tl.num_programs(0), REVERSE)
    split, c, group, exists, n, rows = shared_out(program, blocks, splits, N, C, K, KP, BN, BC, TABLES)
    pivot = slab_pivot(x_ptr, n, program % blocks, group, rows, N, C, L, K, KP, BN, BC, LAST, TABLES)
    group_mean, group_rstd = load_groups(table_ptr + 2 * N * C, n, group, rows, N, C, K)
    mean, rstd, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    if TABLES:
        sum_dy, sum_dyx = _merged_sums(part_ptr, n, c, rows, N, C, splits, SP)
        if BN == NP:
            d_weight, d_bias = _parameter_gradients(sum_dy, sum_dyx, group_mean, group_rstd, mean, rstd)
        else:
            every = tl.arange(0, NP)
            there = (every < N)[:, None] & exists[None, :]
            all_dy, all_dyx = _merged_sums(part_ptr, every, c, there, N, C, splits, SP)
            all_mean, all_rstd = load_groups(table_ptr + 2 * N * C, every, group, there, N, C, K)
            d_weight, d_bias = _parameter_gradients(all_dy, all_dyx, all_mean, all_rstd, mean, rstd)
        if program < blocks:
            store_parameter_gradients(dweight_ptr, dbias_ptr, c, exists, d_weight, d_bias)
        against = (sum_dyx - group_mean * sum_dy) * group_rstd
        row_mean, row_square = load_rows(table_ptr, n, c, rows, N, C)
        s1, s2 = slab_sums(
            sum_dy, against, row_mean, row_square, mean, rstd, gain, d_weight, d_bias, rows, N, L, K, KP, BN, BC
        )
    else:
        d_weight = tl.load(dweight_ptr + c, mask=exists, other=0.0)
        d_bias = tl.load(dbias_ptr + c, mask=exists, other=0.0)
        s1, s2 = load_groups(slab_ptr, n, group, rows, N, C, K)
    p, q, r = coefficients(group_mean, group_rstd, mean, rstd, gain, d_weight, d_bias, s1, s2, N, L)
    start, stop = split_range(split, L, span)
    _write(
        x_ptr, dy_ptr, y_ptr, dx_ptr, dr_ptr, pivot, scale, offset, p, q, r, n, c, rows, start, stop, C, L,
        LAST, BL, RELU, FULL, STAGES, REVERSE,
    )  # fmt: skip


# --- clusters ---------------------------------------------------------------------------------------------------


@triton.jit
def _masked(
    dys, xs, y_ptr, pivot, scale, offset, n, c, rows, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return the gradients before the ReLU; the sign is that of the saved output, or is recomputed."""
    masked = ()
    for i in tl.static_range(CHUNKS):
        at, mask = positions(i * BL, L, rows, BL)
        where = place(n, c, at, C, L, LAST)
        if y_ptr is not None:
            y = tl.load(y_ptr + where, mask=mask, other=0).to(tl.float32)
        else:
            x = xs[i].to(tl.float32) - pivot[:, :, None]
            y = with_activation(x, scale, offset, None, where, mask, False)
        masked = masked + (tl.where(y <= 0, 0.0, dys[i].to(tl.float32)).to(dys[i].dtype),)  # noqa: RUF005
    return masked


@triton.jit
def backward_cluster(
    x_ptr, dy_ptr, y_ptr, weight_ptr, bias_ptr, table_ptr, part_ptr, slab_ptr,
    dx_ptr, dr_ptr, dweight_ptr, dbias_ptr, N, C, L, eps, members,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, MP: tl.constexpr,
    LAST: tl.constexpr, CHUNKS: tl.constexpr, RELU: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Process a block of groups over some samples; ``slab_ptr`` has the sums of rows between two launches."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    _, member, c, group, exists, n, rows, pivot, xs = load_program(
        x_ptr, members, N, C, L, K, KP, BN, BC, BL, LAST, CHUNKS
    )
    dys = load_chunks(dy_ptr, n, c, rows, 0, L, C, L, LAST, BL, CHUNKS)
    group_mean, group_rstd = load_groups(table_ptr + 2 * N * C, n, group, rows, N, C, K)
    mean, rstd, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    if RELU:
        dys = _masked(dys, xs, y_ptr, pivot, scale, offset, n, c, rows, C, L, LAST, BL, CHUNKS)
    if PHASE == 2:
        sum_dy, against = load_rows(slab_ptr, n, c, rows, N, C)
    else:
        lane_dy = tl.zeros((BN, BC, BL), tl.float32)
        lane_dyx = tl.zeros((BN, BC, BL), tl.float32)
        for i in tl.static_range(CHUNKS):
            _, mask = positions(i * BL, L, rows, BL)
            dy = dys[i].to(tl.float32)
            lane_dy += tl.where(mask, dy, 0.0)
            lane_dyx += tl.where(mask, dy * (xs[i].to(tl.float32) - pivot[:, :, None]), 0.0)
        sum_dy = tl.sum(lane_dy, 2)
        sum_dyx = tl.sum(lane_dyx, 2)
        against = (sum_dyx - group_mean * sum_dy) * group_rstd
        store_partial(part_ptr, member, members, c, exists, C, tl.sum(sum_dy, 0), tl.sum(against, 0))
        if PHASE == 1:
            store_split(slab_ptr, 0, 1, n, c, rows, N, C, sum_dy, against)
    if PHASE == 0:
        arrive()
    if PHASE != 1:
        row_mean, row_square = load_rows(table_ptr, n, c, rows, N, C)
        if PHASE == 0:
            wait()
        _, of_bias, of_weight = load_partials(part_ptr, members, c, exists, C, MP)
        d_bias = tl.sum(of_bias, 0)
        d_weight = rstd * (tl.sum(of_weight, 0) - mean * d_bias)
        s1, s2 = slab_sums(
            sum_dy, against, row_mean, row_square, mean, rstd, gain, d_weight, d_bias, rows, N, L, K, KP, BN, BC
        )
        p, q, r = coefficients(group_mean, group_rstd, mean, rstd, gain, d_weight, d_bias, s1, s2, N, L)
        for i in tl.static_range(CHUNKS):
            at, mask = positions(i * BL, L, rows, BL)
            x = xs[i].to(tl.float32) - pivot[:, :, None]
            store_gradient(dx_ptr, dr_ptr, x, dys[i].to(tl.float32), p, q, r, place(n, c, at, C, L, LAST), mask)
        if member == 0:
            store_parameter_gradients(dweight_ptr, dbias_ptr, c, exists, d_weight, d_bias)
