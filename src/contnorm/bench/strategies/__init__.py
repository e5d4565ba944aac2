"""Strategies: learning methods that compute a loss from stream and memory samples.

A strategy computes the loss of a step; the engine draws the samples and updates the weights. A strategy declares how
many replay draws a step has, and decides which samples share a forward pass, since that changes batch statistics. Names
and summaries are in ``contnorm.bench.strategy_registry``.
"""

from __future__ import annotations

import copy
import importlib

from contnorm.bench.config.schema import StrategyConfig
from contnorm.bench.strategies.base import Batch, OutputMask, Strategy
from contnorm.bench.strategies.user_strategy import check_user_strategy
from contnorm.bench.strategy_registry import ALIASES, STRATEGIES
from contnorm.bench.user_code import is_user_code, load_user_code, user_code_error
from contnorm.errors import UserError, unknown

__all__ = ["ALIASES", "Batch", "OutputMask", "Strategy", "build_strategy"]


def build_strategy(config: StrategyConfig) -> Strategy:
    """Build a strategy by name, or from a user's file as ``path/to/file.py:ClassName``.

    Example:
        >>> type(build_strategy(StrategyConfig("der++"))).__name__
        'DERpp'
    """
    name = ALIASES.get(config.name.lower(), config.name.lower())
    if name in STRATEGIES:
        return _instantiate(_import_target(STRATEGIES[name].target), config)
    if not is_user_code(config.name):
        raise unknown("strategy", config.name, [*STRATEGIES, "path/to/file.py:ClassName"])
    return _instantiate(load_user_code(config.name, "strategy"), config)


def _import_target(target: str) -> object:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _instantiate(cls: object, config: StrategyConfig) -> Strategy:
    if isinstance(cls, Strategy):  # an object of the Python API: every run gets a copy of it
        strategy = copy.deepcopy(cls)
        strategy.config = config
        check_user_strategy(config.name, strategy)
        return strategy
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise UserError(f"strategy {config.name!r}: it is not a subclass of contnorm.bench.strategies.Strategy.")
    try:
        strategy = cls(config)
    except Exception as error:
        if is_user_code(config.name):
            raise user_code_error(error, "strategy", config.name, "called with its settings") from error
        raise
    if is_user_code(config.name):
        check_user_strategy(config.name, strategy)
    return strategy
