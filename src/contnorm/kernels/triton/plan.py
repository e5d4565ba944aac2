"""Launch plans: number of launches, tile sizes and warps, chosen from the sizes of an input.

All choices depend on sizes only and nothing is autotuned, so that results are bit-exact across runs. `LIMITS` holds all
tunable numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

LaunchCount = Literal["one", "cluster", "two", "three"]
MOST = 2**30  # tables and samples are addressed in 32 bits
SECTOR = 32  # bytes: the smallest memory transaction


class LaunchLimits(NamedTuple):
    """Tunable numbers; values are counted after padding to powers of two."""

    single: int = 16384  # values that one program can hold in registers, and then reads only once
    held: int = 32768  # the same in evaluation, which needs fewer other registers
    one: int = 16384  # values of a block of groups up to which one program processes all of it, in chunks
    one_rows: int = 512  # rows (samples times lanes) up to which it does
    one_last: int = 4096  # values of one program in channels_last layout, where it reads one group at a time
    tile: int = 2048  # values of a chunk, if a program processes several
    stages: int = 4  # chunks in flight, of four-byte values
    half_stages: int = 5  # the same, of two-byte values
    staged: int = 3  # chunks of a program from which several are in flight
    staged_programs: int = 2048  # programs up to which they are; more have enough loads in flight without
    rows: int = 512  # rows up to which every program recomputes the tables
    small: int = 2**23  # values of an input up to which recomputing the tables is faster than a launch for them
    small_last: int = 2**22  # the same in channels_last layout
    share: int = 8192  # values of a program, if samples are distributed over programs
    run: int = 16  # minimum channels of a program, if samples are distributed and the layout is channels_last
    near: int = 2**18  # bytes of a slab up to which a second read hits the cache
    cached: int = 24 * 2**20  # bytes of an input up to which all of it stays in the cache between two launches
    eval_run: int = 128  # contiguous bytes to read, in evaluation of large inputs
    merge: int = 8192  # values of the sums of splits that are read at once
    programs: int = 264  # programs that keep the device busy: two for each of 132 multiprocessors
    last_programs: int = 384  # the same in channels_last layout, where a chunk has fewer warps
    span: int = 1024  # maximum positions of a chunk
    channels: int = 8192  # maximum lanes of a group: more would not fit a program
    members: int = 16  # maximum programs of a cluster: above 8, Triton launches 16 only
    part: int = 4  # minimum samples of a program in a cluster
    cluster: int = 8192  # values that such a program holds in registers, two tensors counted together
    cluster_least: int = 4096  # values of a block of groups from which a cluster is faster than one program
    eval_program: int = 8192  # values that a program of four warps holds in evaluation in channels_last layout
    eval_near: int = 2**17  # bytes of a block of channels up to which it does; above, programs have 16 warps
    eval_least: int = 256  # positions from which evaluation in channels_last layout uses such programs
    eval_part: int = 2**17  # bytes of a program that reads its values twice in evaluation in channels_last layout
    table_run: int = 4  # contiguous bytes to read, in the kernel that makes tables
    table_values: int = 128  # values of a warp in this kernel, up to eight warps


LIMITS = LaunchLimits()


class Sizes(NamedTuple):
    """Sizes of an input viewed as (N, C, L), and its memory layout."""

    samples: int
    channels: int
    length: int
    groups: int
    last: bool  # channels_last layout
    itemsize: int


class LaunchPlan(NamedTuple):
    launches: LaunchCount
    lanes: int  # KP: lanes of a group
    all_n: int  # NP: lanes for all samples
    block_n: int
    block_c: int
    block_l: int
    blocks: int  # blocks of channels
    splits: int  # splits of the positions
    span: int  # positions in a split
    split_lanes: int  # SP: lanes for the splits
    table_n: int  # the tiles of the kernel that makes tables
    table_c: int
    single: bool  # whether one chunk holds all positions
    programs: int
    warps: int
    table_warps: int
    members: int = 1  # programs that share a block of channels in a cluster
    chunks: int = 0  # chunks that a program of a cluster holds in registers; 0: it reads them twice
    full: int = 0  # 1 if all chunks are full, 2 if all but the last of a program are
    stages: int = 1  # chunks in flight
    reverse: bool = False  # whether the last launch runs in reverse order


def fits(samples: int, channels: int, length: int, groups: int) -> bool:
    """Whether the kernels support an input of these sizes."""
    small = samples * channels < MOST and channels * length < 2 * MOST
    return small and power(channels // groups) <= LIMITS.channels


@lru_cache(maxsize=4096)
def plan_training(sizes: Sizes, backward: bool, limits: LaunchLimits) -> LaunchPlan:
    """Plan a training pass; backward holds two tensors in registers, forward one."""
    n, c, length, groups, *_ = sizes
    lanes = power(c // groups)
    runs = _runs(sizes, lanes, SECTOR)
    block_n, block_c = power(n), lanes * runs
    rows = block_n * block_c
    blocks = -(-groups // runs)
    held = (
        2 if backward and sizes.itemsize > 2 else 1
    )  # two tensors of two-byte values need as much as one of four-byte values
    # In channels_last layout, one program processes few values, of groups that fill a memory sector each.
    in_pieces = not sizes.last or (runs == 1 and rows * power(length) * held <= limits.one_last)
    fits_one = rows <= limits.one_rows and in_pieces
    if (plan := _cluster(sizes, backward, lanes, limits)) is not None:
        return plan
    if fits_one and rows * power(length) * held <= limits.single:
        return _one(blocks, lanes, block_n, block_c, power(length), single=True)
    chunk = _chunk(length, max(1, limits.tile // rows), limits)
    if fits_one and rows * length * held <= limits.one:
        return _one(blocks, lanes, block_n, block_c, chunk, single=False)
    small = limits.small_last if sizes.last else limits.small
    if power(n) * lanes * _shared_runs(sizes, lanes, limits) <= limits.rows and n * c * length <= small:
        return _shared(sizes, lanes, _shared_runs(sizes, lanes, limits), limits)
    return _three(sizes, lanes, runs, limits)


def _cluster(sizes: Sizes, backward: bool, lanes: int, limits: LaunchLimits) -> LaunchPlan | None:
    """Plan one launch in clusters, if the programs of a cluster can hold a block of groups in their registers."""
    n, _, length, groups, last, itemsize = sizes
    both = backward and itemsize > 2  # two tensors of two-byte values need as much as one of four-byte values
    runs = _runs(sizes, lanes, SECTOR if both or itemsize == 2 else 2 * SECTOR)
    block_n = power(limits.part)
    while -(-n // block_n) > min(limits.members, 8) and -(-n // block_n) != limits.members:
        block_n *= 2
    members, rows = -(-n // block_n), block_n * lanes * runs
    values = rows * power(length)
    if members < 2 or values * (1 + both) > limits.cluster or n * lanes * runs * length < limits.cluster_least:
        return None
    warps = min(16, max(2, values * (1 + (both or not last)) // 2048))
    vector = 16 // itemsize  # values of the widest load of a thread
    spread = vector * 32 * warps // rows if last else vector * 32 // (lanes * runs)
    block_l = min(power(length), max(1, spread))
    blocks = -(-groups // runs)
    return LaunchPlan(
        "cluster", lanes, power(n), block_n, lanes * runs, block_l, blocks, 1, length, 1, block_n, lanes * runs, True,
        blocks * members, warps, warps, members, -(-length // block_l),
    )  # fmt: skip


def _one(blocks: int, lanes: int, block_n: int, block_c: int, block_l: int, single: bool) -> LaunchPlan:
    warps = _warps(block_n * block_c * block_l)
    return LaunchPlan(
        "one", lanes, block_n, block_n, block_c, block_l, blocks, 1, 0, 1, block_n, block_c, single, blocks, warps,
        warps,
    )  # fmt: skip


def _shared(sizes: Sizes, lanes: int, runs: int, limits: LaunchLimits) -> LaunchPlan:
    """Plan two launches with samples distributed over programs; each program recomputes the tables from all rows."""
    n, _, length, groups, *_ = sizes
    block_c = lanes * runs
    blocks = -(-groups // runs)
    block_l = _chunk(length, max(1, limits.tile // block_c), limits)
    block_n = 1
    while (
        block_n < n
        and block_n * 2 * block_c * length <= limits.share
        and blocks * -(-n // (block_n * 2)) >= limits.programs
    ):
        block_n *= 2
    block_l = min(block_l, max(1, power(limits.tile // (block_n * block_c) + 1) // 2))
    splits = _splits(length, block_l, blocks * -(-n // block_n), 8, limits)
    return _several("two", sizes, lanes, block_n, block_c, block_l, blocks, splits, limits)


def _three(sizes: Sizes, lanes: int, runs: int, limits: LaunchLimits) -> LaunchPlan:
    """Plan three launches with tiles of any channels and samples, filled along contiguous memory first."""
    n, c, length, *_ = sizes
    tile = limits.tile
    if sizes.last:
        block_c = min(power(c), 128, tile)
        block_l = _chunk(length, tile // block_c, limits)
    else:
        block_l = _chunk(length, tile, limits)
        block_c = min(power(c), tile // block_l)
    block_n = min(power(n), max(1, tile // (block_l * block_c)))
    blocks = -(-c // block_c)
    programs = blocks * -(-n // block_n)
    if sizes.last:  # if there are many already, in smaller parts programs read nearby memory at the same time
        many = programs >= limits.programs
        limits = limits._replace(programs=4 * limits.programs if many else limits.last_programs)
    splits = _splits(length, block_l, programs, max(1, limits.merge // (lanes * runs)), limits)
    return _several("three", sizes, lanes, block_n, block_c, block_l, blocks, splits, limits)


def _several(
    launches: LaunchCount,
    sizes: Sizes,
    lanes: int,
    block_n: int,
    block_c: int,
    block_l: int,
    blocks: int,
    splits: int,
    limits: LaunchLimits,
) -> LaunchPlan:
    chunks = -(-sizes.length // block_l)
    span = -(-chunks // splits) * block_l
    splits = -(-sizes.length // span)
    split_lanes = power(splits)
    table_c = lanes * min(power(-(-limits.table_run // (4 * lanes))), power(sizes.groups))
    table_n = min(power(sizes.samples), max(1, limits.merge // (table_c * split_lanes)))
    size = sizes.samples * sizes.channels * sizes.length * sizes.itemsize
    programs = blocks * splits * -(-sizes.samples // block_n)
    # The kernel that makes tables waits for its loads: few values per thread.
    values = table_n * table_c * split_lanes
    table_warps = max(_warps(values), min(8, power(max(2, values // limits.table_values))))
    return LaunchPlan(
        launches,
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
        programs,
        _warps(block_n * block_c * block_l),
        table_warps,
        full=_full(sizes, lanes, block_n, block_c, block_l),
        stages=_stages(sizes, span // block_l, limits) if programs <= limits.staged_programs else 1,
        reverse=launches == "three" or size > limits.cached,
    )


def _full(sizes: Sizes, lanes: int, block_n: int, block_c: int, block_l: int) -> int:
    """Return 1 if all chunks are full, 2 if all but the last of a program are, else 0."""
    n, c, length, groups, *_ = sizes
    if n % block_n or c % block_c or lanes * groups != c:
        return 0
    return 1 if length % block_l == 0 else 2


def _stages(sizes: Sizes, chunks: int, limits: LaunchLimits) -> int:
    """Return the chunks in flight, for programs of so many chunks; smaller values need more, for the same bytes."""
    if chunks < limits.staged:
        return 1
    return min(chunks - 1, limits.stages if sizes.itemsize > 2 else limits.half_stages)


@lru_cache(maxsize=4096)
def plan_evaluation(sizes: Sizes, limits: LaunchLimits) -> LaunchPlan:
    """Plan evaluation: a program processes whole slabs, several small ones, or one of any size in chunks."""
    n, c, length, groups, *_ = sizes
    lanes = power(c // groups)
    runs = _runs(sizes, lanes, SECTOR)
    block_c = lanes * runs
    blocks = -(-groups // runs)
    if sizes.last and length >= limits.eval_least and (plan := _evaluation_last(sizes, lanes, limits)) is not None:
        return plan
    single = block_c * power(length) <= limits.held
    if not single and (sizes.last or block_c * length * sizes.itemsize > limits.near):
        return _shared(sizes, lanes, _runs(sizes, lanes, limits.eval_run), limits)
    block_l = power(length) if single else _chunk(length, max(1, limits.tile // block_c), limits)
    wanted = max(1, n * blocks // limits.programs)  # limits samples per program, to have enough programs
    block_n = min(power(n), power(wanted + 1) // 2, max(1, limits.tile // 2 // (block_c * block_l)))
    programs = blocks * -(-n // block_n)
    warps = _warps(block_n * block_c * block_l)
    return LaunchPlan(
        "one", lanes, block_n, block_n, block_c, block_l, blocks, 1, 0, 1, block_n, block_c, single, programs, warps,
        warps,
    )  # fmt: skip


def _evaluation_last(sizes: Sizes, lanes: int, limits: LaunchLimits) -> LaunchPlan | None:
    """Plan evaluation in channels_last layout: programs or clusters that hold contiguous runs of 64 bytes."""
    n, _, length, groups, _, itemsize = sizes
    runs = _runs(sizes, lanes, 2 * SECTOR)
    block_c, blocks = lanes * runs, -(-groups // runs)
    values, programs = block_c * length, n * blocks
    twice = _evaluation_twice(sizes, lanes, limits) if _is_read_twice(sizes, values, programs, limits) else None
    if twice is not None:
        return twice
    if values <= limits.eval_program:
        return _evaluation_held(sizes, lanes, block_c, blocks, 1, 4) if programs >= limits.programs else None
    if values * itemsize <= limits.eval_near and values > 2 * limits.eval_program:
        members, warps = power(-(-values // limits.eval_program)), 4
    elif itemsize == 4 and values * itemsize > limits.eval_near:
        members, warps = power(-(-values // (4 * limits.eval_program))), 16
    else:
        return None
    return _evaluation_held(sizes, lanes, block_c, blocks, members, warps) if members <= 8 else None


def _evaluation_held(sizes: Sizes, lanes: int, block_c: int, blocks: int, members: int, warps: int) -> LaunchPlan:
    """Plan programs that hold their values in registers, in chunks of one load of 16 bytes per thread."""
    block_l = max(1, min(power(sizes.length), 16 // sizes.itemsize * 32 * warps // block_c))
    chunks = -(-sizes.length // (members * block_l))
    span = chunks * block_l
    members = -(-sizes.length // span)
    return LaunchPlan(
        "cluster", lanes, 1, 1, block_c, block_l, blocks, 1, span, 1, 1, block_c, True,
        sizes.samples * blocks * members, warps, warps, members, chunks,
    )  # fmt: skip


def _is_read_twice(sizes: Sizes, values: int, programs: int, limits: LaunchLimits) -> bool:
    """Whether reading twice is faster than registers: two-byte values, and inputs about as large as the cache."""
    if sizes.itemsize == 2:
        medium = limits.eval_program < values <= 4 * limits.eval_program and 2 * programs >= limits.programs
        return medium or values * sizes.itemsize > limits.eval_near
    size = sizes.samples * sizes.channels * sizes.length * sizes.itemsize
    return values > limits.eval_program and limits.cached < size <= 2 * limits.cached


def _evaluation_twice(sizes: Sizes, lanes: int, limits: LaunchLimits) -> LaunchPlan | None:
    """Plan programs or clusters that read contiguous runs of 128 bytes twice; the second time, from the cache."""
    n, _, length, groups, _, itemsize = sizes
    runs = _runs(sizes, lanes, limits.eval_run)
    block_c, blocks = lanes * runs, -(-groups // runs)
    block_l = _chunk(length, max(1, limits.tile // block_c), limits)
    chunks = -(-length // block_l)
    members = power(-(-block_c * length * itemsize // limits.eval_part))
    while 4 * n * blocks * members < 3 * limits.programs:  # for enough programs
        members *= 2
    if members > limits.members:
        return None
    for most in (members, min(members, 8)):  # Triton launches clusters of 16, or of 8 and less
        span = -(-chunks // most) * block_l
        parts = -(-length // span)
        if parts <= 8 or parts == limits.members:
            break
    warps = _warps(block_c * block_l)
    return LaunchPlan(
        "cluster", lanes, 1, 1, block_c, block_l, blocks, 1, span, 1, 1, block_c, False, n * blocks * parts, warps,
        warps, parts, 0, _full(sizes, lanes, 1, block_c, block_l), _stages(sizes, span // block_l, limits),
    )  # fmt: skip


def power(value: int) -> int:
    """Return the smallest power of two that is at least the value.

    Example:
        >>> [power(value) for value in (1, 2, 5, 20)]
        [1, 2, 8, 32]
    """
    return 1 << (value - 1).bit_length()


def _runs(sizes: Sizes, lanes: int, least: int) -> int:
    """Return the groups per program: one, or enough for contiguous reads of at least ``least`` bytes."""
    run = lanes * sizes.itemsize * (1 if sizes.last else sizes.length)
    return min(power(-(-least // run)), power(sizes.groups))


def _shared_runs(sizes: Sizes, lanes: int, limits: LaunchLimits) -> int:
    """The same if samples are distributed; in channels_last layout, at least ``limits.run`` channels."""
    least = limits.run * sizes.itemsize if sizes.last else SECTOR
    return _runs(sizes, lanes, least)


def _chunk(length: int, most: int, limits: LaunchLimits) -> int:
    """Return the positions per chunk: the largest number that leaves little of the last chunk empty."""
    block = max(1, min(power(length), power(most + 1) // 2, limits.span))
    wasted = {size: -(-length // size) * size - length for size in (block, block // 2, block // 4) if size}
    return next((size for size, waste in wasted.items() if waste * 8 <= length), min(wasted, key=wasted.__getitem__))


def _splits(length: int, chunk: int, programs: int, most: int, limits: LaunchLimits) -> int:
    """Return the number of splits of the positions, to have enough programs."""
    return max(1, min(-(-limits.programs // programs), -(-length // chunk), most))


def _warps(values: int) -> int:
    """Return the number of warps: about 16 values per thread, since with more the tables do not fit in registers."""
    return min(16, power(max(2, values // 512)))
