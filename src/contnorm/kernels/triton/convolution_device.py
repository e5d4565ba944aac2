"""Device code of convolutions on channels_last tensors: implicit matrix products, without atomics.

The three products of a convolution have few output tiles for small images, and long sums. So a sum can be divided into
several parts, which different programs compute and store in float32; `add_splits` adds them in a fixed order.

The rows of an output tile are positions, in the order of memory, or with ``BY_POSITION`` samples of a single position.
There every tap of the kernel is either inside of the image for all rows or outside for all of them, and those outside
are skipped: on images of 2x2, 20 of the 36 pairs of a position and a tap.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = ["samples", "height", "width", "out_height", "out_width", "column_blocks"]  # one kernel for all of these


@triton.jit
def _rounded(x):
    """Round float32 to the nearest TF32 number; the tensor cores would otherwise truncate it."""
    return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _completed(total):
    """Return the sums after the tensor cores have completed them.

    Triton lets products whose left side is in registers, and whose right side was copied to shared memory, run on while
    the next step loads its operands into the same registers, whether or not they have been read. This use of the sums
    makes a step wait for its products.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _part(steps):
    """First and last step of the sum of this program: all steps are divided evenly among the splits."""
    part = tl.cdiv(steps, tl.num_programs(1))
    first = tl.program_id(1) * part
    return first, tl.minimum(steps, first + part)


@triton.jit
def _tap_and_chunk(step, taps, chunks, TAPS_FIRST: tl.constexpr):
    """Tap of the kernel and chunk of channels of a step."""
    if TAPS_FIRST:
        tap = step % taps
        chunk = step // taps
    else:
        tap = step // chunks
        chunk = step % chunks
    return tap, chunk


@triton.jit
def _load_even(at, rows, columns, EVEN: tl.constexpr):
    """Load a tile with those rows and columns that exist; all of them if ``EVEN``."""
    if EVEN:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=rows[:, None] & columns[None, :], other=0.0)
    return tile


