"""Build the strategy of a run by name, a built-in one or a user's, and check what a user's loss returns."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from contnorm.bench.components import components, find_component, is_user_code, load_component, user_code_errors
from contnorm.bench.config.schema import StrategyConfig, resolve_options
from contnorm.bench.strategies.base import Batch, OutputMask, Strategy
from contnorm.bench.strategies.registry import ALIASES, STRATEGIES, strategy_defaults
from contnorm.errors import UserCodeError, UserError, unknown

__all__ = ["build_strategy", "check_loss", "resolve_strategy"]


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
    return _instantiate(load_component("strategy", config.name, config.code), config)


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


def _instantiate(value: object, config: StrategyConfig) -> Strategy:
    cls = type(value) if isinstance(value, Strategy) else value
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise UserError(f"strategy {config.name!r}: is not a subclass of contnorm.bench.Strategy.")
    config = replace(config, options=resolve_options("strategy", config, cls))
    with user_code_errors(f"strategy {config.name!r}", "called with its settings"):
        strategy = copy.deepcopy(value) if isinstance(value, Strategy) else cls(config)  # each run has its own
    strategy.configure(config)
    return strategy


def check_loss(
    name: str, answer: object, stores_logits: bool, head: OutputMask, stream: Batch
) -> tuple[Tensor, Tensor | None]:
    """Validate the result of a user's loss, which could otherwise fail elsewhere or stay unnoticed.

    Example:
        >>> batch, head = Batch(torch.zeros(2, 1), *torch.zeros(2, 2)), OutputMask(torch.ones(1, 3, dtype=torch.bool))
        >>> check_loss("mine.py:Mine", torch.zeros(2), False, head, batch)
        Traceback (most recent call last):
        contnorm.errors.UserCodeError: strategy 'mine.py:Mine': its loss must return (loss, logits): a tensor with ...
    """
    loss, logits = answer if isinstance(answer, tuple) and len(answer) == 2 else (None, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex() or not loss.requires_grad:
        raise UserCodeError(
            f"strategy {name!r}: its loss must return (loss, logits): a tensor with a real number and a gradient, and "
            f"the logits to store, or None."
        )
    shape = (len(stream), head.competing.shape[1])
    if (logits is None) == stores_logits:
        raise UserCodeError(f"strategy {name!r}: its loss must return logits if and only if stores_logits is True.")
    if logits is not None and (tuple(logits.shape) != shape or logits.requires_grad or logits.dtype != torch.float32):
        raise UserCodeError(
            f"strategy {name!r}: its loss must return the logits of the stream batch, of shape {shape}, as "
            f"logits.detach().float()."
        )
    return loss, logits
