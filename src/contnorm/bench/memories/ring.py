"""Ring memory: each task, or each class, has slots of its own, which hold its newest samples.

The paper uses a ring per task for Split CIFAR-100 and mini-ImageNet: 50 slots per task, first in, first out, regardless
of class. At the end of a task, it holds the last 50 samples of the task. Another benchmark has a ring per class.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories.base import Memory, Slots


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
    keys: ClassVar[tuple[str, ...]] = ("per",)

    def __init__(self, size: int, rings: int | None = None, per: Literal["task", "class"] = "task") -> None:
        super().__init__(size)
        self.rings, self.per = rings or 0, per
        self.capacity = size * self.rings

    def setup(self) -> None:
        if self.stream is not None:
            self.rings = self.stream.tasks if self.per == "task" else self.stream.outputs
            self.capacity = self.size * self.rings
        self._seen = [0] * self.rings

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        if self.per == "task":
            first, self._seen[task] = self._seen[task], self._seen[task] + len(labels)
            return task * self.size + np.arange(first, first + len(labels)) % self.size
        slots = []
        for ring in labels.tolist():
            slots.append(ring * self.size + self._seen[ring] % self.size)
            self._seen[ring] += 1
        return np.array(slots, dtype=np.int64)
