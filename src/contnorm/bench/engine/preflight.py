"""Preflight checks of a network on the CPU, before anything is written: errors of later steps are reported here.

A user-defined network does a forward pass of two images in evaluation mode and in training mode. It must have the norm
that the settings name, and a state that checkpoints can hold. A network of the package does a forward pass of two
images in training mode, since not every norm fits every network and image size. If the plan has a forward pass of a
single sample, the network also does one in training mode: batch moments need more than one value.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from contextlib import nullcontext
from functools import cache

import torch
from torch import nn

from contnorm.bench.components import is_user_code, user_code_error
from contnorm.bench.config.schema import ModelConfig, NormConfig, RunConfig
from contnorm.bench.engine.checkpoint import DTYPES
from contnorm.bench.engine.memory_samples import sample_weights, stored_items
from contnorm.bench.engine.norm_hooks import NormHooks
from contnorm.bench.models.norm_layers import check_norms, record_norm_calls
from contnorm.bench.plan import Plan, Step
from contnorm.bench.streams.tasks import TaskSequence
from contnorm.convert.detect import holds_moments
from contnorm.errors import UserError
from contnorm.moments.reestimate import keeps_moments, moment_layers
from contnorm.tags import BatchTags, batch_tags

__all__ = ["check_moment_settings", "check_network"]

Shape = tuple[int, ...]


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
    with batch_tags(_tags(2)):  # for layers that need them in training
        if is_user_code(config.model.name):
            with record_norm_calls(model) as called:
                _try_shapes(model, config.model.name, shape, outputs)
            if not any_norm:
                check_norms(model, config.model.name, config.norm, called)
            _try_learning(model, config.model.name, shape, outputs)
            _try_saving(model, config.model.name)
            _try_moments(model, config)
        else:
            _try_norms(model, config, shape)
    if not is_user_code(config.strategy.name):  # the passes of a user-defined strategy are not known
        step = _first_single_sample_step(config, plan)
        if step is not None:
            _try_one_sample(model, config, plan, step, shape)


def _tags(samples: int) -> BatchTags:
    return BatchTags(torch.zeros(samples, dtype=torch.bool), torch.zeros(samples, dtype=torch.int64))


_checked: set[tuple[ModelConfig, NormConfig, Shape]] = set()  # networks of the package that passed the check


def _try_norms(model: nn.Module, config: RunConfig, shape: Shape) -> None:
    """Reject a norm that does not fit a network of the package, such as instance norm without positions.

    Each combination of network, norm and image shape is checked once, since many runs have the same.
    """
    key = (config.model, config.norm, shape)
    if key in _checked:
        return
    check_norms(model, config.model.name, config.norm, set())
    if is_user_code(config.norm.name) or config.norm.code is not None:
        _try_user_norm(model, config, shape)
        return
    weights: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}  # are not copied
    try:
        with torch.no_grad():
            copy.deepcopy(model, weights).train()(torch.zeros(2, *shape))
    except ValueError as error:
        raise UserError(
            f"norm {config.norm.name!r}: does not fit model {config.model.name!r} with images of shape {shape}. {error}"
        ) from error
    _checked.add(key)


def _try_user_norm(model: nn.Module, config: RunConfig, shape: Shape) -> None:
    """Reject a user's norm that fails in a network of the package: in a training step, or in evaluation."""
    for training in (True, False):
        trial = copy.deepcopy(model).train(training)
        try:
            # Evaluation has no tags, and no gradients.
            with nullcontext() if training else batch_tags(None), torch.set_grad_enabled(training):
                output = trial(torch.zeros(2, *shape))
                if training:
                    (output.sum() + NormHooks(trial, config.norm.name).auxiliary_loss()).backward()
        except UserError:
            raise
        except Exception as error:
            mode = "training" if training else "evaluation"
            condition = f"in {mode}, in model {config.model.name!r} for images of shape {(2, *shape)}"
            raise user_code_error(error, "norm", config.norm.name, condition) from error
    _try_saving(model, config.model.name)
    _try_moments(model, config)


def _try_shapes(model: nn.Module, name: str, shape: Shape, outputs: int) -> None:
    was_training = model.training
    try:
        with batch_tags(None):  # evaluation has none
            # Twice at most: lazy layers draw their weights in the first forward pass, and none in the second.
            draws = _draws(model.eval(), name, shape, outputs) and _draws(model, name, shape, outputs)
    finally:
        model.train(was_training)
    if draws:
        _warn_of_draws(name)


def _draws(model: nn.Module, name: str, shape: Shape, outputs: int) -> bool:
    """Whether a forward pass draws random numbers."""
    before = torch.random.get_rng_state()
    _try_forward(model, name, shape, outputs, "")
    return not torch.equal(before, torch.random.get_rng_state())


def _try_forward(model: nn.Module, name: str, shape: Shape, outputs: int, when: str) -> None:
    condition = f"{when}for images of shape {(2, *shape)}"
    try:
        with torch.no_grad():
            output = model(torch.zeros(2, *shape))
    except Exception as error:
        raise user_code_error(error, "model", name, condition) from error
    got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if got != (2, outputs):
        raise UserError(
            f"model {name!r}: {condition} its output must have shape {(2, outputs)}, one value per output of the "
            f"stream, not {got}. Use num_outputs, the second argument of your function, or "
            f"stream.num_outputs."
        )


