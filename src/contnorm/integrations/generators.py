"""Random generators that a training loop uses, restored after a measurement inside of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["generators_restored"]


@contextmanager
def generators_restored(*owners: object) -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch on exit, and the generators of some objects.

    Args:
        *owners: Objects such as a DataLoader and its sampler, with a ``torch.Generator`` in ``generator``, or without.

    Example:
        >>> before = torch.random.get_rng_state()
        >>> with generators_restored():
        ...     _ = torch.randn(3)
        >>> torch.equal(torch.random.get_rng_state(), before)
        True
    """
    generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        for generator, old in zip(generators, states, strict=True):
            generator.set_state(old)
