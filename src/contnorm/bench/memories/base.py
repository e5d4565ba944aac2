"""Interface of memory policies, the table of filled slots, and draws of slots without replacement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOT_STORED", "Memory", "SlotTable", "Slots", "draw_slots", "draw_slots_batched"]

NOT_STORED = -1  # slot of a sample that is not stored

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
    def overrides(self) -> Mapping[str, object]:
        """The settings of a run with this memory, by dotted key."""
        return {}

    def offer(self, labels: NDArray[np.int64], task: int) -> Slots:
        """Return the slot of each sample, or ``NOT_STORED``. Labels are (B,) classes, or multi-hot (B, C)."""
        raise NotImplementedError(f"{type(self).__name__} does not define offer(labels, task).")

    def readable(self, before_task: int | None = None) -> Slots:
        """Return the filled slots; with ``before_task``, only those that hold samples of earlier tasks."""
        raise NotImplementedError(f"{type(self).__name__} does not define readable(before_task).")


class SlotTable:
    """Track which slots hold a sample, and the task of each sample.

    The results of `readable` are cached: a plan calls it at every step, and most steps change no slot's task.

    Args:
        capacity: Number of slots.

    Example:
        >>> filled = SlotTable(4)
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


def draw_slots(slots: Slots, size: int, generator: np.random.Generator) -> Slots:
    """Draw up to ``size`` of the slots, uniformly and without replacement.

    Example:
        >>> sorted(draw_slots(np.array([3, 5, 9]), 7, np.random.default_rng(0)).tolist())
        [3, 5, 9]
    """
    return generator.choice(slots, size=min(size, len(slots)), replace=False, shuffle=True)


# `draw_slots_batched` draws for many steps at once, bit-identical to calling `draw_slots` once per step. NumPy's
# ``Generator.choice`` uses Floyd's algorithm (Bentley & Floyd, 1987) followed by a shuffle. The number and the bounds
# of its random integers depend only on the number of slots. The integers of all steps are therefore drawn in one call,
# and each iteration of the algorithm is vectorized over the steps. For 2,500 steps of 10 draws, this is 5 to 8 times as
# fast on a CPU as one call per step.
#
# NumPy uses another algorithm to draw more than 1 / PART of more than MANY slots.
MANY = 10_000
PART = 50


def draw_slots_batched(slots: Sequence[Slots], size: int, generator: np.random.Generator) -> list[Slots]:
    """Draw up to ``size`` slots from each array, uniformly and without replacement.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> [sorted(draw.tolist()) for draw in draw_slots_batched([np.arange(2), np.array([7])], 3, generator)]
        [[0, 1], [7]]
    """
    available = np.array([len(each) for each in slots], dtype=np.int64)
    taken = np.minimum(available, size)
    if ((available > MANY) & (taken > available // PART)).any():
        return [draw_slots(each, size, generator) for each in slots]
    positions = _draw_positions(available, taken, generator)
    return [each[row[:count]] for each, row, count in zip(slots, positions, taken.tolist(), strict=True)]


def _draw_positions(available: Slots, taken: Slots, generator: np.random.Generator) -> Slots:
    """Draw ``taken[i]`` of ``range(available[i])`` for each row i.

    Returns:
        (draws, max(taken)); in each row, the values after the first ``taken[i]`` are undefined.
    """
    max_taken = int(taken.max(initial=0))
    column = np.arange(max_taken)
    highest = (available - taken)[:, None] + column  # upper bound of each draw in Floyd's algorithm
    swaps = column[:0:-1]  # Fisher-Yates shuffle, from the last position to the second
    bounds = np.concatenate([highest, np.broadcast_to(swaps, (len(available), len(swaps)))], axis=1)
    is_used = np.concatenate([column, swaps]) < taken[:, None]
    draws = np.zeros(bounds.shape, dtype=np.int64)
    draws[is_used] = generator.integers(0, bounds[is_used], endpoint=True)
    positions = _floyd(draws[:, :max_taken], highest)
    row = np.arange(len(available))
    for step, last in enumerate(swaps.tolist(), max_taken):
        other = np.where(is_used[:, step], draws[:, step], last)
        positions[:, last], positions[row, other] = positions[row, other], positions[:, last].copy()
    return positions


def _floyd(draws: Slots, highest: Slots) -> Slots:
    """Replace each draw that repeats an earlier one of its row by its upper bound."""
    positions = np.empty_like(draws)
    for step in range(draws.shape[1]):
        is_repeated: NDArray[np.bool_] = (positions[:, :step] == draws[:, step, None]).any(axis=1)
        positions[:, step] = np.where(is_repeated, highest[:, step], draws[:, step])
    return positions
