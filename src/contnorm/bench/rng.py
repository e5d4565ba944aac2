"""Random generators by purpose: each is derived from the seed of the run and the name of its purpose.

Draws for one purpose therefore do not affect another: a stream is the same with and without augmentation, and two norms
that are compared on one seed see the same samples in the same order.
"""

from __future__ import annotations

import zlib

import numpy as np


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
