"""Partitioning reservoir sampling (PRS; Kim et al., ECCV 2020): a reservoir for long-tailed multi-label streams.

A plain reservoir reproduces the class frequencies of the stream. PRS gives each label a share of the memory that is
proportional to its frequency to the power ``rho``; with a power near zero, rare and frequent labels have nearly equal
shares. The label that is rarest in the stream dominates a sample's probability of entering the memory. The sample to
evict is the one whose removal brings the shares closest to their targets.

The published code has a quirk: its search for the sample to evict starts from a cost of ``capacity``. If every
candidate has a higher cost, it evicts the first one, whatever its cost. ``quirk=True`` reproduces this.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories.base import NOT_STORED, Memory, Slots

Floats = NDArray[np.float64]
SAME = 1e-9  # tolerance for equal costs: sums in another order differ by rounding errors


class PartitioningReservoir(Memory):
    """A reservoir that is partitioned by label.

    Args:
        capacity: Number of slots.
        labels: Number of labels; None for a memory that describes a run's.
        rho: Exponent of a label's frequency in its target share; -0.03 and 0.02 in the papers.
        generator: Random generator; None for one with a random seed.
        quirk: Whether to evict as the published code does.

    Example:
        >>> memory = PartitioningReservoir(2, labels=3, rho=0.0, generator=np.random.default_rng(0))
        >>> memory.offer(np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]]), task=0).tolist()  # a new label always enters
        [0, 1, 0]
    """

    name: ClassVar[str] = "prs"
    summary: ClassVar[str] = "a share for each label, by a power of its frequency (memory.rho)"
    multi_hot: ClassVar[bool] = True
    keys: ClassVar[tuple[str, ...]] = ("rho", "quirk")

    def __init__(
        self,
        capacity: int,
        labels: int | None = None,
        rho: float = 0.0,
        generator: np.random.Generator | None = None,
        quirk: bool = False,
    ) -> None:
        super().__init__(capacity)
        self.labels, self.rho, self.quirk = labels or 0, rho, quirk
        self.generator = generator or self.generator

    def setup(self) -> None:
        if self.stream is not None:
            self.labels = self.stream.outputs
        self._seen = 0
        self._held = np.zeros((self.capacity, self.labels), dtype=bool)  # labels of the sample in each slot
        self._held_count = np.zeros(self.labels, dtype=np.int64)  # l: number of slots per label
        self._stream_count = np.zeros(self.labels, dtype=np.int64)  # n: number of stream samples per label
        self._share = np.zeros(self.labels)  # p: target share per label; stale for labels not in memory

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        slots = np.full(len(labels), NOT_STORED)
        for i, sample in enumerate(labels.astype(bool)):
            if self._seen < self.capacity:
                slots[i] = self._seen
            elif self.generator.random() < self._entry_probability(sample):
                slots[i] = self._slot_to_free()
                self._held_count -= self._held[slots[i]]
            if slots[i] != NOT_STORED:
                self._held[slots[i]] = sample
                self._held_count += sample
            self._seen += 1
            self._stream_count += sample
            present = self._held_count > 0
            power = self._stream_count[present].astype(np.float64) ** self.rho
            self._share[present] = power / power.sum() if present.any() else 0.0
        return slots

    def _entry_probability(self, sample: NDArray[np.bool_]) -> float:
        """Weighted mean of ``min(1, capacity * p / n)`` over the labels of the sample.

        The weights are softmax(-n), so that the rarest label dominates.
        """
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
        if not len(present):  # no sample in memory has a label: evict slot 0
            return 0
        label = self.generator.choice(present, p=_softmax(excess[present]))
        underrepresented = np.zeros(self.labels, dtype=bool)
        underrepresented[present] = excess[present] <= 0
        carriers = np.flatnonzero(self._held[:, label])
        underrepresented_count = (self._held[carriers] & underrepresented).sum(1)
        candidates = carriers[underrepresented_count == underrepresented_count.min()]
        # The cost is the L1 distance of the label counts from their targets after the removal of each candidate. Labels
        # that are no longer in memory after the removal do not count.
        remaining = self._held_count - self._held[candidates]
        targets = self._share * remaining.sum(1, keepdims=True)
        cost = np.where(remaining > 0, np.abs(remaining - targets), 0.0).sum(1)
        if self.quirk and cost.min() >= self.capacity:
            return int(candidates[0])
        return int(candidates[np.flatnonzero(cost <= cost.min() + SAME)[0]])  # the lowest slot among equal costs


def _softmax(values: Floats) -> Floats:
    exponentials = np.exp(values - values.max())
    result: Floats = exponentials / exponentials.sum()
    return result
