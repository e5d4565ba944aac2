"""Batched draws of slots are bit-identical to single draws."""

from __future__ import annotations

import numpy as np
import pytest

from contnorm.bench.memories.base import MANY, draw_slots, draw_slots_batched

GROWING = [0, 1, 2, 3, 9, 10, 11, 50, 400, 9, 0, 850]
CASES = {
    "from few slots": (GROWING, 10),
    "one at a time": ([0, 1, 2, 7, 1], 1),
    "nothing": ([5, 0, 3], 0),
    "nothing to draw from": ([0, 0], 4),
    "no draw": ([], 4),
    "more than there is": ([3, 40, 200], 64),
    "all there is": ([64, 64], 64),
    "few of many slots": ([MANY + 5, 12_000], 30),
    "a good part of many slots": ([100, MANY + 5, 12_000], 500),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_batched_draws_equal_single_draws(case: str, seed: int) -> None:
    there, size = CASES[case]
    numbers = np.random.default_rng(99)
    slots = [numbers.permutation(3 * count)[:count] for count in there]
    chance, same = np.random.default_rng(seed), np.random.default_rng(seed)
    chance.integers(7), same.integers(7)  # half of a 64-bit number is used then, and the other half is next
    found = draw_slots_batched(slots, size, chance)
    expected = [draw_slots(each, size, same) for each in slots]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    assert chance.bit_generator.state == same.bit_generator.state, "what comes after is the same too"
