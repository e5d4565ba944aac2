"""Draws without replacement for many steps at once: what `drawn` gives them one by one, and from the same chances.

Both are Floyd's algorithm (Bentley & Floyd, 1987) and a shuffle after it. Which numbers of chance it takes depends on
how many slots there are alone, so those of all steps are taken at once, and each move is made for all steps together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from contnorm.bench.memories.base import Slots, drawn

__all__ = ["drawn_each"]

MANY = 10_000  # slots of which NumPy draws a good part in another way
PART = 50


def drawn_each(slots: Sequence[Slots], size: int, generator: np.random.Generator) -> list[Slots]:
    """Some of each of the slots, uniformly and without replacement; all of them where there are no more.

    Example:
        >>> [sorted(each.tolist()) for each in drawn_each([np.arange(2), np.array([7])], 3, np.random.default_rng(0))]
        [[0, 1], [7]]
    """
    there = np.array([len(each) for each in slots], dtype=np.int64)
    taken = np.minimum(there, size)
    if ((there > MANY) & (taken > there // PART)).any():
        return [drawn(each, size, generator) for each in slots]
    places = _places(there, taken, generator)
    return [each[row[:count]] for each, row, count in zip(slots, places, taken.tolist(), strict=True)]


def _places(there: Slots, taken: Slots, generator: np.random.Generator) -> Slots:
    """(draws, most taken): of each so many of 0 to how many there are; what is beyond them means nothing."""
    most = int(taken.max(initial=0))
    column = np.arange(most)
    highest = (there - taken)[:, None] + column  # the highest place that each one may be
    swaps = column[:0:-1]  # each but the first trades places with one up to itself, from the last on
    bounds = np.concatenate([highest, np.broadcast_to(swaps, (len(there), len(swaps)))], axis=1)
    counts = np.concatenate([column, swaps]) < taken[:, None]
    chance = np.zeros(bounds.shape, dtype=np.int64)
    chance[counts] = generator.integers(0, bounds[counts], endpoint=True)
    places = _floyd(chance[:, :most], highest)
    row = np.arange(len(there))
    for number, last in enumerate(swaps.tolist(), most):
        other = np.where(counts[:, number], chance[:, number], last)
        places[:, last], places[row, other] = places[row, other], places[:, last].copy()
    return places


def _floyd(chance: Slots, highest: Slots) -> Slots:
    """What was drawn, or, where it is taken already, the highest place it might have been."""
    places = np.empty_like(chance)
    for number in range(chance.shape[1]):
        again: NDArray[np.bool_] = (places[:, :number] == chance[:, number, None]).any(axis=1)
        places[:, number] = np.where(again, highest[:, number], chance[:, number])
    return places
