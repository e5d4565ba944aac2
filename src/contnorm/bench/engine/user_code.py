"""The components of a run that are user code: their random numbers and their errors.

User code may draw random numbers from the global generators of Python, NumPy and torch in a step, such as for dropout;
the package draws none. The generators are seeded by the seed of the run and the step only, so that a run can be
repeated and resumed bit-exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from contnorm.bench.components import Kind, has_user_frame, user_code_error, user_parts
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.rng import seed_for
from contnorm.errors import UserCodeError, UserError

__all__ = ["UserComponents", "has_drawn", "seeded_generators"]


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


class UserComponents:
    """The strategy, network and norm of a run, as far as they are user code.

    Args:
        config: The resolved settings.
        seed: The seed of the run.
        device: The device it is trained on.

    Attributes:
        parts: Name and hash of those that are user code, by ``"strategy"``, ``"model"`` and ``"norm"``.
        draws_random: Whether a step drew random numbers; checked on a GPU only.
    """

    def __init__(self, config: RunConfig, seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        self.parts: dict[Kind, tuple[str, str | None]] = {
            kind: part for kind, part in user_parts(config).items() if kind != "memory"
        }
        self.draws_random = False

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seed the global generators for user code; not in a graph capture, since captured code draws nothing."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or not self.parts:
            yield
            return
        with seeded_generators(seed_for(self.seed, purpose), self.device):
            yield

    def check_for_draws(self, purpose: str) -> None:
        """Record whether user code drew random numbers in a step; every graph replay would draw the same ones.

        To be called in the context of `seeded`, with the same purpose.
        """
        if self.device.type != "cuda" or self.draws_random or torch.cuda.is_current_stream_capturing():
            return
        self.draws_random = has_drawn(seed_for(self.seed, purpose), self.device)

    @contextmanager
    def errors(self, when: str) -> Iterator[None]:
        """Turn errors of user code into one line."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not self.parts or not has_user_frame(error):
                raise
            raise user_code_error(error, str(self), when) from error

    def capture_error(self, error: BaseException) -> UserCodeError:
        """Return the error of a step that can't be captured as a CUDA graph, in one line."""
        while error.__context__ is not None:  # the first error: the end of a failed capture raises another one
            error = error.__context__
        text = str(user_code_error(error, str(self), "its training step can't be captured as a CUDA graph"))
        text = text.split(" CUDA kernel errors might")[0].split(" Compile with")[0].rstrip(".")
        return UserCodeError(
            f"{text}. A captured step can't copy values to the host (item(), if on a tensor) or create tensors whose "
            f"shape depends on values; change that, or set train.graph=off."
        )

    def __str__(self) -> str:
        """Return kind and name of the components, for messages."""
        return " or ".join(f"{kind} {name!r}" for kind, (name, _) in self.parts.items())
