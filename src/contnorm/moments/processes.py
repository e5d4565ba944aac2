"""Moments pooled over the processes of a group, each of which has measured its own batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from contnorm.moments.pooling import PooledMoments

__all__ = ["check_process_group", "pool_over_processes"]


def check_process_group(group: Any) -> None:
    """Raise a ValueError for a process group while there is none."""
    if group is not None and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "reestimate: process_group is given, but torch.distributed is not initialized. Call init_process_group, "
            "or leave process_group out to use the batches of this process."
        )


def pool_over_processes(measure: Callable[[], dict[str, PooledMoments]], group: Any) -> dict[str, PooledMoments]:
    """Run a measurement on each process and merge the moments of each layer, in the order of the processes.

    Every process gets the same result. If a process fails, the others raise an error too instead of waiting for it.

    Args:
        measure: The measurement of this process.
        group: The process group; None to measure on this process alone.
    """
    if group is None:
        return measure()
    try:
        pools, failure = measure(), None
    except Exception as error:  # the other processes must not wait for this one
        pools, failure = {}, error
    gathered: list[Any] = [None] * dist.get_world_size(group)
    message = None if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(gathered, (message, {name: pool.to("cpu") for name, pool in pools.items()}), group)
    if failure is not None:
        raise failure
    for rank, (message_there, pools_there) in enumerate(gathered):
        if message_there is not None:
            raise RuntimeError(f"reestimate: process {rank} of the group failed: {message_there}")
        if list(pools_there) != list(pools):
            raise ValueError(
                f"reestimate: the data of process {rank} of the group reaches the layers {list(pools_there)}, and that "
                f"of this process {list(pools)}. Give each process batches that use the same layers."
            )
    return {name: _merged([there[name] for _, there in gathered]).to(pool.device) for name, pool in pools.items()}


def _merged(pools: list[PooledMoments]) -> PooledMoments:
    merged = PooledMoments()
    for pool in pools:
        merged.merge(pool)
    return merged
