"""Device code shared by all kernels: the values of a program, their pivots, and the tables computed from them.

A tile is (BN samples, BC channels, BL positions); a table is (BN, BC), one number per row. Two memory layouts are
supported: contiguous (``LAST`` false) and channels_last (``LAST`` true). If a program needs whole groups (``WHOLE``),
each group gets KP lanes, the smallest power of two that is at least K, and BC is a multiple of KP. Lanes past K are
masked, loaded as zeros, and excluded from every sum to which a zero would contribute.

Loops over chunks have three constants. ``FULL`` is 1 if all chunks are full, which then need no masks, 2 if all but the
last one of a program are, and otherwise 0. ``STAGES`` chunks are in flight: while a program computes with one, the next
are copied to shared memory. With ``REVERSE``, the order of the last launch is the reverse of that of the first, because
what was read last is still in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lanes(block, C, K: tl.constexpr, KP: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr):
    """Return the channel and group of each lane of a block, and whether the channel exists."""
    lane = tl.arange(0, BC)
    if WHOLE and K != KP:
        group = block * (BC // KP) + lane // KP
        channel = group * K + lane % KP
        exists = (lane % KP < K) & (channel < C)
    else:
        channel = block * BC + lane
        group = channel // K
        exists = channel < C
    return channel, group, exists


@triton.jit
def shared_out(
    program, blocks, splits, N, C,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the split, lanes and rows of a program; channels, positions and samples are distributed."""
    c, group, exists = lanes(program % blocks, C, K, KP, BC, WHOLE)
    n = program // (blocks * splits) * BN + tl.arange(0, BN)
    return (program // blocks) % splits, c, group, exists, n, (n < N)[:, None] & exists[None, :]


@triton.jit
def place(n, c, at, C, L, LAST: tl.constexpr):
    """Return the offsets of a tile; sample offsets are 64-bit, since a tensor may have more than 2**31 values."""
    if LAST:
        within = c[None, :, None] + at[None, None, :] * C
    else:
        within = c[None, :, None] * L + at[None, None, :]
    return n.to(tl.int64)[:, None, None] * C * L + within


@triton.jit
def positions(start, stop, rows, BL: tl.constexpr, FULL: tl.constexpr = False):
    """Return the positions of a chunk, and the mask of its tile, which the compiler removes if it is ``FULL``."""
    at = start + tl.arange(0, BL)
    if FULL:
        mask = tl.full((rows.shape[0], rows.shape[1], BL), True, tl.int1)
    else:
        mask = rows[:, :, None] & (at < stop)[None, None, :]
    return at, mask


@triton.jit
def in_order(i, count, REVERSE: tl.constexpr):
    """Return the number of a program or chunk, of so many, in the order of the launch."""
    if REVERSE:
        return count - 1 - i
    else:
        return i


@triton.jit
def full_end(start, stop, BL: tl.constexpr, FULL: tl.constexpr):
    """Return where the last chunk begins, if ``FULL`` is 2 and it is not full; otherwise where the chunks end."""
    if FULL == 2:
        return start + (stop - start) // BL * BL
    else:
        return stop


@triton.jit
def split_range(split, L, span):
    """Return the first position of a split, and the position after its last."""
    return split * span, tl.minimum(split * span + span, L)


@triton.jit
def _median_of_three(base, first, middle, final, mask):
    a = tl.load(base + first[None, :], mask=mask, other=0).to(tl.float32)
    b = tl.load(base + middle[None, :], mask=mask, other=0).to(tl.float32)
    c = tl.load(base + final[None, :], mask=mask, other=0).to(tl.float32)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def slab_pivot(
    x_ptr, n, block, group, rows, N, C, L,
    K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the pivot of each slab, repeated over its rows: the median of three values, to avoid outliers.

    If a program has whole groups, each pivot is loaded once per group and not once per channel.
    """
    if WHOLE and KP > 1:
        slab = block * (BC // KP) + tl.arange(0, BC // KP)
        mask = (n < N)[:, None] & (slab * K < C)[None, :]
    else:
        slab = group
        mask = rows
    first = slab * K
    middle = first + K // 2
    final = first + (K - 1)
    if LAST:
        middle += (L // 2) * C
        final += (L - 1) * C
    else:
        first = first * L
        middle = middle * L + L // 2
        final = final * L + (L - 1)
    pivot = _median_of_three(x_ptr + n.to(tl.int64)[:, None] * C * L, first, middle, final, mask)
    if WHOLE and KP > 1:
        pivot = tl.reshape(tl.broadcast_to(pivot[:, :, None], (BN, BC // KP, KP)), (BN, BC))
    return pivot


@triton.jit
def chunk_moments(x, mask, count):
    """Return mean and sum of squared deviations of each row of a chunk, in two passes to avoid cancellation."""
    mean = tl.sum(tl.where(mask, x, 0.0), 2) / count
    off = tl.where(mask, x - mean[:, :, None], 0.0)
    return mean, tl.sum(off * off, 2)


@triton.jit
def group_sum(table, BN: tl.constexpr, BC: tl.constexpr, KP: tl.constexpr):
    """Return the sum over the lanes of each group, repeated on each lane."""
    if KP == 1:
        return table
    if KP == BC:  # without a change of layout, which would take a barrier
        return tl.broadcast_to(tl.sum(table, 1)[:, None], (BN, BC))
    grouped = tl.reshape(table, (BN, BC // KP, KP))
    total = tl.sum(grouped, 2)
    return tl.reshape(tl.broadcast_to(total[:, :, None], (BN, BC // KP, KP)), (BN, BC))


@triton.jit
def merged_moments(part_ptr, n, c, rows, N, C, L, span, splits, SP: tl.constexpr):
    """Return mean and biased variance of each row, merged from its splits, which are all loaded at once."""
    split = tl.arange(0, SP)
    there = (split < splits)[:, None, None] & rows[None, :, :]
    where = (split[:, None, None] * N + n.to(tl.int64)[None, :, None]) * C + c[None, None, :]
    mean = tl.load(part_ptr + where, mask=there, other=0.0, cache_modifier=".cg")
    square = tl.load(part_ptr + splits * N * C + where, mask=there, other=0.0, cache_modifier=".cg")
    count = tl.minimum(L - split * span, span) * 1.0
    whole = tl.sum(tl.where(there, mean * count[:, None, None], 0.0), 0) / L
    off = tl.where(there, mean - whole[None, :, :], 0.0)
    return whole, tl.sum(square + off * off * count[:, None, None], 0) / L


@triton.jit
def tables_from_moments(mean, var, rows, eps, K: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, KP: tl.constexpr):
    """Return mean and reciprocal standard deviation of each group, and mean and variance of each normalized row."""
    group_mean = group_sum(mean, BN, BC, KP) / K
    off = tl.where(rows, mean - group_mean, 0.0)
    group_rstd = tl.rsqrt(group_sum(var + off * off, BN, BC, KP) / K + eps)
    return group_mean, group_rstd, off * group_rstd, var * group_rstd * group_rstd


@triton.jit
def moments_and_tables(table_ptr, C):
    """Return pointers to the mean and variance of the batch, which come first, and to the tables after them."""
    return table_ptr, table_ptr + C, table_ptr + 2 * C


@triton.jit
def load_affine(weight_ptr, bias_ptr, c, exists):
    weight = tl.zeros_like(c).to(tl.float32)
    bias = weight
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + c, mask=exists, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=exists, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def gain_of(weight_ptr, weight, var, eps):
    gain = tl.rsqrt(var + eps)
    if weight_ptr is not None:
        gain = gain * weight
    return gain


@triton.jit
def channel_tables(mean_ptr, var_ptr, weight_ptr, bias_ptr, c, exists, eps):
    """Return for each channel: mean, reciprocal standard deviation (rstd), rstd times weight, and bias."""
    mean = tl.load(mean_ptr + c, mask=exists, other=0.0).to(tl.float32)
    var = tl.load(var_ptr + c, mask=exists, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(var + eps)
    gain = rstd
    bias = tl.zeros_like(mean)
    if weight_ptr is not None:
        gain = rstd * tl.load(weight_ptr + c, mask=exists, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=exists, other=0.0).to(tl.float32)
    return mean, rstd, gain, bias


@triton.jit
def scale_and_offset(group_mean, group_rstd, mean, gain, bias):
    """Return scale and offset of each row, with explicit fma so that forward and backward compute the same signs."""
    offset = tl.fma(tl.fma(-group_mean, group_rstd, -mean[None, :]), gain[None, :], bias[None, :])
    return group_rstd * gain[None, :], offset


@triton.jit
def with_activation(x, scale, offset, residual_ptr, where, mask, RELU: tl.constexpr):
    """Return the output for a tile of x minus its pivot."""
    y = tl.fma(x, scale[:, :, None], offset[:, :, None])
    if residual_ptr is not None:
        y += tl.load(residual_ptr + where, mask=mask, other=0).to(tl.float32)
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # keeps NaN
    return y


@triton.jit
def masked_gradient(dy_ptr, y_ptr, x, scale, offset, where, mask, RELU: tl.constexpr):
    """Return the gradient before the ReLU; the sign is that of the saved output, or is recomputed."""
    dy = tl.load(dy_ptr + where, mask=mask, other=0).to(tl.float32)
    if RELU:
        if y_ptr is not None:
            y = tl.load(y_ptr + where, mask=mask, other=0).to(tl.float32)
        else:
            y = with_activation(x, scale, offset, None, where, mask, False)
        dy = tl.where(y <= 0, 0.0, dy)
    return dy


@triton.jit
def load_rows(table_ptr, n, c, rows, N, C):
    where = table_ptr + n.to(tl.int64)[:, None] * C + c[None, :]
    return tl.load(where, mask=rows, other=0.0), tl.load(where + N * C, mask=rows, other=0.0)


@triton.jit
def store_groups(table_ptr, n, c, group, rows, N, C, first, second, K: tl.constexpr):
    """Store two tables of slabs, (N, G) each; one lane of each group writes."""
    where = table_ptr + n.to(tl.int64)[:, None] * (C // K) + group[None, :]
    writes = rows & (c == group * K)[None, :]
    tl.store(where, first, mask=writes)
    tl.store(where + N * (C // K), second, mask=writes)


@triton.jit
def store_split(part_ptr, split, splits, n, c, rows, N, C, first, second):
    """Store two tables of the rows in one split of their positions, (splits, N, C) each."""
    where = (split * N + n.to(tl.int64)[:, None]) * C + c[None, :]
    tl.store(part_ptr + where, first, mask=rows)
    tl.store(part_ptr + splits * N * C + where, second, mask=rows)


@triton.jit
def load_groups(table_ptr, n, group, rows, N, C, K: tl.constexpr):
    where = table_ptr + n.to(tl.int64)[:, None] * (C // K) + group[None, :]
    return tl.load(where, mask=rows, other=0.0), tl.load(where + N * (C // K), mask=rows, other=0.0)


# --- clusters ---------------------------------------------------------------------------------------------------
#
# Programs of a cluster share a block of channels and exchange partial sums: the GPU runs them at the same time, and a
# barrier of the hardware makes all of them wait for each other. Without clusters (other GPUs, Triton's interpreter),
# the same code runs in two launches: ``PHASE`` 1 up to the barrier and 2 from there; 0 is both. The values of a program
# stay in registers, in ``CHUNKS`` chunks. Small chunks of many samples are better than one large chunk: if a warp has
# all lanes of a row, its sum needs no barrier.


@triton.jit
def arrive():
    """Tell the other programs of the cluster that the partial results of this one are in memory."""
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait():
    """Wait for all programs of the cluster."""
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.aligned; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_partial(part_ptr, member, members, c, exists, C, first, second):
    tl.store(part_ptr + member * C + c, first, mask=exists)
    tl.store(part_ptr + (members + member) * C + c, second, mask=exists)


@triton.jit
def load_partials(part_ptr, members, c, exists, C, MP: tl.constexpr):
    """Load the partial results of all members, (MP, BC) each; not through the L1 cache, which is not coherent."""
    member = tl.arange(0, MP)
    there = (member < members)[:, None] & exists[None, :]
    where = part_ptr + member[:, None] * C + c[None, :]
    first = tl.load(where, mask=there, other=0.0, cache_modifier=".cg")
    return there, first, tl.load(where + members * C, mask=there, other=0.0, cache_modifier=".cg")


@triton.jit
def load_chunks(
    x_ptr, n, c, rows, start, stop, C, L, LAST: tl.constexpr, BL: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Load all values of a program as a tuple of chunks, in the dtype of the input, which takes fewer registers."""
    xs = ()
    for i in tl.static_range(CHUNKS):
        at, mask = positions(start + i * BL, stop, rows, BL)
        xs = xs + (tl.load(x_ptr + place(n, c, at, C, L, LAST), mask=mask, other=0),)  # noqa: RUF005
    return xs


@triton.jit
def load_program(
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
    xs = load_chunks(x_ptr, n, c, rows, 0, L, C, L, LAST, BL, CHUNKS)
    return block, member, c, group, exists, n, rows, pivot, xs
