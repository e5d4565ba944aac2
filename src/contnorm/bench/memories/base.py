"""What every memory policy can do."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOT_KEPT", "Filled", "Memory", "Slots", "drawn"]

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


class Filled:
    """The slots that hold a sample, and of which task it is.

    A plan asks at every step which of them may be read, and mostly nothing has changed since: the answer is kept.

    Args:
        capacity: Slots.

    Example:
        >>> filled = Filled(4)
        >>> filled.write(np.array([0, 3]), task=1)
        >>> filled.write(np.array([2]), task=2)
        >>> filled.readable().tolist(), filled.readable(before_task=2).tolist()
        ([0, 2, 3], [0, 3])
    """

    def __init__(self, capacity: int) -> None:
        self._task = np.full(capacity, -1, dtype=np.int64)  # -1: empty
        self._known: dict[int | None, Slots] = {}

    def write(self, slots: Slots | int, task: int) -> None:
        """Samples of a task go to these slots."""
        held = self._task[slots]
        if (held != task).any():
            every = self._known.get(None) if (held >= 0).all() else None  # the same, of whichever tasks they are
            self._task[slots] = task
            self._known = {} if every is None else {None: every}

    def readable(self, before_task: int | None = None) -> Slots:
        """The filled slots; with ``before_task``, only those of earlier tasks. Not to be written to: it is kept."""
        if before_task not in self._known:
            filled = self._task >= 0
            if before_task is not None:
                filled &= self._task < before_task
            self._known[before_task] = np.flatnonzero(filled)
            self._known[before_task].flags.writeable = False
        return self._known[before_task]


def drawn(slots: Slots, size: int, generator: np.random.Generator) -> Slots:
    """Some of the slots, uniformly and without replacement; all of them where there are no more.

    Example:
        >>> sorted(drawn(np.array([3, 5, 9]), 7, np.random.default_rng(0)).tolist())
        [3, 5, 9]
    """
    return generator.choice(slots, size=min(size, len(slots)), replace=False, shuffle=True)
