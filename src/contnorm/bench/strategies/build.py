"""Build the strategy of a run by name: a built-in one or a user's, which is checked here and at each step."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from contnorm.bench.components import components, find_component
from contnorm.bench.config.own_settings import make_settings, resolve_options
from contnorm.bench.config.schema import StrategyConfig
from contnorm.bench.strategies.base import Batch, OutputMask, Strategy
from contnorm.bench.strategies.registry import ALIASES, STRATEGIES, strategy_defaults
from contnorm.bench.user_code import is_user_code, load_user_code, user_code_error
from contnorm.errors import UserCodeError, UserError, unknown

__all__ = ["build_strategy", "check_loss", "check_user_strategy", "resolve_strategy"]

_HOOKS = {  # the number of arguments of each
    "setup": 0,
    "after_backward": 1,
    "on_task_start": 1,
    "on_task_end": 2,
    "on_step_start": 1,
    "on_step_end": 2,
    "state_dict": 0,
    "load_state_dict": 1,
}


def build_strategy(config: StrategyConfig) -> Strategy:
    """Build a strategy by name, or from a user's file as ``path/to/file.py:ClassName``.

    Example:
        >>> type(build_strategy(StrategyConfig("der++"))).__name__
        'DERpp'
    """
    name = ALIASES.get(config.name.lower(), config.name.lower())
    if name in STRATEGIES:
        return _instantiate(_import_target(STRATEGIES[name].target), config)
    if not is_user_code(config.name) and find_component("strategy", config.name) is None:
        known = [component.name for component in components("strategy")]
        raise unknown("strategy", config.name, [*STRATEGIES, *known, "path/to/file.py:ClassName"])
    return _instantiate(load_user_code(config.name, "strategy"), config)


def resolve_strategy(config: StrategyConfig, given: Collection[str]) -> StrategyConfig:
    """Return the settings of a strategy with its own settings checked and completed.

    A user's strategy is loaded for this, and built to see that it can be. A subclass of a built-in strategy has the
    defaults of that one.

    Args:
        config: The settings of the strategy.
        given: The names of those that the user has set, which no default replaces.
    """
    if config.name in STRATEGIES:
        return config
    made = build_strategy(config)
    built_in = next(cls for cls in type(made).__mro__ if cls.__module__.startswith("contnorm.bench.strategies."))
    defaults = strategy_defaults(built_in.__dict__["name"]).get("strategy", {})
    return replace(made.config, **{name: value for name, value in defaults.items() if name not in given})


def _import_target(target: str) -> object:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _instantiate(cls: object, config: StrategyConfig) -> Strategy:
    if isinstance(cls, Strategy):  # an object of the Python API: every run gets a copy of it
        strategy = copy.deepcopy(cls)
        _give_settings(strategy, config)
        check_user_strategy(config.name, strategy)
        return strategy
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise UserError(f"strategy {config.name!r}: is not a subclass of contnorm.bench.Strategy.")
    config = replace(config, options=resolve_options("strategy", config, cls))
    try:
        strategy = cls(config)
        _give_settings(strategy, config)
    except UserError:
        raise
    except Exception as error:
        if is_user_code(config.name):
            raise user_code_error(error, "strategy", config.name, "called with its settings") from error
        raise
    if is_user_code(config.name):
        check_user_strategy(config.name, strategy)
    return strategy


def _give_settings(strategy: Strategy, config: StrategyConfig) -> None:
    """Set the settings of a strategy, also of one whose constructor does not call that of the base class."""
    strategy.config = replace(config, options=resolve_options("strategy", config, type(strategy)))
    strategy.settings = make_settings(type(strategy), dict(strategy.config.options))


def check_user_strategy(name: str, made: Strategy) -> None:
    """Check the signatures of the loss and the hooks, and the attributes of a user's strategy.

    Args:
        name: Name of the strategy in the settings, for messages.
        made: The strategy.

    Raises:
        UserError: If the strategy can't be run.
    """
    if type(made).loss is Strategy.loss:
        raise UserError(f"strategy {name!r}: does not define a loss. Define loss(self, model, head, stream, replay).")
    try:
        inspect.signature(made.loss).bind(None, None, None, ())
    except TypeError as error:
        raise UserError(
            f"strategy {name!r}: its loss can't be called with (model, head, stream, replay): {error}. Define "
            f"loss(self, model, head, stream, replay)."
        ) from error
    for hook, count in _HOOKS.items():
        _check_hook(name, made, hook, count)
    if (type(made).state_dict is Strategy.state_dict) != (type(made).load_state_dict is Strategy.load_state_dict):
        raise UserError(f"strategy {name!r}: defines one of state_dict and load_state_dict. Define both or neither.")
    if type(made.draws) is not int or made.draws < 0:
        raise UserError(f"strategy {name!r}: draws = {made.draws!r}. Use a whole number, 0 for no replay.")
    for attribute in ("stores_logits", "multi_label"):
        value = getattr(made, attribute)
        if type(value) is not bool:
            raise UserError(f"strategy {name!r}: {attribute} = {value!r}. Use True or False.")


def _check_hook(name: str, made: Strategy, hook: str, count: int) -> None:
    """Check that a hook can be called with its arguments."""
    expected = inspect.signature(getattr(Strategy, hook))
    try:
        inspect.signature(getattr(made, hook)).bind(*[None] * count)
    except TypeError as error:
        arguments = ", ".join(expected.parameters)
        raise UserError(
            f"strategy {name!r}: its {hook} can't be called as the engine does: {error}. Define {hook}({arguments})."
        ) from error


def check_loss(
    name: str, answer: object, stores_logits: bool, head: OutputMask, stream: Batch
) -> tuple[Tensor, Tensor | None]:
    """Validate the result of a strategy's loss.

    Raises:
        UserCodeError: If the loss can't be backpropagated or the logits can't be stored. Without this check a wrong
            result could stay unnoticed or fail elsewhere.

    Example:
        >>> batch, head = Batch(torch.zeros(2, 1), *torch.zeros(2, 2)), OutputMask(torch.ones(1, 3, dtype=torch.bool))
        >>> check_loss("mine.py:Mine", torch.zeros(2), False, head, batch)
        Traceback (most recent call last):
        contnorm.errors.UserCodeError: strategy 'mine.py:Mine': its loss must return (loss, logits), ...
    """
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise UserCodeError(
            f"strategy {name!r}: its loss must return (loss, logits), where logits is None unless they are stored, not "
            f"{_describe(answer)}."
        )
    loss, logits = answer
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise UserCodeError(
            f"strategy {name!r}: the loss must be a tensor with one real number, not {_describe(loss)}. Return the "
            f"mean over the samples."
        )
    if not loss.requires_grad:
        raise UserCodeError(
            f"strategy {name!r}: the loss has no gradient. Compute it from model(x) without detach(), item() or "
            f"no_grad()."
        )
    return loss, _checked_logits(name, logits, stores_logits, (len(stream), head.competing.shape[1]))


def _checked_logits(name: str, logits: object, stores_logits: bool, shape: tuple[int, int]) -> Tensor | None:
    if not stores_logits:
        if logits is not None:
            raise UserCodeError(
                f"strategy {name!r}: its loss returns logits, but stores_logits is False. Set stores_logits = True, or "
                f"return None."
            )
        return None
    fits = isinstance(logits, Tensor) and logits.dtype == torch.float32 and tuple(logits.shape) == shape
    if not fits or (isinstance(logits, Tensor) and logits.requires_grad):
        raise UserCodeError(
            f"strategy {name!r}: with stores_logits = True, its loss must return the detached logits of the stream "
            f"batch, float32 of shape {shape}, not {_describe(logits)}. Return logits.detach().float()."
        )
    assert isinstance(logits, Tensor)
    return logits


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(value.shape)}, {kind}{', with a gradient' if value.requires_grad else ''}"
    if isinstance(value, tuple | list):
        return f"{len(value)} values"
    return "None" if value is None else f"an object of type {type(value).__name__}"
