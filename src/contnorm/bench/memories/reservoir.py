"""Reservoirs: a uniform sample of the stream, and one that is balanced over classes.

**Reservoir** (Vitter, 1985): at any time, every sample seen so far is stored with the same probability. Sample n of the
stream (from 0) is written to slot n while there are empty slots. After that, a slot is drawn uniformly from 0 to n; the
sample is written there if the memory has that slot, and is skipped otherwise.

**Class-balanced reservoir** (Chrysakis and Moens, ICML 2020): the classes have shares as equal as possible. While the
memory has empty slots, every sample is stored. After that, a class is *full* once it is the largest in the memory, and
remains so. A sample of a class that is not full replaces a random sample of the largest class. A sample of a full class
c, the n-th of its class in the stream, is stored with probability m / n, where m is the number of stored samples of c,
and replaces a random one of them. So each class holds a uniform sample of its part of the stream, and classes with
fewer samples than a share are stored completely.

If several classes are the largest, all of them are full, and the sample to replace is drawn from all of them.
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


class BalancedReservoir(Memory):
    """A uniform sample of each class, with shares as equal as the stream allows.

    Args:
        size: Number of slots.

    Example:
        >>> memory = BalancedReservoir(4)
        >>> slots = memory.offer(np.array([0] * 100 + [1] * 100), task=0)
        >>> content = dict(zip(slots.tolist(), range(200)))  # the last sample in each slot
        >>> sum(content[slot] >= 100 for slot in range(4))  # two of each class
        2
    """

    name: ClassVar[str] = "balanced"
    summary: ClassVar[str] = "an equal share for each class, and a uniform sample of each"
    supports_multi_label: ClassVar[bool] = False

    def setup(self) -> None:
        self._class = np.full(self.capacity, -1, dtype=np.int64)  # class of the sample in each slot
        self._stored = 0
        self._seen: dict[int, int] = {}  # samples of each class in the stream
        self._full: set[int] = set()

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        slots = []
        for label in labels.tolist():
            self._seen[label] = self._seen.get(label, 0) + 1
            slots.append(self._choose(label))
            if slots[-1] != NOT_STORED:
                self._class[slots[-1]] = label
        return np.array(slots, dtype=np.int64)

    def _choose(self, label: int) -> int:
        if self._stored < self.capacity:
            self._stored += 1
            return self._stored - 1
        counts = np.bincount(self._class)
        largest = np.flatnonzero(counts == counts.max())
        self._full.update(largest.tolist())
        if label not in self._full:
            return int(self.generator.choice(np.flatnonzero(np.isin(self._class, largest))))
        stored = np.flatnonzero(self._class == label)
        if self.generator.random() < len(stored) / self._seen[label]:
            return int(self.generator.choice(stored))
        return NOT_STORED
