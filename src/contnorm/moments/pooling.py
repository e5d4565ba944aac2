"""Exact moments pooled over the inputs of a layer, over batches and over processes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contnorm.moments.batches import WeightGroups
from contnorm.moments.layers import batch_moments

__all__ = ["Meetings", "NoLockstepError", "PooledMoments"]


@dataclass
class PooledMoments:
    """Weight, mean and sum of squared deviations, merged batch by batch (Chan et al.), in float64."""

    count: int = 0  # values per channel
    total: float = 0  # sum of their weights; an int if they have none
    total_squares: float = 0  # sum of the squared weights
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    @property
    def var(self) -> Tensor:
        return self.squares / self.total

    @property
    def effective(self) -> float:
        """The effective number of values (Kish): their number if all weights are equal."""
        if self.count == self.total == self.total_squares:
            return self.count
        return self.total * self.total / self.total_squares

    def add_input(self, layer: nn.Module, x: Tensor, groups: WeightGroups | None) -> None:
        """Add the values of a layer's input, by the weights of its samples."""
        if groups and groups[0][1] is not None and sum(len(rows) for _, rows in groups if rows is not None) != len(x):
            raise ValueError(f"reestimate: weights(batch) must have {len(x)} weights, as many as a norm has samples.")
        for weight, rows in [(1, None)] if groups is None else groups:
            part = x if rows is None else x[rows.to(x.device)]
            if weight and part.numel():
                count = part.numel() // part.shape[1]
                mean, var = batch_moments(layer, part)
                added = count * weight
                self.merge(PooledMoments(count, added, added * weight, mean, var * added))

    def merge(self, other: PooledMoments) -> None:
        """Add the values of another pool."""
        if other.total == 0:
            return
        total = self.total + other.total
        mean, squares = self.mean.to(other.mean.device), self.squares.to(other.mean.device)
        off = other.mean - mean
        share = other.total / total
        self.mean = mean + off * share
        self.squares = squares + other.squares + off * off * (self.total * share)
        self.count, self.total = self.count + other.count, total
        self.total_squares += other.total_squares

    def to(self, device: torch.device | str) -> PooledMoments:
        return replace(self, mean=self.mean.to(device), squares=self.squares.to(device))


class NoLockstepError(RuntimeError):
    """Batches or processes can't advance together: too little memory, or they do not call the same layers once each."""


class Meetings:
    """Context manager in which the processes of a group meet at each norm layer that they measure, and at the end.

    A process that can't go on says so instead. Then all leave: with a RuntimeError if one has failed, and otherwise
    with `NoLockstepError`. So all processes meet the same number of times, and none waits for another.

    Args:
        group: The process group; None for this process alone.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._open = group is not None

    def pool(self, name: str, pool: PooledMoments) -> PooledMoments:
        """Merge the moments of a layer over the processes, in their order."""
        if self.group is None:
            return pool
        merged = PooledMoments()
        for other in self._meet("at", name, pool.to("cpu")):
            merged.merge(other)
        return merged.to(pool.mean.device)

    def _meet(self, state: str, detail: str = "", pool: PooledMoments | None = None) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (state, detail, pool), self.group)
        self._open = state == "at" and all(there[:2] == (state, detail) for there in gathered)
        for rank, (state_there, detail_there, _) in enumerate(gathered):
            if state_there == "failed":
                raise RuntimeError(f"reestimate: process {rank} of the group failed: {detail_there}")
        if len({there[:2] for there in gathered}) > 1:
            raise NoLockstepError("reestimate: the processes of the group have data that reaches different layers.")
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
