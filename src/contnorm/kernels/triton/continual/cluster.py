"""Kernels of one launch, in which several programs share a block of channels and exchange partial sums.

These programs form a thread block cluster: the GPU runs them at the same time, and a barrier of the hardware makes all
of them wait for each other. In training, each program processes the samples of one part of the batch, with all
positions: the tables of its groups need no other program, and the moments of the batch (in the backward pass, the
gradients of weight and bias) are merged from one partial result per program. In evaluation, each program processes a
part of the positions of some samples, and the moments of rows are merged; without ``CHUNKS``, it reads them twice.

Without clusters (other GPUs, Triton's interpreter), the same code runs in two launches: ``PHASE`` 1 up to the barrier
and 2 from there; 0 is both. The values of a program stay in registers, in ``CHUNKS`` chunks. Small chunks of many
samples are better than one large chunk: if a warp has all lanes of a row, its sum needs no barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contnorm.kernels.triton.continual.backward import (
    coefficients,
    load_groups,
    load_rows,
    slab_sums,
    store_gradient,
    store_parameter_gradients,
)
from contnorm.kernels.triton.continual.forward import (
    gain_of,
    load_affine,
    load_running,
    row_moments,
    store_channels,
    store_groups,
    store_rows,
    write_output,
)
from contnorm.kernels.triton.continual.tiles import (
    channel_tables,
    lanes,
    merged_moments,
    moments_and_tables,
    place,
    positions,
    scale_and_offset,
    slab_pivot,
    split_range,
    tables_from_moments,
    with_activation,
)

__all__ = ["backward_cluster", "evaluate_cluster", "forward_cluster"]


@triton.jit
def _arrive():
    """Tell the other programs of the cluster that the partial results of this one are in memory."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait():
    """Wait for all programs of the cluster."""
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _store_partial(part_ptr, member, members, c, exists, C, first, second):
    tl.store(part_ptr + member * C + c, first, mask=exists)
    tl.store(part_ptr + (members + member) * C + c, second, mask=exists)


