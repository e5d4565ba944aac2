"""Strategies: how samples of the stream and of the memory become a loss.

A strategy computes; the engine moves. It names how many replay draws a step has, and which samples share a forward
pass, because norm layers see that.
"""

from __future__ import annotations

from contnorm.config import StrategyConfig
from contnorm.errors import UserError, unknown
from contnorm.own_code import is_own_code, load_own_code
from contnorm.strategies.base import Batch, Head, Single, Strategy
from contnorm.strategies.derpp import DERpp
from contnorm.strategies.er import ER

__all__ = ["ALIASES", "STRATEGIES", "Batch", "Head", "Strategy", "build_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {"single": Single, "er": ER, "derpp": DERpp}
ALIASES = {"naive": "single", "sgd": "single", "finetune": "single", "der++": "derpp"}


def build_strategy(config: StrategyConfig) -> Strategy:
    """A strategy by name, or from a file of one's own as ``path/to/file.py:ClassName``.

    Example:
        >>> type(build_strategy(StrategyConfig("der++"))).__name__
        'DERpp'
    """
    name = ALIASES.get(config.name.lower(), config.name.lower())
    if name in STRATEGIES:
        return STRATEGIES[name](config)
    if not is_own_code(config.name):
        raise unknown("strategy", config.name, [*STRATEGIES, "path/to/file.py:ClassName"])
    cls = load_own_code(config.name, "strategy")
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise UserError(f"strategy {config.name!r}: it is no class that derives from contnorm.strategies.Strategy.")
    made: Strategy = cls(config)
    return made
