"""Seeds of runs, and random generators by purpose: each is derived from the seed of a run and the name of its purpose.

Draws for one purpose therefore do not affect another: a stream is the same with and without augmentation, and two norms
that are compared on one seed see the same samples in the same order.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np

from contnorm.errors import UserError

LARGEST_SEED = 2**64 - 1
MAX_SEED, MAX_SEEDS = 2**32 - 1, 10_000  # limits of a command


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return the generator for one purpose.

    Example:
        >>> a, b = generator(0, "order"), generator(0, "replay")
        >>> a.integers(100).item() == generator(0, "order").integers(100).item() != b.integers(100).item()
        True
    """
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def seed_for(seed: int, purpose: str) -> int:
    """Return a 32-bit seed for the generator of another library, for one purpose.

    Example:
        >>> seed_for(0, "init") == seed_for(0, "init") != seed_for(1, "init")
        True
    """
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])
    return int(sequence.generate_state(1, np.uint32)[0])


def check_seeds(count: int) -> None:
    """Raise a `UserError` if a number of seeds is out of range."""
    if not 1 <= count <= MAX_SEEDS:
        raise UserError(f"--seeds {count}: use 1 or more, up to {MAX_SEEDS:,}; they count from 0.")


def check_seed(seed: int) -> None:
    """Raise a `UserError` if a seed is out of range."""
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"--seed {seed}: use 0 or more, up to {MAX_SEED:,}.")


def list_seeds(seeds: int | Iterable[int]) -> list[int]:
    """Return a list of seeds, from a number of seeds or from the seeds themselves."""
    values: Any = range(seeds) if isinstance(seeds, Integral) and not isinstance(seeds, bool) else seeds
    chosen: list[Any] = list(values) if isinstance(values, Iterable) else []
    whole = all(isinstance(seed, Integral) and not isinstance(seed, bool) for seed in chosen)
    if not chosen or not whole or min(chosen) < 0 or max(chosen) > LARGEST_SEED:
        raise UserError(f"seeds={seeds!r}: use a number of seeds, at least 1, or seeds from 0 to {LARGEST_SEED}.")
    return list(dict.fromkeys(map(int, chosen)))
