"""What the user's code and the layers of a run ask of the training loop: random numbers, hooks, tags, an extra batch.

User code may draw random numbers from the global generators of Python, NumPy and torch in a step, such as for dropout;
the package draws none. The generators are seeded by the seed of the run and the step only, so that a run can be
repeated and resumed bit-exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.bench.components import Kind, user_code_error, user_parts
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.plan import Plan
from contnorm.bench.rng import seed_for
from contnorm.bench.strategies.base import Strategy, TaskInfo
from contnorm.bench.streams.tasks import TaskSequence
from contnorm.errors import UserCodeError, UserError
from contnorm.tags import ReplayRequest

STRATEGY_HOOKS = ("after_backward", "on_task_start", "on_task_end", "on_step_start", "on_step_end")


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


class UserCode:
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
        self.seed, self.device, self.draws_random = seed, device, False
        self.parts: dict[Kind, tuple[str, str | None]] = user_parts(config)
        self.parts.pop("memory", None)

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seed the global generators for user code; not in a graph capture, since captured code draws nothing.

        On a GPU, it is recorded whether a step draws random numbers: every graph replay would draw the same ones.
        """
        on_gpu = self.device.type == "cuda"
        if not self.parts or (on_gpu and torch.cuda.is_current_stream_capturing()):
            yield
            return
        seed = seed_for(self.seed, purpose)
        with seeded_generators(seed, self.device):
            yield
            if on_gpu and purpose.startswith("step") and not self.draws_random:
                self.draws_random = has_drawn(seed, self.device)

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
        """Return the components, for messages."""
        return " or ".join(f"{kind} {name!r}" for kind, (name, _) in self.parts.items())


class NormHooks:
    """The layers of a network that define hooks of `contnorm.tags`.

    Args:
        model: The network.

    Attributes:
        task_start, task_end: Methods that are called before the first and after the last step of a task.
        losses: Methods that return what is added to the loss.
        request: The extra batch from the memory that layers request; None if they request none.
        need_tags: Whether a layer needs the tags of the batch.
        need_joint_forward: Whether a layer needs stream and memory samples in one forward pass.
        max_tasks: The number of tasks that all layers support; None if there is no limit.

    Example:
        >>> class Penalized(nn.BatchNorm1d):
        ...     def auxiliary_loss(self):
        ...         return self.weight.square().sum()
        >>> hooks = NormHooks(nn.Sequential(nn.Linear(2, 3), Penalized(3)))
        >>> hooks.need_tags, [loss().item() for loss in hooks.losses]
        (False, [3.0])
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())

        def values(name: str) -> list[Any]:
            return [value for module in modules if (value := getattr(module, name, None)) is not None]

        self.task_start, self.task_end = values("on_task_start"), values("on_task_end")
        self.losses = values("auxiliary_loss")
        requests = set(values("replay_request"))
        if len(requests) > 1:
            raise UserError(f"layers have different replay_request ({requests}). A step has one extra batch: use one.")
        self.request: ReplayRequest | None = next(iter(requests), None)
        self.need_tags = self.request is not None or any(values("needs_tags"))
        self.need_joint_forward = any(values("needs_joint_forward"))
        limits: list[Any] = [
            getattr(module, "num_tasks", None) for module in modules if hasattr(module, "on_task_start")
        ]
        self.max_tasks: int | None = min((limit for limit in limits if isinstance(limit, int)), default=None)


def strategy_hooks(strategy: Strategy) -> set[str]:
    """Return the names of the hooks that the class of a strategy overrides.

    Example:
        >>> from contnorm.bench import EWC
        >>> sorted(strategy_hooks(EWC()))
        ['on_task_end']
    """
    return {hook for hook in STRATEGY_HOOKS if getattr(type(strategy), hook) is not getattr(Strategy, hook)}


def task_info(stream: TaskSequence, plan: Plan, task: int) -> TaskInfo:
    """Return the description of a task that hooks get."""
    labels = stream.train.label[stream.train.task == task]
    classes = np.flatnonzero(labels.any(0)) if labels.ndim == 2 else np.unique(labels)
    return TaskInfo(task, tuple(classes.tolist()), len(plan.ends))


def task_items(plan: Plan, task: int) -> Tensor:
    """Return the training items of a task that the plan has, in its order, each once."""
    ends = (0, *plan.ends)
    shown = np.concatenate([step.stream for step in plan.steps[ends[task] : ends[task + 1]]])
    _, first = np.unique(shown, return_index=True)
    return torch.from_numpy(shown[np.sort(first)])
