"""Checks of a network on the CPU, before anything is written: what would fail hours later is reported here.

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
from contnorm.bench.engine.memory_samples import sample_weights, stored_items
from contnorm.bench.models.norm_layers import check_norms
from contnorm.bench.plan import Plan
from contnorm.bench.streams.tasks import TaskSequence
from contnorm.convert.detect import holds_moments
from contnorm.errors import UserError
from contnorm.moments.pooling import keeps_moments, moment_layers
from contnorm.tags import BatchTags, batch_tags

__all__ = ["check_moment_settings", "check_network"]

Shape = tuple[int, ...]

_checked: set[tuple[ModelConfig, NormConfig, Shape]] = set()  # networks of the package that passed the check


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
    own_network = is_user_code(config.model.name)
    own_norm = is_user_code(config.norm.name) or config.norm.code is not None
    key = config.model, config.norm, shape
    if own_network or own_norm:
        _check_output(model, config, shape, outputs, "model" if own_network else "norm")
        if not any_norm:
            check_norms(model, config.model.name, config.norm)
    elif key not in _checked:
        check_norms(model, config.model.name, config.norm)
        try:
            _run_in_training(model, 2, shape)
        except ValueError as error:
            raise UserError(
                f"norm {config.norm.name!r}: does not fit model {config.model.name!r} with images of shape {shape}. "
                f"{error}"
            ) from error
        _checked.add(key)
    exact = config.evaluate.moments in ("oracle", "memory") or (config.evaluate.drift and keeps_moments(model))
    if exact and (own_network or own_norm):
        try:
            moment_layers(model)
        except ValueError as error:
            advice = "evaluate.moments=running (--eval-moments running) and evaluate.drift=false"
            raise UserError(f"model {config.model.name!r}: {error} Or set {advice}.") from error
    if not is_user_code(config.strategy.name):  # the passes of a user-defined strategy are not known
        single = next((step for step in plan.steps if 1 in step.passes(config.strategy.forward)), None)
        if single is not None:
            try:
                _run_in_training(model, 1, shape)
            except (ValueError, RuntimeError) as error:
                raise UserError(
                    f"train.batch={config.train.batch}: a forward pass of task {single.task} has a single sample, and "
                    f"norm {config.norm.name!r} in model {config.model.name!r} can't compute batch moments of it. "
                    f"Change train.batch, train.replay or stream.train_per_task so that no pass has one sample."
                ) from error


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
            f"your function, or stream.num_outputs."
        )


def _run_in_training(model: nn.Module, samples: int, shape: Shape) -> None:
    """Do a forward pass in training mode, on a copy, since running moments change."""
    tags = BatchTags(torch.zeros(samples, dtype=torch.bool), torch.zeros(samples, dtype=torch.int64))
    weights: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}  # are not copied
    with torch.no_grad(), batch_tags(tags):
        copy.deepcopy(model, weights).train()(torch.zeros(samples, *shape))


def check_moment_settings(model: nn.Module, config: RunConfig, plan: Plan, stream: TaskSequence) -> None:
    """Reject frozen moments of a network without any, and moments of a memory that does not exist or is too small.

    Raises:
        UserError: If a check fails.
    """
    after = config.norm.freeze_after
    if after is not None and not any(map(holds_moments, model.modules())):
        raise UserError(
            f"norm.freeze_after={after}: norm {config.norm.name!r} has no running moments to freeze. Use a norm with "
            f"moments, such as bn or cn, or leave norm.freeze_after out."
        )
    if after is not None and after >= stream.tasks:
        raise UserError(f"norm.freeze_after={after}: is not below the number of tasks, {stream.tasks}.")
    if config.evaluate.moments != "memory":
        return
    running = "evaluate.moments=running (--eval-moments running)"
    if not plan.slots:
        raise UserError(
            f"evaluate.moments=memory: strategy {config.strategy.name!r} has no memory to estimate moments from. Use a "
            f"strategy that has one, such as er, or {running}."
        )
    for task, end in enumerate(plan.ends):
        items = stored_items(plan, end)
        samples = int((sample_weights(config, plan, stream.train.task[items], task) > 0).sum())
        if samples < 2:
            raise UserError(
                f"evaluate.moments=memory: after task {task} the memory has {samples} samples with a weight, and a "
                f"variance needs two or more. Use a larger memory.size (--buffer), or {running}."
            )
