"""Exact moments pooled over batches: of the inputs of layers, which forward hooks measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.moments.buffers import batch_moments, normalizing_variance, write_moments
from contnorm.moments.weights import WeightGroups

__all__ = ["PooledMoments", "StopForward", "add_input", "first_input", "own_moments_hook", "pooling_hook"]


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

    def add(self, count: int, mean: Tensor, var: Tensor, weight: float = 1) -> None:
        if count == 0:
            return
        added = count * weight
        total = self.total + added
        off = mean - self.mean.to(mean.device)
        share = added / total
        self.mean = self.mean.to(mean.device) + off * share
        self.squares = self.squares.to(mean.device) + var * added + off * off * (self.total * share)
        self.count, self.total = self.count + count, total
        self.total_squares += added * weight

    def merge(self, other: PooledMoments) -> None:
        """Add the values of another pool on the same device."""
        if other.total == 0:
            return
        total = self.total + other.total
        off = other.mean - self.mean
        share = other.total / total
        self.mean = self.mean + off * share
        self.squares = self.squares + other.squares + off * off * (self.total * share)
        self.count, self.total = self.count + other.count, total
        self.total_squares += other.total_squares

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def to(self, device: torch.device | str) -> PooledMoments:
        return replace(self, mean=self.mean.to(device), squares=self.squares.to(device))


def pooling_hook(
    name: str, pool: PooledMoments, calls_remaining: dict[str, int], groups: WeightGroups | None
) -> Callable[..., None]:
    def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
        if calls_remaining[name] == 0:
            return
        add_input(pool, name, layer, first_input(args, kwargs), groups)
        calls_remaining[name] -= 1
        if not any(calls_remaining.values()):
            raise StopForward

    return hook


def own_moments_hook(name: str, pools: dict[str, PooledMoments], groups: WeightGroups | None) -> Callable[..., None]:
    """Return a hook that adds an input to the layer's pool, and sets the layer's moments to those of this input."""

    def hook(layer: nn.Module, args: Any, kwargs: Any) -> None:
        own = PooledMoments()
        add_input(own, name, layer, first_input(args, kwargs), groups)
        if own.count == 1:
            with_weight = "" if groups is None else " with a weight above 0"
            raise ValueError(
                f"reestimate: a batch has one value per channel{with_weight} at layer {name!r}, and its variance needs "
                f"two or more. With exact=False, each batch is normalized with its own moments: give larger batches."
            )
        if own.count:
            moments = own.mean, normalizing_variance(layer, own.var, own.effective)
            write_moments({name: layer}, {name: moments})
        pools.setdefault(name, PooledMoments()).merge(own)

    return hook


def first_input(args: Any, kwargs: Any) -> Tensor:
    """Return the input of a layer, from the arguments of its call."""
    x: Tensor = args[0] if args else next(iter(kwargs.values()))
    return x


def add_input(pool: PooledMoments, name: str, layer: nn.Module, x: Tensor, groups: WeightGroups | None) -> None:
    """Add the values of a layer's input to a pool."""
    if groups is not None:
        _add_groups(pool, name, layer, x, groups)
    elif x.numel():
        pool.add(x.numel() // x.shape[1], *batch_moments(layer, x))


def _add_groups(pool: PooledMoments, name: str, layer: nn.Module, x: Tensor, groups: WeightGroups) -> None:
    samples = _samples(groups)
    if samples is not None and len(x) != samples:
        raise ValueError(
            f"reestimate: weights(batch) has {samples} weights, and the input of layer {name!r} has {len(x)} samples. "
            f"Return one weight for each sample of the first dimension."
        )
    for weight, rows in groups:
        part = x[rows.to(x.device)] if isinstance(rows, Tensor) else x
        if weight and part.numel():
            pool.add(part.numel() // part.shape[1], *batch_moments(layer, part), weight)


def _samples(groups: WeightGroups) -> int | None:
    """Return the number of samples that have weights; None if the batch has one weight."""
    counts = [len(rows) if isinstance(rows, Tensor) else rows for _, rows in groups]
    return sum(count for count in counts if count is not None) if None not in counts else None


class StopForward(BaseException):
    """Ends a forward pass. A BaseException, so that no ``except Exception`` in the model catches it."""
