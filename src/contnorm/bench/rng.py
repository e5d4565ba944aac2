"""Random generators by name: each random act has its own, derived from the run's seed and the act's purpose.

So no act disturbs another: a stream is the same with and without augmentation, and two norms compared on one seed see
the very same samples in the same order.
"""

from __future__ import annotations

import zlib

import numpy as np

__all__ = ["generator", "seed_for"]


def _sequence(seed: int, purpose: str) -> np.random.SeedSequence:
    return np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])


def generator(seed: int, purpose: str) -> np.random.Generator:
    """The generator of one purpose.

    Example:
        >>> a, b = generator(0, "order"), generator(0, "replay")
        >>> a.integers(100).item() == generator(0, "order").integers(100).item() != b.integers(100).item()
        True
    """
    return np.random.default_rng(_sequence(seed, purpose))


def seed_for(seed: int, purpose: str) -> int:
    """A number to seed a library's own generator with, for one purpose.

    Example:
        >>> seed_for(0, "init") == seed_for(0, "init") != seed_for(1, "init")
        True
    """
    return int(_sequence(seed, purpose).generate_state(1, np.uint32)[0])
