"""Strategies: how samples of the stream and of the memory become a loss.

A strategy computes; the engine moves. It names how many replay draws a step has, and which samples share a forward
pass, because norm layers see that.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from contnorm.config import StrategyConfig
from contnorm.errors import UserError, unknown
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
    if ".py:" in config.name:
        return _from_file(config)
    raise unknown("strategy", config.name, [*STRATEGIES, "path/to/file.py:ClassName"])


def _from_file(config: StrategyConfig) -> Strategy:
    place, _, attribute = config.name.rpartition(":")
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"strategy {config.name!r}: there is no file {path}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cls = getattr(module, attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, Strategy)):
        raise UserError(f"strategy {config.name!r}: {path} has no class {attribute} that derives from Strategy.")
    made: Strategy = cls(config)
    return made
