"""Strategies: how samples of the stream and of the memory become a loss.

A strategy computes; the engine moves. It names how many replay draws a step has, and which samples share a forward
pass, because norm layers see that. Their names and summaries are in ``contnorm.bench.strategy_registry``.
"""

from __future__ import annotations

import importlib

from contnorm.bench.config.schema import StrategyConfig
from contnorm.bench.strategies.base import Batch, Head, Strategy
from contnorm.bench.strategies.user_strategy import check_own_strategy
from contnorm.bench.strategy_registry import ALIASES, STRATEGIES
from contnorm.bench.user_code import is_own_code, load_own_code, own_error
from contnorm.errors import UserError, unknown

__all__ = ["ALIASES", "Batch", "Head", "Strategy", "build_strategy"]


def build_strategy(config: StrategyConfig) -> Strategy:
    """A strategy by name, or from a file of one's own as ``path/to/file.py:ClassName``.

    Example:
        >>> type(build_strategy(StrategyConfig("der++"))).__name__
        'DERpp'
    """
    name = ALIASES.get(config.name.lower(), config.name.lower())
    if name in STRATEGIES:
        return _built(_ours(STRATEGIES[name].target), config)
    if not is_own_code(config.name):
        raise unknown("strategy", config.name, [*STRATEGIES, "path/to/file.py:ClassName"])
    return _built(load_own_code(config.name, "strategy"), config)


def _ours(target: str) -> object:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _built(cls: object, config: StrategyConfig) -> Strategy:
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise UserError(f"strategy {config.name!r}: it is not a subclass of contnorm.bench.strategies.Strategy.")
    try:
        made: Strategy = cls(config)
    except Exception as error:
        if is_own_code(config.name):
            raise own_error(error, "strategy", config.name, "called with its settings") from error
        raise
    if is_own_code(config.name):
        check_own_strategy(config.name, made)
    return made
