"""Data from which moments are re-estimated inside of a framework's training loop, in all its processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch

__all__ = ["Batches", "all_processes", "generators_restored", "select_batches"]

Batches = int | Iterable[Any] | Callable[[], Iterable[Any]]


def select_batches(batches: Batches, training: Callable[[], Iterable[Any]]) -> Iterable[Any]:
    """Return batches that can be iterated repeatedly.

    Args:
        batches: A number of batches of the training data; batches; or a function that returns batches.
        training: A function that returns the training data.

    Example:
        >>> select_batches(2, lambda: range(5)), select_batches(lambda: [7], lambda: range(5))
        ([0, 1], [7])
    """
    if isinstance(batches, int):
        return list(islice(training(), batches))
    return batches() if callable(batches) else batches


def all_processes() -> Any:
    """Return the group of all processes of ``torch.distributed``; None if there is one process."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.group.WORLD if distributed else None


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
