"""Forward kernels: `forward_one` alone, or `forward_rows`, `forward_tables` (if needed) and `forward_apply`.

The channels of one group, over all samples, are independent of all other channels. If they fit one program, it computes
everything (`forward_one`). If their rows do, several programs process a part of the positions each, and each of them
recomputes the tables (`forward_apply` with ``TABLES``). Otherwise `forward_tables` computes them once, block by block.
In clusters (`tiles` explains them), several programs hold these rows in registers and exchange their sums.

The table for the backward pass holds, in this order: mean and biased variance of the batch, (C,) each; mean and mean
square of each group-normalized row, (N, C) each; mean and reciprocal standard deviation of each slab, (N, G) each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from contnorm.kernels.triton.tiles import (
    arrive,
    channel_tables,
    chunk_moments,
    full_end,
    gain_of,
    in_order,
    lanes,
    load_affine,
    load_chunks,
    load_groups,
    load_partials,
    load_program,
    merged_moments,
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
    tables_from_moments,
    wait,
    with_activation,
)


@triton.jit
def _shifted(x_ptr, pivot, where, mask):
    return tl.load(x_ptr + where, mask=mask, other=0).to(tl.float32) - pivot[:, :, None]


@triton.jit
def _with_chunk(
    mean, square, x_ptr, pivot, n, c, rows, chunk, start, stop, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Return mean and sum of squared deviations of each lane with the values of one more chunk."""
    at, mask = positions(chunk, stop, rows, BL, FULL)
    x = _shifted(x_ptr, pivot, place(n, c, at, C, L, LAST), mask)
    off = tl.where(mask, x - mean, 0.0)
    mean += off * (1.0 / ((chunk - start) // BL + 1))  # one division per chunk
    square += off * tl.where(mask, x - mean, 0.0)
    return mean, square


@triton.jit
def row_moments(
    x_ptr, pivot, n, c, rows, start, stop, C, L,
    LAST: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    FULL: tl.constexpr = False, STAGES: tl.constexpr = 1,
):  # fmt: skip
    """Return mean and sum of squared deviations of each row between two positions.

    Every lane updates the mean of its values (Welford), and lanes are merged once at the end (Chan): a reduction across
    lanes in every chunk would stall memory reads.
    """
    mean = tl.zeros((BN, BC, BL), tl.float32)
    square = tl.zeros((BN, BC, BL), tl.float32)
    end = full_end(start, stop, BL, FULL)
    for chunk in tl.range(start, end, BL, num_stages=STAGES):
        mean, square = _with_chunk(
            mean, square, x_ptr, pivot, n, c, rows, chunk, start, stop, C, L, LAST, BL, FULL > 0
        )  # fmt: skip
    if FULL == 2:
        if end < stop:
            mean, square = _with_chunk(mean, square, x_ptr, pivot, n, c, rows, end, start, stop, C, L, LAST, BL, False)
    lane = tl.arange(0, BL)
    count = ((stop - start - lane + BL - 1) // BL).to(tl.float32)[None, None, :]
    whole = tl.sum(mean * count, 2) / (stop - start)
    off = tl.where(count > 0, mean - whole[:, :, None], 0.0)
    return whole, tl.sum(square + off * off * count, 2)


@triton.jit
def _batch_moments(row_mean, within, rows, N):
    """Return the moments of each channel: the variance is the mean of the variances plus the variance of the means."""
    mean = tl.sum(row_mean, 0) / N
    off = tl.where(rows, row_mean - mean[None, :], 0.0)
    # Correctly rounded division: the compiler cannot fuse it with the following sum, which could change ReLU signs.
    return mean, tl.div_rn(tl.sum(within + off * off, 0), N * 1.0)


@triton.jit
def store_rows(table_ptr, n, c, rows, N, C, row_mean, within):
    where = n.to(tl.int64)[:, None] * C + c[None, :]
    tl.store(table_ptr + where, row_mean, mask=rows)
    tl.store(table_ptr + N * C + where, within + row_mean * row_mean, mask=rows)


@triton.jit
def _moved(old, new, weight):
    # As torch.lerp: interpolates from the nearer end, so that a weight of 1 gives exactly the new value.
    return tl.where(weight < 0.5, old + weight * (new - old), new - (new - old) * (1.0 - weight))


@triton.jit
def load_running(run_mean_ptr, run_var_ptr, counter_ptr, weight_ptr, weight, c, exists):
    """Load the running moments, the batch counter and the weight of the batch, early: `store_channels` needs them."""
    old_mean = tl.zeros_like(c).to(tl.float32)
    old_var = old_mean
    count = 0
    if run_mean_ptr is not None:
        old_mean = tl.load(run_mean_ptr + c, mask=exists, other=0.0).to(tl.float32)
        old_var = tl.load(run_var_ptr + c, mask=exists, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr).to(tl.float32)
    if counter_ptr is not None:
        count = tl.load(counter_ptr)
    return old_mean, old_var, count, weight


@triton.jit
def store_channels(
    mean_ptr, var_ptr, run_mean_ptr, run_var_ptr, counter_ptr, old_mean, old_var, count, weight, factor,
    c, exists, first, mean, var,
):  # fmt: skip
    """Store the moments of the batch, and update the running moments if they are given."""
    tl.store(mean_ptr + c, mean, mask=exists)
    tl.store(var_ptr + c, var, mask=exists)
    if run_mean_ptr is not None:
        tl.store(run_mean_ptr + c, _moved(old_mean, mean, weight).to(run_mean_ptr.dtype.element_ty), mask=exists)
        tl.store(run_var_ptr + c, _moved(old_var, var * factor, weight).to(run_var_ptr.dtype.element_ty), mask=exists)
    if counter_ptr is not None:
        tl.store(counter_ptr, count + 1, mask=first)


@triton.jit
def _write_chunk(
    x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, chunk, stop, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    at, mask = positions(chunk, stop, rows, BL, FULL)
    where = place(n, c, at, C, L, LAST)
    y = with_activation(_shifted(x_ptr, pivot, where, mask), scale, offset, residual_ptr, where, mask, RELU)
    tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def write_output(
    x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L,
    LAST: tl.constexpr, BL: tl.constexpr, RELU: tl.constexpr,
    FULL: tl.constexpr = False, STAGES: tl.constexpr = 1, REVERSE: tl.constexpr = True,
):  # fmt: skip
    """Write the output between two positions, chunk by chunk."""
    end = full_end(start, stop, BL, FULL)
    chunks = (end - start + BL - 1) // BL
    if FULL == 2:
        if end < stop:
            _write_chunk(
                x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, end, stop, C, L, LAST, BL, RELU, False
            )
    for i in tl.range(chunks, num_stages=STAGES):
        chunk = start + in_order(i, chunks, REVERSE) * BL
        _write_chunk(
            x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, chunk, stop, C, L, LAST, BL,
            RELU, FULL > 0,
        )  # fmt: skip


@triton.jit
def forward_one(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, table_ptr,
    run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, factor, N, C, L, eps,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    LAST: tl.constexpr, SINGLE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Process a block of groups over all samples; with ``SINGLE``, it is one chunk and is read once."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    c, group, exists = lanes(tl.program_id(0), C, K, KP, BC, True)
    n = tl.arange(0, BN)
    rows = (n < N)[:, None] & exists[None, :]
    old_mean, old_var, count, weight = load_running(
        run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, c, exists
    )
    pivot = slab_pivot(x_ptr, n, tl.program_id(0), group, rows, N, C, L, K, KP, BN, BC, LAST, True)
    if SINGLE:
        at, mask = positions(0, L, rows, BL)
        where = place(n, c, at, C, L, LAST)
        x = _shifted(x_ptr, pivot, where, mask)
        row_mean, row_square = chunk_moments(x, mask, L * 1.0)
    else:
        row_mean, row_square = row_moments(x_ptr, pivot, n, c, rows, 0, L, C, L, LAST, BN, BC, BL)
    group_mean, group_rstd, row_mean, within = tables_from_moments(row_mean, row_square / L, rows, eps, K, BN, BC, KP)
    mean, var = _batch_moments(row_mean, within, rows, N)
    store_rows(table_ptr, n, c, rows, N, C, row_mean, within)
    store_groups(table_ptr + 2 * N * C, n, c, group, rows, N, C, group_mean, group_rstd, K)
    first = tl.program_id(0) == 0
    store_channels(
        mean_ptr, var_ptr, run_mean_ptr, run_var_ptr, counter_ptr, old_mean, old_var, count, weight, factor,
        c, exists, first, mean, var,
    )  # fmt: skip
    weight, bias = load_affine(weight_ptr, bias_ptr, c, exists)
    gain = gain_of(weight_ptr, weight, var, eps)
    scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    if SINGLE:
        y = with_activation(x, scale, offset, residual_ptr, where, mask, RELU)
        tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        write_output(x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, 0, L, C, L, LAST, BL, RELU)


@triton.jit
def forward_rows(
    x_ptr, part_ptr, N, C, L, blocks, splits, span,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    LAST: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store mean and sum of squared deviations of each row in one split of its positions: (splits, N, C) each."""
    program = tl.program_id(0)
    split, c, group, _, n, rows = shared_out(program, blocks, splits, N, C, K, KP, BN, BC, WHOLE)
    pivot = slab_pivot(x_ptr, n, program % blocks, group, rows, N, C, L, K, KP, BN, BC, LAST, WHOLE)
    start, stop = split_range(split, L, span)
    mean, square = row_moments(x_ptr, pivot, n, c, rows, start, stop, C, L, LAST, BN, BC, BL, FULL, STAGES)
    store_split(part_ptr, split, splits, n, c, rows, N, C, mean, square)


@triton.jit
def forward_tables(
    part_ptr, table_ptr,
    run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, factor, N, C, L, eps, splits, span,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """Compute all tables of a block of groups, over blocks of samples; batch moments are merged by Chan's formula."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    c, group, exists = lanes(tl.program_id(0), C, K, KP, BC, True)
    mean = tl.zeros((BC,), tl.float32)
    square = tl.zeros((BC,), tl.float32)
    old_mean, old_var, batches, weight = load_running(
        run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, c, exists
    )
    for sample in range(0, N, BN):
        n = sample + tl.arange(0, BN)
        rows = (n < N)[:, None] & exists[None, :]
        row_mean, row_var = merged_moments(part_ptr, n, c, rows, N, C, L, span, splits, SP)
        group_mean, group_rstd, row_mean, within = tables_from_moments(row_mean, row_var, rows, eps, K, BN, BC, KP)
        store_rows(table_ptr, n, c, rows, N, C, row_mean, within)
        store_groups(table_ptr + 2 * N * C, n, c, group, rows, N, C, group_mean, group_rstd, K)
        count = tl.minimum(N - sample, BN) * 1.0
        before = sample * 1.0
        block_mean, block_var = _batch_moments(row_mean, tl.where(rows, within, 0.0), rows, count)
        off = block_mean - mean
        share = count / (before + count)
        mean += off * share
        square += block_var * count + off * off * (before * share)
    first = tl.program_id(0) == 0
    store_channels(
        mean_ptr, var_ptr, run_mean_ptr, run_var_ptr, counter_ptr, old_mean, old_var, batches, weight, factor,
        c, exists, first, mean, square / N,
    )  # fmt: skip


@triton.jit
def forward_apply(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, part_ptr, table_ptr,
    run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, factor, N, C, L, eps, blocks, splits, span,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, SP: tl.constexpr,
    NP: tl.constexpr, LAST: tl.constexpr, TABLES: tl.constexpr, RELU: tl.constexpr,
    FULL: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the output of one split of the positions of some samples; with ``TABLES``, first compute the tables.

    The tables need the rows of all samples (``NP`` lanes). Only the first program of some rows stores their tables.
    """
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    program = in_order(tl.program_id(0), tl.num_programs(0), REVERSE)
    split, c, group, exists, n, rows = shared_out(program, blocks, splits, N, C, K, KP, BN, BC, TABLES)
    if TABLES:
        row_mean, row_var = merged_moments(part_ptr, n, c, rows, N, C, L, span, splits, SP)
        group_mean, group_rstd, row_mean, within = tables_from_moments(row_mean, row_var, rows, eps, K, BN, BC, KP)
        if BN == NP:
            mean, var = _batch_moments(row_mean, within, rows, N)
        else:
            every = tl.arange(0, NP)
            there = (every < N)[:, None] & exists[None, :]
            all_mean, all_var = merged_moments(part_ptr, every, c, there, N, C, L, span, splits, SP)
            _, _, all_mean, all_within = tables_from_moments(all_mean, all_var, there, eps, K, NP, BC, KP)
            mean, var = _batch_moments(all_mean, all_within, there, N)
        if split == 0:
            store_rows(table_ptr, n, c, rows, N, C, row_mean, within)
            store_groups(table_ptr + 2 * N * C, n, c, group, rows, N, C, group_mean, group_rstd, K)
        if program < blocks:
            old_mean, old_var, count, weight = load_running(
                run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, c, exists
            )
            store_channels(
                mean_ptr, var_ptr, run_mean_ptr, run_var_ptr, counter_ptr, old_mean, old_var, count, weight, factor,
                c, exists, program == 0, mean, var,
            )  # fmt: skip
        weight, bias = load_affine(weight_ptr, bias_ptr, c, exists)
        gain = gain_of(weight_ptr, weight, var, eps)
    else:
        group_mean, group_rstd = load_groups(table_ptr + 2 * N * C, n, group, rows, N, C, K)
        mean, _, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    pivot = slab_pivot(x_ptr, n, program % blocks, group, rows, N, C, L, K, KP, BN, BC, LAST, TABLES)
    start, stop = split_range(split, L, span)
    write_output(
        x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L, LAST, BL, RELU,
        FULL, STAGES, REVERSE,
    )  # fmt: skip


@triton.jit
def evaluate_apply(
    x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, part_ptr, N, C, L, eps, blocks, splits, span,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, SP: tl.constexpr,
    LAST: tl.constexpr, RELU: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the output of one split of the positions of some samples, with given moments, from the row moments."""
    program = in_order(tl.program_id(0), tl.num_programs(0), REVERSE)
    split, c, group, exists, n, rows = shared_out(program, blocks, splits, N, C, K, KP, BN, BC, True)
    mean, _, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    pivot = slab_pivot(x_ptr, n, program % blocks, group, rows, N, C, L, K, KP, BN, BC, LAST, True)
    row_mean, row_var = merged_moments(part_ptr, n, c, rows, N, C, L, span, splits, SP)
    group_mean, group_rstd, _, _ = tables_from_moments(row_mean, row_var, rows, eps, K, BN, BC, KP)
    scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    start, stop = split_range(split, L, span)
    write_output(
        x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, start, stop, C, L, LAST, BL, RELU,
        FULL, STAGES, REVERSE,
    )  # fmt: skip


@triton.jit
def evaluate(
    x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, N, C, L, eps, blocks,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr,
    LAST: tl.constexpr, SINGLE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Evaluate with given moments, where slabs are independent; with ``SINGLE``, a slab is read once, else twice."""
    program = tl.program_id(0)
    c, group, exists = lanes(program % blocks, C, K, KP, BC, True)
    n = program // blocks * BN + tl.arange(0, BN)
    rows = (n < N)[:, None] & exists[None, :]
    pivot = slab_pivot(x_ptr, n, program % blocks, group, rows, N, C, L, K, KP, BN, BC, LAST, True)
    mean, _, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    if SINGLE:
        at, mask = positions(0, L, rows, BL)
        where = place(n, c, at, C, L, LAST)
        x = _shifted(x_ptr, pivot, where, mask)
        row_mean, row_square = chunk_moments(x, mask, L * 1.0)
    else:
        row_mean, row_square = row_moments(x_ptr, pivot, n, c, rows, 0, L, C, L, LAST, BN, BC, BL)
    group_mean, group_rstd, _, _ = tables_from_moments(row_mean, row_square / L, rows, eps, K, BN, BC, KP)
    scale, offset = scale_and_offset(group_mean, group_rstd, mean, gain, bias)
    if SINGLE:
        y = with_activation(x, scale, offset, residual_ptr, where, mask, RELU)
        tl.store(y_ptr + where, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        write_output(x_ptr, residual_ptr, y_ptr, pivot, scale, offset, n, c, rows, 0, L, C, L, LAST, BL, RELU)


# --- clusters ---------------------------------------------------------------------------------------------------
#
# In training, each program processes the samples of one part of the batch, with all positions: the tables of its groups
# need no other program, and the moments of the batch are merged from one partial result per program. In evaluation, it
# processes a part of the positions of some samples, and the moments of rows are merged; without ``CHUNKS``, it reads
# them twice.


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
def forward_cluster(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, part_ptr, table_ptr,
    run_mean_ptr, run_var_ptr, counter_ptr, momentum_ptr, momentum, factor, N, C, L, eps, members,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BL: tl.constexpr, MP: tl.constexpr,
    LAST: tl.constexpr, CHUNKS: tl.constexpr, RELU: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Process a block of groups over some samples."""
    mean_ptr, var_ptr, table_ptr = moments_and_tables(table_ptr, C)
    block, member, c, group, exists, n, rows, pivot, xs = load_program(
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
        store_partial(part_ptr, member, members, c, exists, C, own_mean, tl.sum(within + off * off, 0))
        if PHASE == 0:
            arrive()
        # Here and not earlier: the barrier waits for all stores before it.
        store_rows(table_ptr, n, c, rows, N, C, row_mean, within)
        store_groups(table_ptr + 2 * N * C, n, c, group, rows, N, C, group_mean, group_rstd, K)
    if PHASE == 0:
        wait()
    if PHASE != 1:
        there, means, squares = load_partials(part_ptr, members, c, exists, C, MP)
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
    xs = load_chunks(x_ptr, n, c, rows, start, stop, C, L, LAST, BL, CHUNKS)
    mean, _, gain, bias = channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps)
    if PHASE != 2:
        if CHUNKS:
            row_mean, row_square = _chunks_moments(xs, pivot, rows, start, stop, BN, BC, BL, CHUNKS)
        else:
            row_mean, row_square = row_moments(
                x_ptr, pivot, n, c, rows, start, stop, C, L, LAST, BN, BC, BL, FULL, STAGES
            )
        if MP > 1:
            store_split(part_ptr, member, members, n, c, rows, N, C, row_mean, row_square)
    if PHASE == 0 and MP > 1:
        arrive()
        wait()
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
