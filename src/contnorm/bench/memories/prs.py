"""Partitioning reservoir sampling (Kim et al., ECCV 2020): a reservoir for long-tailed samples of several labels each.

A reservoir keeps what is frequent. This one gives every label a share of the memory that grows with a power ``rho`` of
its frequency; a power near zero gives rare and frequent labels almost the same. A sample is let in by the label that is
rarest in the stream, and the one it displaces is chosen so that the shares come out nearest to their targets.

The published code has a quirk: its search for the sample to displace starts from a cost of ``capacity``, so that where
every cost is higher the first candidate goes, whatever its cost. ``quirk=True`` does the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories.base import NOT_KEPT, Filled, Slots

__all__ = ["PartitioningReservoir"]

Floats = NDArray[np.float64]
SAME = 1e-9  # costs nearer to each other than this are equal: their sums were only taken in another order


class PartitioningReservoir:
    """A memory whose labels have their shares.

    Args:
        capacity: Slots.
        labels: How many labels there are.
        rho: The power of a label's frequency that its share follows; -0.03 and 0.02 in the papers.
        generator: Where its chances come from.
        quirk: Displace as the published code does.

    Example:
        >>> memory = PartitioningReservoir(2, labels=3, rho=0.0, generator=np.random.default_rng(0))
        >>> memory.offer(np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]]), task=0).tolist()  # a new label is always let in
        [0, 1, 0]
    """

    def __init__(
        self, capacity: int, labels: int, rho: float, generator: np.random.Generator, quirk: bool = False
    ) -> None:
        if capacity < 1 or labels < 1:
            raise ValueError(f"PartitioningReservoir: capacity={capacity} and labels={labels} must be 1 or more.")
        self.capacity, self.labels, self.rho, self.quirk = capacity, labels, rho, quirk
        self._generator = generator
        self._seen = 0
        self._filled = Filled(capacity)
        self._held = np.zeros((capacity, labels), dtype=bool)  # the labels of what is in each slot
        self._held_count = np.zeros(labels, dtype=np.int64)  # l: how many slots carry a label
        self._stream_count = np.zeros(labels, dtype=np.int64)  # n: how often the stream has shown it
        self._share = np.zeros(labels)  # p: its target share; that of a label not in memory is stale

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        if labels.ndim != 2 or labels.shape[1] != self.labels:
            raise ValueError(
                f"PartitioningReservoir: expected labels of shape (samples, {self.labels}), 0 or 1 each, got "
                f"{labels.shape}. For one label a sample, give one-hot rows."
            )
        return np.array([self._offer_one(row.astype(bool), task) for row in labels], dtype=np.int64)

    def readable(self, before_task: int | None = None) -> Slots:
        return self._filled.readable(before_task)

    def _offer_one(self, sample: NDArray[np.bool_], task: int) -> int:
        slot = NOT_KEPT
        if self._seen < self.capacity:
            slot = self._seen
        elif self._generator.random() < self._chance_to_enter(sample):
            slot = self._slot_to_free()
            self._held_count -= self._held[slot]
        if slot != NOT_KEPT:
            self._held[slot] = sample
            self._held_count += sample
            self._filled.write(slot, task)
        self._seen += 1
        self._stream_count += sample
        self._set_shares()
        return slot

    def _chance_to_enter(self, sample: NDArray[np.bool_]) -> float:
        """The share a label is due over how often it was seen, weighted so that the rarest label decides."""
        if not sample.any():
            return 0.0
        seen = self._stream_count[sample]
        with np.errstate(divide="ignore", invalid="ignore"):
            quota = np.where(seen == 0, 1.0, np.minimum(1.0, self.capacity * self._share[sample] / seen))
        return float(_softmax(-seen.astype(np.float64)) @ quota)

    def _slot_to_free(self) -> int:
        total = self._held_count.sum()
        excess = self._held_count - self._share * total
        present = np.flatnonzero(self._held_count)
        if not len(present):  # nothing in memory has a label: the oldest slot goes
            return 0
        label = self._generator.choice(present, p=_softmax(excess[present]))
        wanting = np.zeros(self.labels, dtype=bool)
        wanting[present] = excess[present] <= 0
        carriers = np.flatnonzero(self._held[:, label])
        wanted = (self._held[carriers] & wanting).sum(1)
        candidates = carriers[wanted == wanted.min()]
        cost = self._cost_after_removal(candidates)
        if self.quirk and cost.min() >= self.capacity:
            return int(candidates[0])
        return int(candidates[np.flatnonzero(cost <= cost.min() + SAME)[0]])  # of equals the lowest slot

    def _cost_after_removal(self, candidates: Slots) -> Floats:
        """How far all shares would be from their targets, were a candidate gone."""
        rows = self._held[candidates]
        left = self._held_count - rows
        total = left.sum(1, keepdims=True)
        cost: Floats = np.where(left > 0, np.abs(left - self._share * total), 0.0).sum(1)
        return cost

    def _set_shares(self) -> None:
        present = self._held_count > 0
        power = self._stream_count[present].astype(np.float64) ** self.rho
        self._share[present] = power / power.sum() if present.any() else 0.0


def _softmax(values: Floats) -> Floats:
    raised = np.exp(values - values.max())
    result: Floats = raised / raised.sum()
    return result
