"""Moments pooled over the processes of a group, each of which has measured its own batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from contnorm.moments.lockstep import NoLockstepError
from contnorm.moments.pooling import PooledMoments

__all__ = ["Meetings", "check_process_group", "pool_over_processes"]


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


class Meetings:
    """Context manager of a sweep: the processes of a group meet at each norm layer and at the end.

    A process that can't go on says so instead. Then the sweeps of all processes end: with a RuntimeError if it has
    failed, and otherwise with `NoLockstepError`. So all processes meet the same number of times, and none waits.

    Args:
        group: The process group; None for this process alone.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._open = group is not None

    def pool(self, name: str, pool: PooledMoments) -> PooledMoments:
        """Merge the moments of a layer over the processes, in their order."""
        return pool if self.group is None else _merged(self._meet("at", name, pool.to("cpu"))).to(pool.device)

    def _meet(self, state: str, detail: str = "", pool: PooledMoments | None = None) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (state, detail, pool), self.group)
        self._open = state == "at" and all(there[:2] == (state, detail) for there in gathered)
        for rank, (state_there, detail_there, _) in enumerate(gathered):
            if state_there == "failed":
                raise RuntimeError(f"reestimate: process {rank} of the group failed: {detail_there}")
        if len({there[:2] for there in gathered}) > 1:
            raise NoLockstepError
        return [there[2] for there in gathered]

    def __enter__(self) -> Meetings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        if error is None:
            self._meet("end")
        elif isinstance(error, NoLockstepError | torch.OutOfMemoryError):
            self._meet("no sweep")
        elif isinstance(error, Exception):
            with suppress(RuntimeError):  # this process raises its own error
                self._meet("failed", f"{type(error).__name__}: {error}")


def _merged(pools: list[PooledMoments]) -> PooledMoments:
    merged = PooledMoments()
    for pool in pools:
        merged.merge(pool)
    return merged
