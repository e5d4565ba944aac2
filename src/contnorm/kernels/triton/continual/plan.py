"""From the sizes of an input to what is launched: which way, which tiles, how many warps.

All choices are made here, from sizes alone, so that the same input gives the same bits on every run: nothing is timed.
`LIMITS` holds every number that was, or may be, tuned.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

__all__ = ["LIMITS", "Limits", "Plan", "Sizes", "fits", "plan_evaluation", "plan_pass"]

Way = Literal["one", "two", "three"]
MOST = 2**30  # tables and samples are addressed in 32 bits
SECTOR = 32  # bytes: what memory moves at the least


class Limits(NamedTuple):
    """The numbers to tune; values are counted with their padding to powers of two."""

    single: int = 16384  # values one program holds in registers: what fits is read once
    held: int = 32768  # the same in evaluation, which holds less besides
    one: int = 16384  # values of a block of groups up to which one program does it all, chunk by chunk
    one_rows: int = 512  # and its rows (samples times lanes)
    one_last: int = 4096  # values of one program where channels lie together: it reads in pieces of one group
    tile: int = 2048  # values of a chunk, where a program goes over its data in several
    last_tile: int = 4096  # the same in large inputs whose channels lie together
    large: int = 2**22  # values of such an input from which it is large
    rows: int = 512  # rows up to which every program makes the tables again for itself
    small: int = 2**23  # values of an input up to which a launch for the tables costs more than making them again
    share: int = 8192  # values of a program, where samples are shared out among programs
    run: int = 16  # channels of a program at least, where they lie together and samples are shared out
    near: int = 2**18  # bytes of a slab up to which a second read finds it near
    eval_run: int = 128  # bytes that lie together, in evaluation of large inputs
    merge: int = 8192  # values of the splits' sums that are read side by side
    programs: int = 264  # programs that keep the device busy: two for each of 132 multiprocessors
    span: int = 1024  # positions in a chunk at most
    channels: int = 8192  # lanes of a group at most: more would not fit a program


LIMITS = Limits()


class Sizes(NamedTuple):
    """An input seen as (N, C, L), in one of two orders of memory."""

    samples: int
    channels: int
    length: int
    groups: int
    last: bool  # channels next to each other
    itemsize: int


class Plan(NamedTuple):
    way: Way
    lanes: int  # KP: lanes of a group
    all_n: int  # NP: lanes for all samples
    block_n: int
    block_c: int
    block_l: int
    blocks: int  # of channels
    splits: int  # of positions
    span: int  # positions in a split
    split_lanes: int  # SP: lanes for the splits
    table_n: int  # the tiles of the kernel that makes tables
    table_c: int
    single: bool  # whether one chunk holds all positions
    programs: int
    warps: int
    table_warps: int


def fits(samples: int, channels: int, length: int, groups: int) -> bool:
    """Whether an input of these sizes can be taken at all."""
    small = samples * channels < MOST and channels * length < 2 * MOST
    return small and power(channels // groups) <= LIMITS.channels


@lru_cache(maxsize=4096)
def plan_pass(sizes: Sizes, backward: bool, limits: Limits) -> Plan:
    """How a training pass is done; backward holds two tensors where forward holds one."""
    n, c, length, groups, *_ = sizes
    lanes = power(c // groups)
    runs = _runs(sizes, lanes, SECTOR)
    block_n, block_c = power(n), lanes * runs
    rows = block_n * block_c
    blocks = -(-groups // runs)
    held = 2 if backward and sizes.itemsize > 2 else 1  # two tensors of two-byte values fit where one of four does
    fits_one = rows <= limits.one_rows and (not sizes.last or _in_pieces(rows * power(length) * held, runs, limits))
    if fits_one and rows * power(length) * held <= limits.single:
        return _one(blocks, lanes, block_n, block_c, power(length), single=True)
    chunk = _chunk(length, max(1, limits.tile // rows), limits)
    if fits_one and rows * length * held <= limits.one:
        return _one(blocks, lanes, block_n, block_c, chunk, single=False)
    if power(n) * lanes * _shared_runs(sizes, lanes, limits) <= limits.rows and n * c * length <= limits.small:
        return _shared(sizes, lanes, _shared_runs(sizes, lanes, limits), limits.tile, limits)
    return _three(sizes, lanes, runs, limits)


def _in_pieces(values: int, runs: int, limits: Limits) -> bool:
    """Whether one program may take channels that lie together: few values, and a group's own make a whole sector."""
    return runs == 1 and values <= limits.one_last


def _one(blocks: int, lanes: int, block_n: int, block_c: int, block_l: int, single: bool) -> Plan:
    warps = _warps(block_n * block_c * block_l)
    return Plan(
        "one", lanes, block_n, block_n, block_c, block_l, blocks, 1, 0, 1, block_n, block_c, single, blocks, warps,
        warps,
    )  # fmt: skip