@triton.jit
def _load_partials(part_ptr, members, c, exists, C, MP: tl.constexpr):
    """Load the partial results of all members, (MP, BC) each; not through the L1 cache, which is not coherent."""
    member = tl.arange(0, MP)
    there = (member < members)[:, None] & exists[None, :]
    where = part_ptr + member[:, None] * C + c[None, :]
    first = tl.load(where, mask=there, other=0.0, cache_modifier=".cg")
    return there, first, tl.load(where + members * C, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def _load_chunks(
    x_ptr, n, c, rows, start, stop, C, L, LAST: tl.constexpr, BL: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Load all values of a program as a tuple of chunks, in the dtype of the input, which takes fewer registers."""
    xs = ()
    for i in tl.static_range(CHUNKS):
        at, mask = positions(start + i * BL, stop, rows, BL)
        xs = xs + (tl.load(x_ptr + place(n, c, at, C, L, LAST), mask=mask, other=0),)  # noqa: RUF005
    return xs


@triton.jit
def _chunks_moments(
    xs, pivot, rows, start, stop, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Return mean and sum of squared deviations of each row, in two passes to avoid cancellation."""
    total = tl.zeros((BN, BC, BL), tl.float32)
    for i in tl.static_range(CHUNKS):
        _, mask = positions(start + i * BL, stop, rows, BL)
        total += tl.where(mask, xs[i].to(tl.float32) - pivot[:, :, None], 0.0)
    mean = tl.sum(total, 2) / (stop - start)
    square = tl.zeros((BN, BC, BL), tl.float32)
    for i in tl.static_range(CHUNKS):
        _, mask = positions(start + i * BL, stop, rows, BL)
        off = tl.where(mask, (xs[i].to(tl.float32) - pivot[:, :, None]) - mean[:, :, None], 0.0)
        square += off * off
    return mean, tl.sum(square, 2)


@triton.jit
def _write_chunks(
    xs, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(CHUNKS):
        at, mask = positions(start + i * BL, stop, rows, BL)
        where = place(n, c, at, C, L, LAST)
        x = xs[i].to(tl.float32) - pivot[:, :, None]
        y = with_activation(x, scale, offset, residual_ptr, where, mask, RELU)
        tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_program(
    x_ptr, members, N, C, L,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    LAST: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Return block, member, lanes and rows of a program in training, their pivots, and all its values."""
    block = tl.program_id(0) // members
    member = tl.program_id(0) % members
    c, group, exists = lanes(block, C, K, KP, BC, True)
    n = member * BN + tl.arange(0, BN)
    rows = (n < N)[:, None] & exists[None, :]
    pivot = slab_pivot(x_ptr, n, block, group, rows, N, C, L, K, KP, BN, BC, LAST, True)
    xs = _load_chunks(x_ptr, n, c, rows, 0, L, C, L, LAST, BL, CHUNKS)
    return block, member, c, group, exists, n, rows, pivot, xs


@triton.jit
def forward_cluster(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, part_ptr, table_ptr,
    run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, factor, N, C, L, eps, members,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, MP: tl.constexpr,
    LAST: tl.constexpr, CHUNKS: tl.constexpr, RELU: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Process a block of groups over some samples."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    block, member, c, group, exists, n, rows, pivot, xs = _load_program(
        x_ptr, members, N, C, L, K, KP, BN, BC, BL, LAST, CHUNKS
    )
    if PHASE != 1:
        weight, bias = load_affine(weight_ptr, bias_ptr, c, exists)
        old_mean, old_var, batches, share = load_running(
            run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, c, exists
        )
    if PHASE == 2:
        group_mean, group_rstd = load_groups(table_ptr + 2 * N * C, n, group, rows, N, C, K)
    else:
        row_mean, row_square = _chunks_moments(xs, pivot, rows, 0, L, BN, BC, BL, CHUNKS)
        group_mean, group_rstd, row_mean, within = tables_from_moments(
            row_mean, row_square / L, rows, eps, K, BN, BC, KP
        )
        within = tl.where(rows, within, 0.0)
        own_mean = tl.sum(row_mean, 0) / tl.minimum(N - member * BN, BN)
        off = tl.where(rows, row_mean - own_mean[None, :], 0.0)
        _store_partial(part_ptr, member, members, c, exists, C, own_mean, tl.sum(within + off * off, 0))
        if PHASE == 0:
            _arrive()
        # Here and not earlier: the barrier waits for all stores before it.
        store_rows(table_ptr, n, c, rows, N, C, row_mean, within)
        store_groups(table_ptr, n, c, group, rows, N, C, group_mean, group_rstd, K)
    if PHASE == 0:
        _wait()
    if PHASE != 1:
        there, means, squares = _load_partials(part_ptr, members, c, exists, C, MP)
        count = tl.minimum(N - tl.arange(0, MP) * BN, BN) * 1.0
        mean = tl.sum(tl.where(there, means * count[:, None], 0.0), 0) / N
        away = tl.where(there, means - mean[None, :], 0.0)
        # Correctly rounded division: the compiler cannot fuse it with the following sum, which could change ReLU signs.
        var = tl.div_rn(tl.sum(squares + away * away * count[:, None], 0), N * 1.0)
        scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain_of(weight_ptr, weight, var, eps), bias)
        _write_chunks(xs, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, 0, L, C, L, LAST, BL, RELU, CHUNKS)
        if member == 0:
            store_channels(
                mean_ptr, var_ptr, run_mean_ptr, run_var_ptr, counter_ptr, old_mean, old_var, batches, share, factor,
                c, exists, block == 0, mean, var,
            )  # fmt: skip


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
    _, member, c, group, exists, n, rows, pivot, xs = _load_program(
        x_ptr, members, N, C, L, K, KP, BN, BC, BL, LAST, CHUNKS
    )
    dys = _load_chunks(dy_ptr, n, c, rows, 0, L, C, L, LAST, BL, CHUNKS)
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
        _store_partial(part_ptr, member, members, c, exists, C, tl.sum(sum_dy, 0), tl.sum(against, 0))
        if PHASE == 1:
            at_rows = n.to(tl.int64)[:, None] * C + c[None, :]
            tl.store(slab_ptr + at_rows, sum_dy, mask=rows)
            tl.store(slab_ptr + N * C + at_rows, against, mask=rows)
    if PHASE == 0:
        _arrive()
    if PHASE != 1:
        row_mean, row_square = load_rows(table_ptr, n, c, rows, N, C)
        if PHASE == 0:
            _wait()
        _, of_bias, of_weight = _load_partials(part_ptr, members, c, exists, C, MP)
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


@triton.jit
def evaluate_cluster(
    x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, part_ptr, N, C, L, eps, blocks, members, span,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, MP: tl.constexpr,
    LAST: tl.constexpr, CHUNKS: tl.constexpr, RELU: tl.constexpr, PHASE: tl.constexpr,
    FULL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Evaluate some samples in a part of the positions, ``span`` of them."""
    member = tl.program_id(0) % members
    block = tl.program_id(0) // members % blocks
    c, group, exists = lanes(block, C, K, KP, BC, True)
    n = tl.program_id(0) // (members * blocks) * BN + tl.arange(0, BN)
    rows = (n < N)[:, None] & exists[None, :]
    start, stop = split_range(member, L, span)
    pivot = slab_pivot(x_ptr, n, block, group, rows, N, C, L, K, KP, BN, BC, LAST, True)
    xs = _load_chunks(x_ptr, n, c, rows, start, stop, C, L, LAST, BL, CHUNKS)
    mean, _, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    if PHASE != 2:
        if CHUNKS:
            row_mean, row_square = _chunks_moments(xs, pivot, rows, start, stop, BN, BC, BL, CHUNKS)
        else:
            row_mean, row_square = row_moments(
                x_ptr, pivot, n, c, rows, start, stop, C, L, LAST, BN, BC, BL, FULL, STAGES
            )
        if MP > 1:
            at_rows = (member * N + n.to(tl.int64)[:, None]) * C + c[None, :]
            tl.store(part_ptr + at_rows, row_mean, mask=rows)
            tl.store(part_ptr + members * N * C + at_rows, row_square, mask=rows)
    if PHASE == 0 and MP > 1:
        _arrive()
        _wait()
    if PHASE != 1:
        if MP > 1:
            row_mean, row_var = merged_moments(part_ptr, n, c, rows, N, C, L, span, members, MP)
        else:
            row_var = row_square / L
        group_mean, group_rstd, _, _ = tables_from_moments(row_mean, row_var, rows, eps, K, BN, BC, KP)
        scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
        if CHUNKS:
            _write_chunks(
                xs, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L, LAST, BL, RELU, CHUNKS
            )
        else:
            write_output(
                x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L, LAST, BL, RELU,
                FULL, STAGES, True,
            )  # fmt: skip