@triton.jit
def _load_rows(at, rows, columns, EVEN: tl.constexpr):
    """Load a tile with those rows that exist, and those columns; all columns if ``EVEN``."""
    mask = rows[:, None] if EVEN else rows[:, None] & columns[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _store(out_ptr, size, total, row, rows, row_size, column, columns):
    """Store the sums of a tile, in the part of the output that belongs to this split."""
    at = out_ptr + tl.program_id(1).to(tl.int64) * size + row[:, None] * row_size + column[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=rows[:, None] & columns[None, :])


@triton.jit
def _output_rows(
    row_block, samples, height, width, out_height, out_width, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, BM: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """Rows of a tile of the output: index, sample, whether it exists, and the first tap's position in the input.

    Also the taps of the tile: the first one and the number, in both directions.
    """
    first_r = 0
    first_s = 0
    taps_r = KERNEL
    taps_s = KERNEL
    if BY_POSITION:
        blocks = tl.cdiv(samples, BM)
        position = row_block // blocks
        sample = row_block % blocks * BM + tl.arange(0, BM)
        oy = position // out_width
        ox = position % out_width
        exists = sample < samples
        row = (sample * out_height + oy) * out_width + ox
        top = oy * STRIDE - PADDING
        left = ox * STRIDE - PADDING
        first_r = tl.maximum(0, -top)
        first_s = tl.maximum(0, -left)
        taps_r = tl.maximum(tl.minimum(KERNEL, height - top) - first_r, 0)
        taps_s = tl.maximum(tl.minimum(KERNEL, width - left) - first_s, 0)
    else:
        row = row_block * BM + tl.arange(0, BM)
        exists = row < samples * out_height * out_width
        sample = row // (out_height * out_width)
        top = row // out_width % out_height * STRIDE - PADDING
        left = row % out_width * STRIDE - PADDING
    return row, sample, exists, top, left, first_r, first_s, taps_r, taps_s


@triton.jit(do_not_specialize=_SIZES)
def forward(
    x_ptr, w_ptr, y_ptr, samples, height, width, channels, out_height, out_width, filters, column_blocks,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BY_POSITION: tl.constexpr, TAPS_FIRST: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr,
    ROUND: tl.constexpr, ROUND_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Output of the convolution, (rows, filters): positions of the output times taps and channels of the input.

    If ``FLAT``, a step of the sum has (tap, channel) pairs of several taps, for images with few channels.
    """
    row_block = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row, sample, exists, top, left, first_r, first_s, taps_r, taps_s = _output_rows(
        row_block, samples, height, width, out_height, out_width, KERNEL, STRIDE, PADDING, BM, BY_POSITION
    )
    x_rows = x_ptr + ((sample * height + top) * width + left) * channels
    w_columns = w_ptr + column * (KERNEL * KERNEL * channels)
    chunks = tl.cdiv(channels, BK)
    taps = taps_r * taps_s
    steps = tl.cdiv(KERNEL * KERNEL * channels, BK) if FLAT else taps * chunks
    first, last = _part(steps)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        if FLAT:
            pair = step * BK + k
            r = pair // channels // KERNEL
            s = pair // channels % KERNEL
            iy = top[:, None] + r[None, :]
            ix = left[:, None] + s[None, :]
            inside = exists[:, None] & (r < KERNEL)[None, :] & (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)
            x_at = x_rows[:, None] + ((r * width + s) * channels + pair % channels)[None, :]
            a = tl.load(x_at, mask=inside, other=0.0)
            w_mask = (column < filters)[:, None] & (r < KERNEL)[None, :]
            b = tl.load(w_columns[:, None] + pair[None, :], mask=w_mask, other=0.0)
        else:
            tap, chunk = _tap_and_chunk(step, taps, chunks, TAPS_FIRST)
            r = first_r + tap // taps_s
            s = first_s + tap % taps_s
            if BY_POSITION:
                inside = exists
            else:
                inside = exists & (top + r >= 0) & (top + r < height) & (left + s >= 0) & (left + s < width)
            at = chunk * BK + k
            x_at = x_rows[:, None] + ((r * width + s) * channels + at)[None, :]
            a = _load_rows(x_at, inside, at < channels, EVEN)
            w_at = w_columns[:, None] + ((r * KERNEL + s) * channels + at)[None, :]
            b = _load_even(w_at, column < filters, at < channels, EVEN)
        if ROUND:
            a = _rounded(a)
        if ROUND_WEIGHT:
            b = _rounded(b)
        total = tl.dot(a, tl.trans(b), total, input_precision="tf32")
        if ROUND and not ROUND_WEIGHT:
            total = _completed(total)
    _store(y_ptr, samples * out_height * out_width * filters, total, row, exists, filters, column, column < filters)


@triton.jit
def _input_rows(
    row_block, samples, height, width, out_height, out_width, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, BM: tl.constexpr, BY_POSITION: tl.constexpr,
):  # fmt: skip
    """Rows of a tile of the input: index, sample, whether it exists, and the first tap's position in the output.

    Also the taps of the tile: the first one and the number, in both directions.
    """
    if BY_POSITION:
        blocks = tl.cdiv(samples, BM)
        position = row_block // blocks
        sample = row_block % blocks * BM + tl.arange(0, BM)
        iy = position // width
        ix = position % width
        exists = sample < samples
        rest_y = iy % STRIDE
        rest_x = ix % STRIDE
    else:
        rest = row_block % (STRIDE * STRIDE)
        rest_y = rest // STRIDE
        rest_x = rest % STRIDE
        fewer_y = (height + STRIDE - 1) // STRIDE
        fewer_x = (width + STRIDE - 1) // STRIDE
        index = row_block // (STRIDE * STRIDE) * BM + tl.arange(0, BM)
        sample = index // (fewer_y * fewer_x)
        iy = index // fewer_x % fewer_y * STRIDE + rest_y
        ix = index % fewer_x * STRIDE + rest_x
        exists = (sample < samples) & (iy < height) & (ix < width)
    row = (sample * height + iy) * width + ix
    # Tap r of an input at iy belongs to the output at (iy + PADDING - r) / STRIDE, if that is an integer.
    first_r = (rest_y + PADDING) % STRIDE
    first_s = (rest_x + PADDING) % STRIDE
    taps_r = (KERNEL - first_r + STRIDE - 1) // STRIDE
    taps_s = (KERNEL - first_s + STRIDE - 1) // STRIDE
    oy = (iy + PADDING - first_r) // STRIDE
    ox = (ix + PADDING - first_s) // STRIDE
    if BY_POSITION:
        skipped_r = tl.maximum(0, oy - out_height + 1)
        skipped_s = tl.maximum(0, ox - out_width + 1)
        first_r += skipped_r * STRIDE
        first_s += skipped_s * STRIDE
        oy -= skipped_r
        ox -= skipped_s
        taps_r = tl.maximum(tl.minimum(taps_r - skipped_r, oy + 1), 0)
        taps_s = tl.maximum(tl.minimum(taps_s - skipped_s, ox + 1), 0)
    return row, sample, exists, oy, ox, first_r, first_s, taps_r, taps_s


@triton.jit(do_not_specialize=_SIZES)
def input_gradient(
    dy_ptr, w_ptr, dx_ptr, samples, height, width, channels, out_height, out_width, filters, column_blocks,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BY_POSITION: tl.constexpr, TAPS_FIRST: tl.constexpr, EVEN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Gradient of the input, (rows, channels): positions of the input times taps and filters of the output.

    With a stride, the positions of the input are divided by their remainders modulo the stride. All positions with the
    same remainders have the same taps, so no product is with a zero.
    """
    row_block = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row, sample, exists, oy, ox, first_r, first_s, taps_r, taps_s = _input_rows(
        row_block, samples, height, width, out_height, out_width, KERNEL, STRIDE, PADDING, BM, BY_POSITION
    )
    dy_rows = dy_ptr + ((sample * out_height + oy) * out_width + ox) * filters
    chunks = tl.cdiv(filters, BK)
    taps = taps_r * taps_s
    steps = taps * chunks
    first, last = _part(steps)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        tap, chunk = _tap_and_chunk(step, taps, chunks, TAPS_FIRST)
        i = tap // taps_s
        j = tap % taps_s
        if BY_POSITION:
            inside = exists
        else:
            inside = exists & (oy - i >= 0) & (oy - i < out_height) & (ox - j >= 0) & (ox - j < out_width)
        at = chunk * BK + k
        dy_at = dy_rows[:, None] + (at - (i * out_width + j) * filters)[None, :]
        a = _load_rows(dy_at, inside, at < filters, EVEN)
        tap_at = (first_r + i * STRIDE) * KERNEL + first_s + j * STRIDE
        w_at = w_ptr + ((at * (KERNEL * KERNEL) + tap_at) * channels)[:, None] + column[None, :]
        b = _load_even(w_at, at < filters, column < channels, EVEN)
        if ROUND:
            a = _rounded(a)
            b = _rounded(b)
        total = tl.dot(a, b, total, input_precision="tf32")
    _store(dx_ptr, samples * height * width * channels, total, row, exists, channels, column, column < channels)


@triton.jit
def _positions_inside(shift, size, out_size, STRIDE: tl.constexpr):
    """First position of the output, and the number, at which a tap is inside of the image, in one direction."""
    first = tl.maximum(0, (STRIDE - 1 - shift) // STRIDE)
    return first, tl.maximum(tl.minimum(out_size, (size - shift + STRIDE - 1) // STRIDE) - first, 0)


@triton.jit(do_not_specialize=_SIZES)
def weight_gradient(
    dy_ptr, x_ptr, dw_ptr, samples, height, width, channels, out_height, out_width, filters, column_blocks,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BY_POSITION: tl.constexpr, FLAT: tl.constexpr, ALIGNED: tl.constexpr, EVEN: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Gradient of the weight, (filters, taps * channels): a sum over the positions of the output.

    A program has one tap and a block of channels, or if ``FLAT`` a block of (tap, channel) pairs. With one tap and
    ``BY_POSITION``, the sum has only those positions at which the tap is inside of the image. If ``ALIGNED``, a step
    has whole rows or images, or lies in one, so that vectors are divided before the loop only.
    """
    column_block = tl.program_id(0) % column_blocks
    row = tl.program_id(0) // column_blocks * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    if FLAT:
        column = column_block * BN + tl.arange(0, BN)
        tap = column // channels
        channel = column % channels
        column_exists = column < KERNEL * KERNEL * channels
    else:
        blocks = tl.cdiv(channels, BN)
        tap = column_block // blocks
        channel = column_block % blocks * BN + tl.arange(0, BN)
        column = tap * channels + channel
        column_exists = channel < channels
    r = tap // KERNEL - PADDING
    s = tap % KERNEL - PADDING
    first_y = 0
    first_x = 0
    rows_y = out_height
    rows_x = out_width
    if BY_POSITION:
        first_y, rows_y = _positions_inside(r, height, out_height, STRIDE)
        first_x, rows_x = _positions_inside(s, width, out_width, STRIDE)
    area = rows_y * rows_x
    positions = samples * area
    steps = tl.cdiv(positions, BK)
    first, last = _part(steps)
    row_exists = row < filters
    if ALIGNED:
        k_sample = k // area
        k_y = k // out_width % out_height
        k_x = k % out_width
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        at = step * BK + k
        exists = at < positions
        if BY_POSITION:
            sample = at // area
            oy = first_y + at // rows_x % rows_y
            ox = first_x + at % rows_x
            dy_rows = ((sample * out_height + oy) * out_width + ox) * filters
        else:
            if ALIGNED:
                sample = step * BK // area + k_sample
                oy = step * BK % area // out_width + k_y
                ox = step * BK % out_width + k_x
            else:
                sample = at // area
                oy = at // out_width % out_height
                ox = at % out_width
            dy_rows = at * filters
        # As (filters, positions) in the order of memory: a transposed tile would be copied in pieces of 4 bytes.
        dy_mask = exists[None, :] if EVEN else exists[None, :] & row_exists[:, None]
        a = tl.load(dy_ptr + row[:, None] + dy_rows[None, :], mask=dy_mask, other=0.0)
        iy = oy * STRIDE
        ix = ox * STRIDE
        if FLAT:
            y = iy[:, None] + r[None, :]
            x = ix[:, None] + s[None, :]
            x_mask = exists[:, None] & column_exists[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
            x_at = (((sample * height + iy) * width + ix) * channels)[:, None]
            x_at = x_at + ((r * width + s) * channels + channel)[None, :]
        else:
            inside = exists
            if not BY_POSITION:
                inside = inside & (iy + r >= 0) & (iy + r < height) & (ix + s >= 0) & (ix + s < width)
            x_mask = inside[:, None] if EVEN else inside[:, None] & column_exists[None, :]
            x_at = (((sample * height + iy + r) * width + ix + s) * channels)[:, None] + channel[None, :]
        b = tl.load(x_ptr + x_at, mask=x_mask, other=0.0)
        if ROUND:
            a = _rounded(a)
            b = _rounded(b)
        total = tl.dot(a, b, total, input_precision="tf32")
    size = KERNEL * KERNEL * channels
    _store(dw_ptr, filters * size, total, row, row_exists, size, column, column_exists)


@triton.jit(do_not_specialize=_SIZES)
def weight_gradient_of_prepared(
    dy_ptr, x_ptr, dw_ptr, samples, height, width, channels, out_height, out_width, filters, column_blocks,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PITCH: tl.constexpr, EVEN: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Gradient of the weight, as `weight_gradient`, from an input as (channels, positions, samples).

    A step of the sum has samples of one position. So the tensor cores can read the input along the sum, as they need
    it for TF32, and every tap is inside of the image for all samples of a step, or outside and skipped.
    """
    blocks = tl.cdiv(channels, BN)
    column_block = tl.program_id(0) % column_blocks
    row = tl.program_id(0) // column_blocks * BM + tl.arange(0, BM)
    tap = column_block // blocks
    channel = column_block % blocks * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    r = tap // KERNEL - PADDING
    s = tap % KERNEL - PADDING
    first_y, rows_y = _positions_inside(r, height, out_height, STRIDE)
    first_x, rows_x = _positions_inside(s, width, out_width, STRIDE)
    first, last = _part(rows_y * rows_x * (PITCH // BK))
    dy_rows = dy_ptr + row[:, None] + (k * (out_height * out_width * filters))[None, :]
    x_rows = x_ptr + (channel * (height * width * PITCH))[:, None] + k[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(first, last):
        position = step // (PITCH // BK)
        start = step % (PITCH // BK) * BK
        oy = first_y + position // rows_x
        ox = first_x + position % rows_x
        exists = start + k < samples
        dy_mask = exists[None, :] if EVEN else exists[None, :] & (row < filters)[:, None]
        a = tl.load(dy_rows + ((start * out_height + oy) * out_width + ox) * filters, mask=dy_mask, other=0.0)
        x_at = x_rows + ((oy * STRIDE + r) * width + ox * STRIDE + s) * PITCH + start
        b = _load_even(x_at, channel < channels, k < BK, EVEN)
        if ROUND:
            a = _rounded(a)
        total = tl.dot(a, tl.trans(b), total, input_precision="tf32")
        if ROUND:
            total = _completed(total)
    size = KERNEL * KERNEL * channels
    _store(dw_ptr, filters * size, total, row, row < filters, size, tap * channels + channel, channel < channels)


@triton.jit
def prepare_input(
    x_ptr, out_ptr, samples, positions, channels, PITCH: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Input (samples, positions, channels) rounded, as (channels, positions, PITCH samples) with zeros at the end."""
    position = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = tl.program_id(2) * BK + tl.arange(0, BK)
    exists = (sample < samples)[:, None] & (channel < channels)[None, :]
    at = ((sample * positions + position) * channels)[:, None] + channel[None, :]
    x = tl.load(x_ptr + at, mask=exists, other=0.0)
    if ROUND:
        x = _rounded(x)
    out_at = ((channel * positions + position) * PITCH)[:, None] + sample[None, :]
    tl.store(out_ptr + out_at, tl.trans(x), mask=(channel < channels)[:, None])


@triton.jit
def prepare_weight(
    w_ptr, out_ptr, filters, channels, TAPS: tl.constexpr, MIRROR: tl.constexpr, ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Weight (filters, taps, channels) rounded; if ``MIRROR``, as (channels, taps, filters) with taps in reverse order.

    The gradient of the input of a convolution with stride 1 is a convolution with the mirrored weight. The tensor cores
    read TF32 operands only along the sum, which in the gradient of the input is that over the filters.
    """
    tap = tl.program_id(2)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = (row < filters)[:, None] & (column < channels)[None, :]
    w = tl.load(w_ptr + ((row * TAPS + tap) * channels)[:, None] + column[None, :], mask=exists, other=0.0)
    if ROUND:
        w = _rounded(w)
    if MIRROR:
        at = ((column * TAPS + TAPS - 1 - tap) * filters)[:, None] + row[None, :]
        tl.store(out_ptr + at, tl.trans(w), mask=(column < channels)[:, None] & (row < filters)[None, :])
    else:
        tl.store(out_ptr + ((row * TAPS + tap) * channels)[:, None] + column[None, :], w, mask=exists)


@triton.jit
def add_splits(part_ptr, out_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the parts, (SPLITS, size) in float32, in the order of their numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    total = tl.load(part_ptr + at, mask=exists, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(part_ptr + split * size + at, mask=exists, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=exists)
