"""What the user's code and the layers of a run ask of the training loop, and checks of both before a run.

User code may draw random numbers from the global generators of Python, NumPy and torch in a step, such as for dropout;
the package draws none. The generators are seeded by the seed of the run and the step only, so that a run can be
repeated and resumed bit-exactly.

What would fail hours later is reported on the CPU, before anything is written. A network does a forward pass of two
images: with user code in evaluation mode, and its output must have the shape that the stream needs; otherwise in
training mode, since not every norm fits every network and image size. If the plan has a forward pass of a single
sample, it also does one in training mode: batch moments need more than one value.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.bench.components import ComponentKind, is_user_code, user_code_error, user_code_errors
from contnorm.bench.config.schema import ModelConfig, NormConfig, RunConfig
from contnorm.bench.models.norm_layers import check_norms
from contnorm.bench.plan import Plan, sample_weights, stored_items, warn_once
from contnorm.bench.rng import seed_for
from contnorm.bench.strategies.base import Strategy, TaskInfo
from contnorm.bench.streams.tasks import TaskSequence
from contnorm.detect import holds_moments
from contnorm.errors import UserCodeError, UserError
from contnorm.moments.freeze import evaluation_mode
from contnorm.moments.pooling import keeps_moments, moment_layers
from contnorm.tags import BatchTags, ReplayRequest, batch_tags

Shape = tuple[int, ...]

_checked: set[tuple[ModelConfig, NormConfig, Shape]] = set()  # networks of the package that passed the check
STRATEGY_HOOKS = ("after_backward", "on_task_start", "on_task_end", "on_step_start", "on_step_end")
HOOKS_OF_LAYERS = (
    "on_task_start", "on_task_end", "auxiliary_loss", "replay_request", "needs_tags", "needs_joint_forward"
)  # fmt: skip


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
        parts: Name and hash of those that are user code, by ``"strategy"``, ``"model"`` and ``"norm"``.
        seed: The seed of the run.
        device: The device it is trained on.

    Attributes:
        draws_random: Whether a step drew random numbers; checked on a GPU only.
    """

    def __init__(self, parts: Mapping[ComponentKind, tuple[str, str | None]], seed: int, device: torch.device) -> None:
        self.parts, self.seed, self.device, self.draws_random = parts, seed, device, False

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seed the global generators for user code; not in a graph capture, since captured code draws nothing.

        On a GPU, it is recorded whether a step draws random numbers: every graph replay would draw the same ones.
        """
        on_gpu = self.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
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
        values: dict[str, list[Any]] = {
            name: [value for module in modules if (value := getattr(module, name, None)) is not None]
            for name in HOOKS_OF_LAYERS
        }
        self.task_start, self.task_end = values["on_task_start"], values["on_task_end"]
        self.losses = values["auxiliary_loss"]
        requests = set(values["replay_request"])
        if len(requests) > 1:
            raise UserError(f"layers have different replay_request ({requests}). A step has one extra batch: use one.")
        self.request: ReplayRequest | None = next(iter(requests), None)
        self.need_tags = self.request is not None or any(values["needs_tags"])
        self.need_joint_forward = any(values["needs_joint_forward"])
        limits: list[Any] = [
            getattr(module, "num_tasks", None) for module in modules if hasattr(module, "on_task_start")
        ]
        self.max_tasks: int | None = min((limit for limit in limits if isinstance(limit, int)), default=None)


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


def check_run(
    model: nn.Module,
    config: RunConfig,
    plan: Plan,
    stream: TaskSequence,
    strategy: Strategy,
    hooks: Collection[str],
    norm_hooks: NormHooks,
) -> None:
    """Reject hooks that this run can't call, streams that the strategy or the norm does not support, and moments of a
    network without any or of a memory that does not exist or is too small.
    """
    name, norm, hooks = config.strategy.name, config.norm.name, set(hooks)
    if hooks & {"on_step_start", "on_step_end"} and config.train.graph == "on":
        raise UserError(
            f"strategy {name!r}: on_step_start and on_step_end run on the host at every step, which captured steps "
            f"can't do. Set train.graph=off, or use after_backward(grads)."
        )
    of_norm = norm_hooks.task_start or norm_hooks.task_end
    if stream.task_free and (of_norm or hooks & {"on_task_start", "on_task_end"}):
        owner = f"norm {norm!r}" if of_norm else f"strategy {name!r}"
        raise UserError(f"stream.scenario=free: has no task boundaries, at which {owner} has hooks.")
    if norm_hooks.need_joint_forward and strategy.draws and config.strategy.forward == "separate":
        raise UserError(
            f"strategy.forward=separate: norm {norm!r} is not defined for separate forward passes of stream and "
            f"memory samples. Use strategy.forward=joint."
        )
    if norm_hooks.max_tasks is not None and stream.tasks > norm_hooks.max_tasks:
        raise UserError(f"norm {norm!r}: has num_tasks={norm_hooks.max_tasks}. Set norm.num_tasks={stream.tasks}.")
    if stream.multi_label and not strategy.multi_label:
        raise UserError(f"strategy {name!r}: does not support multi-label streams. Use another one, such as er or prs.")
    after = config.norm.freeze_after
    if after is not None and not any(map(holds_moments, model.modules())):
        raise UserError(f"norm.freeze_after={after}: norm {norm!r} has no running moments to freeze.")
    if after is not None and after >= stream.tasks:
        raise UserError(f"norm.freeze_after={after}: is not below the number of tasks, {stream.tasks}.")
    for task, end in enumerate(plan.ends if config.evaluate.moments == "memory" else ()):
        items = stored_items(plan, end)
        samples = int((sample_weights(config, plan, stream.train.task[items], task) > 0).sum())
        if samples < 2:
            raise UserError(
                f"evaluate.moments=memory: after task {task} the memory has {samples} samples with a weight, and a "
                f"variance needs two or more. Use a strategy with a memory and a larger memory.size (--buffer), or "
                f"evaluate.moments=running (--eval-moments running)."
            )


def check_network(
    model: nn.Module, config: RunConfig, plan: Plan, shape: Shape, outputs: int, any_norm: bool = False
) -> None:
    """Reject a network that can't process the images or all batch sizes of a run, or does not have the run's norm.

    Args:
        model: The untrained network, on the CPU.
        config: The settings of the run.
        plan: The plan of the run.
        shape: The shape of an image.
        outputs: Number of outputs that the stream needs.
        any_norm: Whether a user-defined network may have any norm. For networks whose results are not recorded.

    Raises:
        UserError: If a check fails.
    """
    own_network, key = is_user_code(config.model.name), (config.model, config.norm, shape)
    is_own = own_network or config.norm.code is not None or is_user_code(config.norm.name)
    if is_own:
        _check_output(model, config, shape, outputs, "model" if own_network else "norm")
    if not any_norm and (is_own or key not in _checked):
        check_norms(model, config.model.name, config.norm)
    passes = [step.passes(config.strategy.forward) for step in plan.steps]
    names = f"norm {config.norm.name!r}: does not fit model {config.model.name!r}"
    try:
        problem = "with evaluate.moments and evaluate.drift; set running and false."
        if (
            is_own
            and keeps_moments(model)
            and (config.evaluate.drift or config.evaluate.moments in ("oracle", "memory"))
        ):
            moment_layers(model)
        problem = f"with images of shape {shape}."
        if not is_own and key not in _checked:
            _run_in_training(model, 2, shape)
            _checked.add(key)
        problem = (
            "with a pass of a single sample, such as the last batch of a task. Leave it out with train.partial=drop, "
            "or change train.batch or train.replay."
        )
        if not is_user_code(config.strategy.name) and any(1 in sizes for sizes in passes):  # the passes are known
            _run_in_training(model, 1, shape)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{names} {problem} {error}") from error


def _check_output(model: nn.Module, config: RunConfig, shape: Shape, outputs: int, own: str) -> None:
    """Reject a network with user code that fails in evaluation, or whose output has another shape than needed."""
    name = config.model.name if own == "model" else config.norm.name
    with (
        user_code_errors(f"{own} {name!r}", f"for images of shape {(2, *shape)}"),
        evaluation_mode(model),
        torch.no_grad(),
        batch_tags(None),  # evaluation has none
    ):
        output = model(torch.zeros(2, *shape))
    got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if got != (2, outputs):
        raise UserError(
            f"model {config.model.name!r}: for images of shape {(2, *shape)} its output must have shape "
            f"{(2, outputs)}, one value per output of the stream, not {got}. Use num_outputs, the second argument of "
            f"your function."
        )
    if outputs > 1 and bool((output >= 0).all()) and torch.allclose(output.sum(1), output.new_ones(2)):
        warn_once(
            f"model {config.model.name!r}: its outputs are probabilities. Leave the softmax out: the loss applies it "
            f"to what the network returns."
        )


def _run_in_training(model: nn.Module, samples: int, shape: Shape) -> None:
    """Do a forward pass in training mode, on a copy, since running moments change."""
    tags = BatchTags(torch.zeros(samples, dtype=torch.bool), torch.zeros(samples, dtype=torch.int64))
    weights: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}  # are not copied
    with torch.no_grad(), batch_tags(tags):
        copy.deepcopy(model, weights).train()(torch.zeros(samples, *shape))
