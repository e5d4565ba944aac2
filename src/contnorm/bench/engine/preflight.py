"""Checks of a run on the CPU, before anything is written: what would fail hours later is reported here.

A network does a forward pass of two images: with user code in evaluation mode, and its output must have the shape that
the stream needs; otherwise in training mode, since not every norm fits every network and image size. If the plan has a
forward pass of a single sample, it also does one in training mode: batch moments need more than one value.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from contnorm.bench.components import is_user_code, user_code_error
from contnorm.bench.config.schema import ModelConfig, NormConfig, RunConfig
from contnorm.bench.engine.hooks import NormHooks, strategy_hooks
from contnorm.bench.models.norm_layers import check_norms
from contnorm.bench.plan import Plan, sample_weights, stored_items
from contnorm.bench.strategies.base import Strategy
from contnorm.bench.streams.tasks import TaskSequence
from contnorm.detect import holds_moments
from contnorm.errors import UserError
from contnorm.moments.pooling import keeps_moments, moment_layers
from contnorm.tags import BatchTags, batch_tags

Shape = tuple[int, ...]

_checked: set[tuple[ModelConfig, NormConfig, Shape]] = set()  # networks of the package that passed the check


def check_hooks(config: RunConfig, stream: TaskSequence, strategy: Strategy, norm_hooks: NormHooks) -> None:
    """Reject hooks that this run can't call, and streams that the strategy or the norm does not support."""
    name, norm, hooks = config.strategy.name, config.norm.name, strategy_hooks(strategy)
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
        problem = "with a pass of a single sample. Change train.batch, train.replay or stream.train_per_task."
        if not is_user_code(config.strategy.name) and any(1 in sizes for sizes in passes):  # the passes are known
            _run_in_training(model, 1, shape)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{names} {problem} {error}") from error


def _check_output(model: nn.Module, config: RunConfig, shape: Shape, outputs: int, own: str) -> None:
    """Reject a network with user code that fails in evaluation, or whose output has another shape than needed."""
    was_training = model.training
    try:
        with torch.no_grad(), batch_tags(None):  # evaluation has none
            output = model.eval()(torch.zeros(2, *shape))
    except Exception as error:  # of user code
        name = config.model.name if own == "model" else config.norm.name
        raise user_code_error(error, f"{own} {name!r}", f"for images of shape {(2, *shape)}") from error
    finally:
        model.train(was_training)
    got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if got != (2, outputs):
        raise UserError(
            f"model {config.model.name!r}: for images of shape {(2, *shape)} its output must have shape "
            f"{(2, outputs)}, one value per output of the stream, not {got}. Use num_outputs, the second argument of "
            f"your function."
        )


def _run_in_training(model: nn.Module, samples: int, shape: Shape) -> None:
    """Do a forward pass in training mode, on a copy, since running moments change."""
    tags = BatchTags(torch.zeros(samples, dtype=torch.bool), torch.zeros(samples, dtype=torch.int64))
    weights: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}  # are not copied
    with torch.no_grad(), batch_tags(tags):
        copy.deepcopy(model, weights).train()(torch.zeros(samples, *shape))


def check_moments(model: nn.Module, config: RunConfig, plan: Plan, stream: TaskSequence) -> None:
    """Reject frozen moments of a network without any, and moments of a memory that does not exist or is too small."""
    after = config.norm.freeze_after
    if after is not None and not any(map(holds_moments, model.modules())):
        raise UserError(f"norm.freeze_after={after}: norm {config.norm.name!r} has no running moments to freeze.")
    if after is not None and after >= stream.tasks:
        raise UserError(f"norm.freeze_after={after}: is not below the number of tasks, {stream.tasks}.")
    if config.evaluate.moments != "memory":
        return
    for task, end in enumerate(plan.ends):
        items = stored_items(plan, end)
        samples = int((sample_weights(config, plan, stream.train.task[items], task) > 0).sum())
        if samples < 2:
            raise UserError(
                f"evaluate.moments=memory: after task {task} the memory has {samples} samples with a weight, and a "
                f"variance needs two or more. Use a strategy with a memory and a larger memory.size (--buffer), or "
                f"evaluate.moments=running (--eval-moments running)."
            )
