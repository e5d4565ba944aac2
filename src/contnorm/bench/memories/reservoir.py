"""Reservoir memory (Vitter, 1985): at any time, every sample seen so far is stored with the same probability.

Sample n of the stream (from 0) is written to slot n while there are empty slots. After that, a slot is drawn uniformly
from 0 to n; the sample is written there if the memory has that slot, and is skipped otherwise.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories.base import NOT_STORED, Memory, Slots


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

    name: ClassVar[str] = "reservoir"
    summary: ClassVar[str] = "every sample seen so far with the same probability"

    def __init__(self, capacity: int, generator: np.random.Generator | None = None) -> None:
        super().__init__(capacity)
        self.generator = generator or self.generator

    def setup(self) -> None:
        self._seen = 0

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        order = self._seen + np.arange(len(labels))
        # One draw per sample, also while slots are empty: live and planned use then consume the generator identically.
        draws = self.generator.integers(0, order + 1) if len(order) else order
        slots = np.where(order < self.capacity, order, np.where(draws < self.capacity, draws, NOT_STORED))
        self._seen += len(labels)
        return slots.astype(np.int64)
