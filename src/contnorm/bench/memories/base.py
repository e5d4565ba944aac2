"""Interface of memory policies, and helpers that they share."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOT_KEPT", "Filled", "Memory", "Slots", "drawn"]

NOT_KEPT = -1  # slot of a sample that is not stored

Slots = NDArray[np.int64]


class Memory:
    """A policy over ``capacity`` slots.

    ``offer`` receives samples in the order of their arrival and returns the slot of each. A later sample overwrites an
    earlier one in the same slot, also within one call. ``readable`` returns the slots that can be replayed now.

    A memory that is built with its size alone, such as ``Ring(50)``, describes the memory of a run: `bench.run` builds
    one for each seed from its settings. To use a memory directly, give all arguments.
    """

    capacity: int

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings of a run with this memory, by dotted key."""
        return {}

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        """Return the slot of each sample, or ``NOT_KEPT``. Labels are (B,) classes, or multi-hot (B, C)."""
        raise NotImplementedError(f"{type(self).__name__} does not define offer(labels, task).")

    def readable(self, before_task: int | None = None) -> Slots:
        """Return the filled slots; with ``before_task``, only those that hold samples of earlier tasks."""
        raise NotImplementedError(f"{type(self).__name__} does not define readable(before_task).")


class Filled:
    """Track which slots hold a sample, and the task of each sample.

    The results of `readable` are cached: a plan calls it at every step, and most steps change no slot's task.

    Args:
        capacity: Number of slots.

    Example:
        >>> filled = Filled(4)
        >>> filled.write(np.array([0, 3]), task=1)
        >>> filled.write(np.array([2]), task=2)
        >>> filled.readable().tolist(), filled.readable(before_task=2).tolist()
        ([0, 2, 3], [0, 3])
    """

    def __init__(self, capacity: int) -> None:
        self._task = np.full(capacity, -1, dtype=np.int64)  # -1: empty
        self._cache: dict[int | None, Slots] = {}

    def write(self, slots: Slots | int, task: int) -> None:
        """Record that samples of a task were written to these slots."""
        previous = self._task[slots]
        if (previous != task).any():
            # Overwriting filled slots does not change the list of all filled slots, only the lists by task.
            all_filled = self._cache.get(None) if (previous >= 0).all() else None
            self._task[slots] = task
            self._cache = {} if all_filled is None else {None: all_filled}

    def readable(self, before_task: int | None = None) -> Slots:
        """Return the filled slots; with ``before_task``, only those of earlier tasks.

        The array is cached, and therefore read-only.
        """
        if before_task not in self._cache:
            filled = self._task >= 0
            if before_task is not None:
                filled &= self._task < before_task
            self._cache[before_task] = np.flatnonzero(filled)
            self._cache[before_task].flags.writeable = False
        return self._cache[before_task]


def drawn(slots: Slots, size: int, generator: np.random.Generator) -> Slots:
    """Draw up to ``size`` of the slots, uniformly and without replacement.

    Example:
        >>> sorted(drawn(np.array([3, 5, 9]), 7, np.random.default_rng(0)).tolist())
        [3, 5, 9]
    """
    return generator.choice(slots, size=min(size, len(slots)), replace=False, shuffle=True)
