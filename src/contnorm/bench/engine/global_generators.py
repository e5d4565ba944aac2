"""The global random generators of Python, NumPy and torch, seeded for user code.

User code may draw random numbers in a step, such as for dropout; the package draws none. Its draws depend on the seed
of the run and the step only, so that a run can be repeated and resumed bit-exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["has_drawn", "seeded_generators"]


@contextmanager
def seeded_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators; their states are restored afterwards.

    Args:
        seed: The seed, below 2**32.
        device: The device whose generator is seeded in addition to the CPU's.

    Example:
        >>> def draws():
        ...     with seeded_generators(0, torch.device("cpu")):
        ...         return random.random(), np.random.rand(), torch.rand(()).item()
        >>> draws() == draws()
        True
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def has_drawn(seed: int, device: torch.device) -> bool:
    """Whether a global generator was used since `seeded_generators` seeded it. To be called inside that context.

    Example:
        >>> with seeded_generators(0, torch.device("cpu")):
        ...     before, _, after = has_drawn(0, torch.device("cpu")), torch.rand(1), has_drawn(0, torch.device("cpu"))
        >>> before, after
        (False, True)
    """
    if random.getstate() != random.Random(seed).getstate():
        return True
    if np.random.get_state()[2] != np.random.RandomState(seed).get_state()[2]:  # type: ignore[index]
        return True
    states = [(torch.random.get_rng_state(), torch.Generator())]
    if device.type == "cuda":
        states.append((torch.cuda.get_rng_state(device), torch.Generator(device)))
    return any(not torch.equal(state, fresh.manual_seed(seed).get_state()) for state, fresh in states)
