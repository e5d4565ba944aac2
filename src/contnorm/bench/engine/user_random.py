"""Random numbers that user code draws from the global generators of Python, NumPy and torch.

The package draws none in a step. A strategy or a network of the user's own may, such as for dropout: its draws depend
on the run's seed and the step alone, so that a run can be repeated, and stopped and resumed, to the bit.
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
    """Seed the global generators; restored afterwards.

    Args:
        seed: The seed, below 2 to the 32nd.
        device: Whose generator is seeded besides the host's.

    Example:
        >>> def draws():
        ...     with seeded_generators(0, torch.device("cpu")):
        ...         return random.random(), np.random.rand(), torch.rand(()).item()
        >>> draws() == draws()
        True
    """
    state_of_python, state_of_numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(state_of_python)
        np.random.set_state(state_of_numpy)


def has_drawn(seed: int, device: torch.device) -> bool:
    """Whether one of the global generators was used since `seeded_generators` seeded it; to be called within.

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
    used = [(torch.random.get_rng_state(), torch.Generator())]
    if device.type == "cuda":
        used.append((torch.cuda.get_rng_state(device), torch.Generator(device)))
    return any(not torch.equal(state, fresh.manual_seed(seed).get_state()) for state, fresh in used)