def _try_learning(model: nn.Module, name: str, shape: Shape, outputs: int) -> None:
    """Check a forward pass in training mode; on a copy if possible, since running moments change."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model {name!r}: no parameter has requires_grad=True. Set it for the parameters to train.")
    try:
        trial = copy.deepcopy(model)
    except Exception:  # such as a network with a non-leaf tensor; it can be trained all the same
        return
    _try_forward(trial.train(), name, shape, outputs, "in training, ")


@cache  # one warning for all seeds
def _warn_of_draws(name: str) -> None:
    logging.getLogger("contnorm").warning(
        f"model {name!r}: draws random numbers in evaluation mode, so its scores are not reproducible. Draw none if "
        f"self.training is False."
    )


def _try_saving(model: nn.Module, name: str) -> None:
    """Reject a network whose state_dict() a checkpoint can't hold."""
    for key, value in model.state_dict().items():
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        if kind not in DTYPES:
            allowed = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
            raise UserError(
                f"model {name!r}: {key} in its state_dict() is of {kind}, which a checkpoint can't contain. Use "
                f"tensors of {allowed}, or register_buffer(..., persistent=False)."
            )


def _try_moments(model: nn.Module, config: RunConfig) -> None:
    """Reject a network whose exact moments the evaluation needs and can't estimate."""
    exact = config.evaluate.moments in ("oracle", "memory")
    if not exact and not (config.evaluate.drift and keeps_moments(model)):
        return
    try:
        moment_layers(model)
    except ValueError as error:
        setting = "evaluate.moments=running (--eval-moments running)" if exact else "evaluate.drift=false"
        raise UserError(f"model {config.model.name!r}: {error} Or set {setting}.") from error


def check_moment_settings(model: nn.Module, config: RunConfig, plan: Plan, stream: TaskSequence) -> None:
    """Reject frozen moments of a network without any, and moments of a memory that does not exist or is too small.

    Raises:
        UserError: If a check fails.
    """
    if config.norm.freeze_after is not None:
        _check_freezing(model, config, stream)
    if config.evaluate.moments == "memory":
        _check_memory(config, plan, stream)


def _check_freezing(model: nn.Module, config: RunConfig, stream: TaskSequence) -> None:
    after = config.norm.freeze_after
    assert after is not None
    if not any(map(holds_moments, model.modules())):
        raise UserError(
            f"norm.freeze_after={after}: norm {config.norm.name!r} has no running moments to freeze. Use a norm with "
            f"moments, such as bn or cn, or leave norm.freeze_after out."
        )
    if after >= stream.tasks:
        smaller = f"Use a number below {stream.tasks}." if stream.tasks > 1 else "Leave norm.freeze_after out."
        raise UserError(
            f"norm.freeze_after={after}: the stream has {stream.tasks} task{'' if stream.tasks == 1 else 's'}, so that "
            f"no task would be learned with frozen moments. {smaller}"
        )


def _check_memory(config: RunConfig, plan: Plan, stream: TaskSequence) -> None:
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


def _first_single_sample_step(config: RunConfig, plan: Plan) -> Step | None:
    """Return the first step with a forward pass of a single sample; None if there is none."""
    for step in plan.steps:
        if 1 in step.passes(config.strategy.forward):
            return step
    return None


def _try_one_sample(model: nn.Module, config: RunConfig, plan: Plan, step: Step, shape: Shape) -> None:
    try:
        with torch.no_grad(), batch_tags(_tags(1)):
            copy.deepcopy(model).train()(torch.zeros(1, *shape))
    except (ValueError, RuntimeError) as error:
        raise UserError(_single_sample_message(config, plan, step)) from error


def _single_sample_message(config: RunConfig, plan: Plan, step: Step) -> str:
    batch = config.train.batch
    reason = (
        f"and norm {config.norm.name!r} in model {config.model.name!r} can't compute batch moments of a single sample."
    )
    if len(step.stream) > 1:
        return (
            f"train.replay={config.train.replay}: with strategy.forward=separate a forward pass of task {step.task} "
            f"has one replayed sample, {reason} Use a larger train.replay (--replay) or memory.size (--buffer), or "
            f"strategy.forward=joint."
        )
    if batch == 1:
        return f"train.batch=1: every batch of the stream is one sample, {reason} Use train.batch=2 (--batch) or more."
    sizes = _sizes(config, plan)
    larger = next((b for b in range(batch + 1, max(sizes) + 1) if all(n % b != 1 for n in sizes)), None)
    advice = f"train.batch={larger} (--batch {larger}), or stream.train_per_task" if larger else "stream.train_per_task"
    return (
        f"train.batch={batch}: the last batch of task {step.task}, which has {sizes[0]} samples, is a single sample, "
        f"{reason} Set {advice} so that no batch has one sample."
    )


def _sizes(config: RunConfig, plan: Plan) -> list[int]:
    """Return the number of samples of each sequence that is split into batches: each task, or the whole stream."""
    shown: defaultdict[int, set[int]] = defaultdict(set)  # a sample once, however many updates and passes there are
    for step in plan.steps:
        shown[0 if config.stream.scenario == "free" else step.task].update(step.stream.tolist())
    return sorted(map(len, shown.values()), key=lambda n: n % config.train.batch != 1)
