"""Reservoir memory (Vitter, 1985): at any time, every sample seen so far is stored with the same probability.

Sample n of the stream (from 0) is written to slot n while there are empty slots. After that, a slot is drawn uniformly
from 0 to n; the sample is written there if the memory has that slot, and is skipped otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories.base import NOT_STORED, Memory, Slots, SlotTable

__all__ = ["Reservoir"]


class Reservoir(Memory):
    """Each of n samples is stored with probability ``capacity / n``.

    Args:
        capacity: Number of slots.
        generator: Random generator; None for one with a random seed.

    Example:
        >>> memory = Reservoir(2, np.random.default_rng(0))
        >>> memory.offer(np.array([0, 0, 0, 0]), task=0).tolist()  # the fourth is not stored
        [0, 1, 1, -1]
        >>> memory.readable().tolist()
        [0, 1]
    """

    def __init__(self, capacity: int, generator: np.random.Generator | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"Reservoir: capacity={capacity} must be 1 or more.")
        self.capacity = capacity
        self._generator = generator or np.random.default_rng()
        self._seen = 0
        self._filled = SlotTable(capacity)

    @property
    def overrides(self) -> Mapping[str, object]:
        return {"memory.kind": "reservoir", "memory.size": self.capacity}

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        order = self._seen + np.arange(len(labels))
        # One draw per sample, also while slots are empty: live and planned use then consume the generator identically.
        draws = self._generator.integers(0, order + 1) if len(order) else order
        slots = np.where(order < self.capacity, order, np.where(draws < self.capacity, draws, NOT_STORED))
        self._seen += len(labels)
        self._filled.write(slots[slots != NOT_STORED], task)
        return slots.astype(np.int64)

    def readable(self, before_task: int | None = None) -> Slots:
        return self._filled.readable(before_task)
