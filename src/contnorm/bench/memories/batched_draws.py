"""Draws without replacement for many steps at once, bit-identical to calling `drawn` once per step.

NumPy's ``Generator.choice`` uses Floyd's algorithm (Bentley & Floyd, 1987) followed by a shuffle. The number and the
bounds of its random integers depend only on the number of slots. The integers of all steps are therefore drawn in one
call, and each iteration of the algorithm is vectorized over the steps. For 2,500 steps of 10 draws, this is 5 to 8
times as fast on a CPU as one call per step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories.base import Slots, drawn

__all__ = ["drawn_each"]

# NumPy uses another algorithm to draw more than 1 / PART of more than MANY slots.
MANY = 10_000
PART = 50


def drawn_each(slots: Sequence[Slots], size: int, generator: np.random.Generator) -> list[Slots]:
    """Draw up to ``size`` slots from each array, uniformly and without replacement.

    Example:
        >>> [sorted(each.tolist()) for each in drawn_each([np.arange(2), np.array([7])], 3, np.random.default_rng(0))]
        [[0, 1], [7]]
    """
    available = np.array([len(each) for each in slots], dtype=np.int64)
    taken = np.minimum(available, size)
    if ((available > MANY) & (taken > available // PART)).any():
        return [drawn(each, size, generator) for each in slots]
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