def _shared(sizes: Sizes, lanes: int, runs: int, tile: int, limits: Limits) -> Plan:
    """Two launches, samples shared out among programs; each makes the tables again from the rows of all samples."""
    n, _, length, groups, *_ = sizes
    block_c = lanes * runs
    blocks = -(-groups // runs)
    block_l = _chunk(length, max(1, tile // block_c), limits)
    block_n = 1
    while (
        block_n < n
        and block_n * 2 * block_c * length <= limits.share
        and blocks * -(-n // (block_n * 2)) >= limits.programs
    ):
        block_n *= 2
    block_l = min(block_l, max(1, power(tile // (block_n * block_c) + 1) // 2))
    splits = _splits(length, block_l, blocks * -(-n // block_n), 8, limits)
    return _several("two", sizes, lanes, block_n, block_c, block_l, blocks, splits, limits)


def _three(sizes: Sizes, lanes: int, runs: int, limits: Limits) -> Plan:
    """Tiles of any channels and samples: first along memory, then across it, until a tile is full."""
    n, c, length, *_ = sizes
    if sizes.last:
        tile = limits.last_tile if n * c * length > limits.large else limits.tile
        block_c = min(power(c), 128, tile)
        block_l = _chunk(length, tile // block_c, limits)
    else:
        tile = limits.tile
        block_l = _chunk(length, tile, limits)
        block_c = min(power(c), tile // block_l)
    block_n = min(power(n), max(1, tile // (block_l * block_c)))
    blocks = -(-c // block_c)
    splits = _splits(length, block_l, blocks * -(-n // block_n), max(1, limits.merge // (lanes * runs)), limits)
    return _several("three", sizes, lanes, block_n, block_c, block_l, blocks, splits, limits)


def _several(
    way: Way,
    sizes: Sizes,
    lanes: int,
    block_n: int,
    block_c: int,
    block_l: int,
    blocks: int,
    splits: int,
    limits: Limits,
) -> Plan:
    chunks = -(-sizes.length // block_l)
    span = -(-chunks // splits) * block_l
    splits = -(-sizes.length // span)
    split_lanes = power(splits)
    table_c = lanes * _runs(sizes, lanes, SECTOR)
    table_n = min(power(sizes.samples), max(1, limits.merge // (table_c * split_lanes)))
    return Plan(
        way,
        lanes,
        power(sizes.samples),
        block_n,
        block_c,
        block_l,
        blocks,
        splits,
        span,
        split_lanes,
        table_n,
        table_c,
        block_l >= sizes.length,
        blocks * splits * -(-sizes.samples // block_n),
        _warps(block_n * block_c * block_l),
        _warps(table_n * table_c * split_lanes),
    )


@lru_cache(maxsize=4096)
def plan_evaluation(sizes: Sizes, limits: Limits) -> Plan:
    """One program holds whole slabs: several small ones, or one of any size, chunk by chunk."""
    n, c, length, groups, *_ = sizes
    lanes = power(c // groups)
    runs = _runs(sizes, lanes, SECTOR)
    block_c = lanes * runs
    blocks = -(-groups // runs)
    single = block_c * power(length) <= limits.held
    if not single and (sizes.last or block_c * length * sizes.itemsize > limits.near):
        return _shared(sizes, lanes, _runs(sizes, lanes, limits.eval_run), limits.last_tile, limits)
    block_l = power(length) if single else _chunk(length, max(1, limits.tile // block_c), limits)
    wanted = max(1, n * blocks // limits.programs)  # no more samples in a program than leave programs enough
    block_n = min(power(n), power(wanted + 1) // 2, max(1, limits.tile // 2 // (block_c * block_l)))
    programs = blocks * -(-n // block_n)
    warps = _warps(block_n * block_c * block_l)
    return Plan(
        "one", lanes, block_n, block_n, block_c, block_l, blocks, 1, 0, 1, block_n, block_c, single, programs, warps,
        warps,
    )  # fmt: skip


def power(value: int) -> int:
    """The least power of two that is not below a value.

    Example:
        >>> [power(value) for value in (1, 2, 5, 20)]
        [1, 2, 8, 32]
    """
    return 1 << (value - 1).bit_length()


def _runs(sizes: Sizes, lanes: int, least: int) -> int:
    """Groups in a program: one, or as many as make what lies together in memory no shorter than so many bytes."""
    run = lanes * sizes.itemsize * (1 if sizes.last else sizes.length)
    return min(power(-(-least // run)), power(sizes.groups))


def _shared_runs(sizes: Sizes, lanes: int, limits: Limits) -> int:
    """The same where samples are shared out; with channels that lie together, so many channels at least."""
    least = limits.run * sizes.itemsize if sizes.last else SECTOR
    return _runs(sizes, lanes, least)


def _chunk(length: int, most: int, limits: Limits) -> int:
    """Positions in a chunk: the most that leaves little of the last chunk empty."""
    block = max(1, min(power(length), power(most + 1) // 2, limits.span))
    wasted = {size: -(-length // size) * size - length for size in (block, block // 2, block // 4) if size}
    return next((size for size, waste in wasted.items() if waste * 8 <= length), min(wasted, key=wasted.__getitem__))


def _splits(length: int, chunk: int, programs: int, most: int, limits: Limits) -> int:
    """Parts to cut the positions into, so that there are programs enough."""
    return max(1, min(-(-limits.programs // programs), -(-length // chunk), most))


def _warps(values: int) -> int:
    """About 16 values a thread: with more, the tables of a tile no longer fit its registers."""
    return min(16, power(max(2, values // 512)))
