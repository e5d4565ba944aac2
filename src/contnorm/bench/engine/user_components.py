"""The components of a run that are user code: their random numbers and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from contnorm.bench.components import Kind, has_user_frame, user_code_error, user_parts
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.global_generators import has_drawn, seeded_generators
from contnorm.bench.rng import seed_for
from contnorm.errors import UserCodeError, UserError

__all__ = ["UserComponents"]


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
            raise self._error(error, when) from error

    def capture_error(self, error: BaseException) -> UserCodeError:
        """Return the error of a step that can't be captured as a CUDA graph, in one line."""
        while error.__context__ is not None:  # the first error: the end of a failed capture raises another one
            error = error.__context__
        text = str(self._error(error, "its training step can't be captured as a CUDA graph"))
        text = text.split(" CUDA kernel errors might")[0].split(" Compile with")[0].rstrip(".")
        return UserCodeError(
            f"{text}. A captured step can't copy values to the host (item(), if on a tensor) or create tensors whose "
            f"shape depends on values; change that, or set train.graph=off."
        )

    def _error(self, error: BaseException, when: str) -> UserCodeError:
        kind, (name, _) = next(iter(self.parts.items()))
        return user_code_error(error, kind, name, when, self.parts)

    def __str__(self) -> str:
        """Return the components, for messages."""
        return " or ".join(f"{kind} {name!r}" for kind, (name, _) in self.parts.items())
