"""A network is tried on the CPU before anything is written: what would fail at some later step fails here, in one line.

A network of the user's own is given two pictures, as in evaluation and as in training. It must have the norm that its
run is named by, and be one that a checkpoint can hold. A network of the package is given two pictures as in training,
since not every norm fits every network and size of pictures. Where the plan has a forward pass of a single sample, the
network is also given one as if it were to learn: batch moments can't be taken of one value.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from functools import cache

import torch
from torch import nn

from contnorm.bench.config.schema import ModelConfig, NormConfig, RunConfig
from contnorm.bench.engine.tensor_pack import KINDS
from contnorm.bench.models.norm_check import calls_recorded, check_norms
from contnorm.bench.plan import Plan, Step
from contnorm.bench.user_code import is_own_code, own_error
from contnorm.errors import UserError
from contnorm.moments.reestimate import keeps_moments, moment_layers

__all__ = ["try_out"]

Shape = tuple[int, ...]


def try_out(
    model: nn.Module, config: RunConfig, plan: Plan, shape: Shape, outputs: int, any_norm: bool = False
) -> None:
    """Refuse a network that can't take a run's pictures, or not all of its batches, or has not the run's norm.

    Args:
        model: The network, fresh, on the CPU.
        config: The run's settings.
        plan: Its steps.
        shape: Of a picture.
        outputs: How many the stream needs.
        any_norm: Whether a network of the user's own may have any norm, since nothing is recorded.
    """
    if is_own_code(config.model.name):
        with calls_recorded(model) as called:
            _try_shapes(model, config.model.name, shape, outputs)
        if not any_norm:
            check_norms(model, config.model.name, config.norm, called)
        _try_learning(model, config.model.name, shape, outputs)
        _try_saving(model, config.model.name)
        _try_moments(model, config)
    else:
        _try_norms(model, config, shape)
    if not is_own_code(config.strategy.name):  # how one of a user's own makes its passes is not known
        alone = _first_alone(config, plan)
        if alone is not None:
            _try_one_sample(model, config, plan, alone, shape)


_taken: set[tuple[ModelConfig, NormConfig, Shape]] = set()  # networks of the package that took two pictures


def _try_norms(model: nn.Module, config: RunConfig, shape: Shape) -> None:
    """Refuse a norm that a network of the package can't have, such as instance norm without positions.

    Once for each network, norm and shape of pictures, since many runs may have the same.
    """
    key = (config.model, config.norm, shape)
    if key in _taken:
        return
    try:
        with torch.no_grad():
            copy.deepcopy(model).train()(torch.zeros(2, *shape))
    except ValueError as error:
        raise UserError(
            f"norm {config.norm.name!r}: does not fit model {config.model.name!r} with pictures of shape {shape}. "
            f"{error}"
        ) from error
    _taken.add(key)


def _try_shapes(model: nn.Module, name: str, shape: Shape, outputs: int) -> None:
    was_training = model.training
    before = torch.random.get_rng_state()
    try:
        _try_forward(model.eval(), name, shape, outputs, "")
    finally:
        model.train(was_training)
    if not torch.equal(before, torch.random.get_rng_state()):
        _warn_of_draws(name)


def _try_forward(model: nn.Module, name: str, shape: Shape, outputs: int, when: str) -> None:
    given = f"{when}given pictures of shape {(2, *shape)}"
    try:
        with torch.no_grad():
            found = model(torch.zeros(2, *shape))
    except Exception as error:
        raise own_error(error, "model", name, given) from error
    got = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    if got != (2, outputs):
        raise UserError(
            f"model {name!r}: {given} it should give {(2, outputs)}, one number for each of the {outputs} outputs, and "
            f"gives {got}. make(shape, outputs, norm) is told how many."
        )


def _try_learning(model: nn.Module, name: str, shape: Shape, outputs: int) -> None:
    """In training a network may do other things; on a copy, where it can be copied, since moments would move."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model {name!r}: has no parameter that can learn. Leave requires_grad of some of them True.")
    try:
        trial = copy.deepcopy(model)
    except Exception:  # such as one with a tensor that was computed; it can be run all the same
        return
    _try_forward(trial.train(), name, shape, outputs, "in training, ")


@cache  # once, however many seeds there are
def _warn_of_draws(name: str) -> None:
    logging.getLogger("contnorm").warning(
        f"model {name!r}: draws random numbers in evaluation mode, which a run's seed does not determine. Run again, "
        f"it is measured with other numbers; draw none where self.training is False."
    )


def _try_saving(model: nn.Module, name: str) -> None:
    """What can't be put into a checkpoint is told before there is one."""
    for key, value in model.state_dict().items():
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        if kind not in KINDS:
            allowed = ", ".join(str(known).removeprefix("torch.") for known in KINDS)
            raise UserError(
                f"model {name!r}: {key} in its state_dict() is of {kind}, which a checkpoint can't hold. Use tensors "
                f"of {allowed}; register_buffer(..., persistent=False) keeps one out."
            )


def _try_moments(model: nn.Module, config: RunConfig) -> None:
    """Refuse a network whose exact moments the evaluation needs and cannot estimate."""
    oracle = config.evaluate.moments == "oracle"
    if not oracle and not (config.evaluate.drift and keeps_moments(model)):
        return
    try:
        moment_layers(model)
    except ValueError as error:
        setting = "--eval-moments running" if oracle else "--set evaluate.drift=false"
        raise UserError(f"model {config.model.name!r}: {error} Or evaluate without: {setting}.") from error


def _first_alone(config: RunConfig, plan: Plan) -> Step | None:
    """The first step with a forward pass of a single sample."""
    for step in plan.steps:
        if 1 in step.passes(config.strategy.forward):
            return step
    return None


def _try_one_sample(model: nn.Module, config: RunConfig, plan: Plan, step: Step, shape: Shape) -> None:
    try:
        with torch.no_grad():
            copy.deepcopy(model).train()(torch.zeros(1, *shape))
    except (ValueError, RuntimeError) as error:
        raise UserError(_alone_in_words(config, plan, step)) from error


def _alone_in_words(config: RunConfig, plan: Plan, step: Step) -> str:
    batch = config.train.batch
    why = f"and norm {config.norm.name!r} in model {config.model.name!r} has no moments of a single sample to learn by."
    if len(step.stream) > 1:
        return (
            f"train.replay={config.train.replay}: with strategy.forward=separate a forward pass of task {step.task} "
            f"has one replayed sample, {why} Use a larger --replay or --buffer, or strategy.forward=joint."
        )
    if batch == 1:
        return f"train.batch=1: every batch of the stream is one sample, {why} Use --batch 2 or more."
    sizes = _sizes(config, plan)
    other = next((b for b in range(batch + 1, max(sizes) + 1) if all(n % b != 1 for n in sizes)), None)
    mend = f"--batch {other}, or stream.train_per_task" if other else "stream.train_per_task"
    return (
        f"train.batch={batch}: the last batch of task {step.task} is one sample, what {sizes[0]} leave over, {why} Use "
        f"{mend} so that none is left alone."
    )


def _sizes(config: RunConfig, plan: Plan) -> list[int]:
    """How many samples are cut into batches at a time: a task's, or all where tasks are not known of."""
    shown: Counter[int] = Counter()
    for step in plan.steps:
        shown[0 if config.stream.scenario == "free" else step.task] += len(step.stream)
    return sorted(shown.values(), key=lambda n: n % config.train.batch != 1)
