"""What every memory policy can do."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOT_KEPT", "Memory", "Slots", "drawn", "filled_slots"]

NOT_KEPT = -1  # the slot of a sample that is not written

Slots = NDArray[np.int64]


class Memory(Protocol):
    """A policy over ``capacity`` slots.

    ``offer`` is told of samples in the order they arrive and says where each is written; a sample that arrives later
    overwrites an earlier one in the same slot, also within one call. ``readable`` lists the slots that may be read now.
    """

    capacity: int

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        """The slot of each sample, or ``NOT_KEPT``. Labels are (B,) classes, or (B, C) 0/1 for several a sample."""
        ...

    def readable(self, before_task: int | None = None) -> Slots:
        """The filled slots; with ``before_task``, only those that hold samples of earlier tasks."""
        ...


def filled_slots(task_of_slot: Slots, before_task: int | None) -> Slots:
    """The slots that hold a sample, of an earlier task where that is asked for; -1 marks an empty one.

    Example:
        >>> filled_slots(np.array([0, -1, 2, 1]), before_task=2).tolist()
        [0, 3]
    """
    filled = task_of_slot >= 0
    if before_task is not None:
        filled &= task_of_slot < before_task
    return np.flatnonzero(filled)


def drawn(slots: Slots, size: int, generator: np.random.Generator) -> Slots:
    """Some of the slots, uniformly and without replacement; all of them where there are no more.

    Example:
        >>> sorted(drawn(np.array([3, 5, 9]), 7, np.random.default_rng(0)).tolist())
        [3, 5, 9]
    """
    return generator.choice(slots, size=min(size, len(slots)), replace=False, shuffle=True)
