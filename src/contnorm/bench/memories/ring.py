"""Ring memory: each task, or each class, has slots of its own, which hold its newest samples.

The paper uses a ring per task for Split CIFAR-100 and mini-ImageNet: 50 slots per task, first in, first out, regardless
of class. At the end of a task, it holds the last 50 samples of the task. Another benchmark has a ring per class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.config.schema import MemoryConfig
from contnorm.bench.memories.base import Memory, Slots

__all__ = ["Ring"]


class Ring(Memory):
    """First in, first out, within the slots of a task or a class.

    Args:
        size: Number of slots per ring.
        rings: Number of tasks or classes; None for a memory that describes a run's.
        per: Whether there is a ring per task or per class.

    Example:
        >>> memory = Ring(size=2, rings=3)
        >>> memory.offer(np.array([7, 7, 8]), task=1).tolist()  # the third overwrites the first
        [2, 3, 2]
        >>> memory.readable().tolist(), memory.readable(before_task=1).tolist()
        ([2, 3], [])
    """

    name: ClassVar[str] = "ring"
    summary: ClassVar[str] = "the newest samples of each task, or of each class (memory.per)"
    supports_multi_label: ClassVar[bool] = False

    def __init__(self, size: int, rings: int | None = None, per: Literal["task", "class"] = "task") -> None:
        if size < 1 or (rings is not None and rings < 1):
            raise ValueError(f"Ring: size={size} and rings={rings} must be 1 or more.")
        super().__init__(size)
        self.rings, self.per = rings or 0, per
        self.capacity = size * self.rings

    @classmethod
    def from_config(cls, config: MemoryConfig) -> Self:
        return cls(config.size, per=config.per)

    @property
    def overrides(self) -> Mapping[str, object]:
        return {**super().overrides, "memory.per": self.per}

    def setup(self) -> None:
        if self.stream is not None:
            self.rings = self.stream.tasks if self.per == "task" else self.stream.outputs
            self.capacity = self.size * self.rings
        self._seen = [0] * self.rings

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        if self.per == "task":
            first = self._advance(task, len(labels))
            return task * self.size + np.arange(first, first + len(labels), dtype=np.int64) % self.size
        rings = labels.tolist()
        return np.array([ring * self.size + self._advance(ring) % self.size for ring in rings], dtype=np.int64)

    def _advance(self, ring: int, samples: int = 1) -> int:
        """Count samples of a ring; returns how many it had before."""
        if not 0 <= ring < self.rings:
            raise ValueError(
                f"Ring: got a sample of {self.per} {ring}, and there are rings for 0 to {self.rings - 1}. "
                f"Build it with rings={ring + 1} or more."
            )
        seen = self._seen[ring]
        self._seen[ring] = seen + samples
        return seen
