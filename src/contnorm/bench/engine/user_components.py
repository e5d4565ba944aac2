"""The components of a run that are user code: their random numbers, their errors, and their state in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.code_state import CodeState, network_state, strategy_state
from contnorm.bench.engine.global_generators import has_drawn, seeded_generators
from contnorm.bench.rng import seed_for
from contnorm.bench.strategies.base import OutputMask, Strategy
from contnorm.bench.strategies.state import split_state
from contnorm.bench.user_code import breaks_in, is_user_code, loaded_modules, user_code_error
from contnorm.errors import UserCodeError, UserError

__all__ = ["UserComponents"]


class UserComponents:
    """The strategy, network and norm of a run, as far as they are user code.

    Args:
        config: The resolved settings.
        seed: The seed of the run.
        device: The device it is trained on.

    Attributes:
        kinds: Which components are user code, of ``"strategy"``, ``"model"`` and ``"norm"``.
        draws_random: Whether a step drew random numbers; checked on a GPU only.
    """

    def __init__(self, config: RunConfig, seed: int, device: torch.device) -> None:
        self.config, self.seed, self.device = config, seed, device
        named: dict[str, Any] = {"strategy": config.strategy, "model": config.model, "norm": config.norm}
        self.kinds = {kind for kind, part in named.items() if is_user_code(part.name) or part.code is not None}
        self.draws_random = False
        self._modules: dict[str, dict[str, ModuleType]] = {}  # by kind of component
        self._tensors: list[dict[str, Tensor]] = []  # of the last `step_state`

    def _name(self, kind: str) -> str:
        name: str = getattr(self.config, kind).name
        return name

    def keep_modules(self, kind: str) -> None:
        """Remember the loaded modules of a component, if its name is one of user code.

        To be called after the component is built and before another is: a second component in the same file loads the
        file again.
        """
        if is_user_code(self._name(kind)):
            self._modules[kind] = loaded_modules(self._name(kind))

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seed the global generators for user code; not in a graph capture, since captured code draws nothing."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing or not self.kinds:
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
            if not self._modules:
                raise
            kind = self._cause(error)
            raise user_code_error(error, kind, self._name(kind), when) from error

    def capture_error(self, error: BaseException) -> UserCodeError:
        """Return the error of a step that can't be captured as a CUDA graph, in one line."""
        while error.__context__ is not None:  # the first error: the end of a failed capture raises another one
            error = error.__context__
        kind = self._cause(error)
        name = self._name(kind) if kind in self._modules else ""
        cause = user_code_error(error, kind, name, "its training step can't be captured as a CUDA graph")
        text = str(cause).split(" CUDA kernel errors might")[0].split(" Compile with")[0].rstrip(".")
        return UserCodeError(
            f"{text}. A captured step can't copy values to the host (item(), if on a tensor) or create tensors whose "
            f"shape depends on values; change that, or set train.graph=off."
        )

    def _cause(self, error: BaseException) -> str:
        """Return the component whose file is in the traceback of an error; the first one if none is."""
        breaking = [kind for kind in self._modules if breaks_in(error, self._name(kind))]
        return next(iter([*breaking, *self._modules]), "strategy")

    def drawing_code(self) -> str:
        """Return the components, one of which draws random numbers, for messages."""
        return " or ".join(f"{kind} {self._name(kind)!r}" for kind in self._modules) or "user code"

    def owner_of(self, change: str) -> str:
        """Return the component that a name of `state` or `step_state` belongs to, for messages."""
        kind = change.partition(" ")[0]
        if kind == "model" and not is_user_code(self.config.model.name):
            kind = "norm" if "norm" in self._modules else "strategy"
        return f"{kind} {self._name(kind)!r}"

    def state(self, strategy: Strategy, head: OutputMask, model: nn.Module, saved: Mapping[str, object]) -> CodeState:
        """Return digests of the state of user code that checkpoints do not contain.

        Args:
            strategy: The strategy of the run.
            head: The head that is passed to it.
            model: The network of the run.
            saved: The state of the strategy in checkpoints.
        """
        digests: CodeState = {}
        has_user_model = bool(self.kinds & {"model", "norm"})
        if "strategy" in self.kinds:
            modules = self._modules.get("strategy", {})
            state = strategy_state(strategy, modules, head, model, saved)
            digests |= {f"strategy {name}": digest for name, digest in state.items()}
            if not has_user_model:  # the strategy may change it in unsaved ways
                state = network_state(model, modules)
                of_model = {name: digest for name, digest in state.items() if f"strategy {name}" not in digests}
                digests |= {f"strategy model.{name}": digest for name, digest in of_model.items()}
        if has_user_model:
            state = network_state(model, {**self._modules.get("norm", {}), **self._modules.get("model", {})})
            digests |= {f"model {name}": digest for name, digest in state.items()}
        return digests

    def step_state(self, model: nn.Module, saved: Mapping[str, object]) -> CodeState:
        """Return what no captured step may change in state that checkpoints contain: all but the values of its tensors.

        A replay of a captured step changes the values of the same tensors again, but executes no Python.

        Args:
            model: The network of the run.
            saved: The state of the strategy in checkpoints.
        """
        state = {f"strategy self.{name}": split_state(value) for name, value in saved.items()}
        state |= {f"model {name}": ({"": t}, None) for name, t in model.state_dict().items()}
        # They are kept until the next call, so that no new tensor can get the address of one of them.
        self._tensors = [tensors for tensors, _ in state.values()]
        return {
            name: json.dumps([values, [(t.data_ptr(), t.shape, str(t.dtype)) for t in tensors.values()]])
            for name, (tensors, values) in state.items()
        }
