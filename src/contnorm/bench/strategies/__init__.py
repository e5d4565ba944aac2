"""Strategies: learning methods that compute a loss from stream and memory samples.

A strategy computes the loss of a step; the engine draws the samples and updates the weights. A strategy declares how
many replay draws a step has, and decides which samples share a forward pass, since that changes batch statistics. This
module does not import torch, so that listing strategies is fast; `build_strategy` imports the class.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from contnorm.bench.components import components, find_component, is_user_code, load_component, user_code_errors
from contnorm.bench.config.schema import StrategyConfig
from contnorm.errors import UserError, unknown

if TYPE_CHECKING:
    from contnorm.bench.strategies.base import Strategy


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """Registry entry of a strategy.

    Attributes:
        name: Name for ``--strategy``.
        target: ``"module:Class"``, in this package.
        summary: One-line description for listings.
        aliases: Other names in the literature.
        keys: The settings of `StrategyConfig` that it reads.
        own_settings: The own settings that its class declares as ``Settings``, with their defaults. They are
            repeated here because the class needs torch.
        defaults: Its default settings by group, such as the kind of memory, which override those of the stream.
    """

    name: str
    target: str
    summary: str
    aliases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    own_settings: Mapping[str, float | str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)


_REPLAY = ("forward", "replay_from")
_SPECS = (
    StrategySpec("single", "base:Single", "train on the stream only, without replay", ("naive", "sgd", "finetune")),
    StrategySpec(
        "er",
        "replay:ER",
        "experience replay: a batch of the stream and one of the memory per step",
        keys=(*_REPLAY, "loss"),
    ),
    StrategySpec(
        "er-ace",
        "replay:ERACE",
        "experience replay; the stream's loss is over the classes of its batch only",
        ("er_ace", "erace"),
        _REPLAY,
        defaults={"strategy": {"forward": "separate", "replay_from": "all"}},
    ),
    StrategySpec(
        "derpp",
        "replay:DERpp",
        "dark experience replay++: replay stored logits and labels",
        ("der++",),
        (*_REPLAY, "alpha", "beta", "distance"),
    ),
    StrategySpec(
        "ewc",
        "ewc:EWC",
        "online elastic weight consolidation: important weights stay near their old values",
        ("online-ewc", "ewc-online"),
        own_settings={"strength": 10.0, "gamma": 1.0, "fisher_samples": 256},
    ),
    StrategySpec(
        "lwf",
        "lwf:LwF",
        "learning without forgetting: distillation from the network before the task",
        own_settings={"temperature": 2.0, "strength": 1.0, "teacher_moments": "running"},
    ),
    StrategySpec(
        "prs",
        "replay:ER",
        "experience replay from a partitioning reservoir, which balances labels",
        ("partitioning-reservoir",),
        (*_REPLAY, "loss"),
        defaults={"memory": {"kind": "prs"}},
    ),
    StrategySpec(
        "crs",
        "replay:ER",
        "experience replay from a conventional reservoir, the baseline of prs",
        ("reservoir",),
        (*_REPLAY, "loss"),
        defaults={"memory": {"kind": "reservoir"}},
    ),
)
STRATEGIES = {spec.name: spec for spec in _SPECS}
ALIASES = {alias: spec.name for spec in STRATEGIES.values() for alias in spec.aliases}


def strategy_class(name: str) -> Any:
    """Import the class of a built-in strategy."""
    module, _, class_name = STRATEGIES[name].target.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)


def strategy_defaults(name: str) -> dict[str, Any]:
    """Default settings of a strategy, which override those of the stream, such as its kind of memory.

    Example:
        >>> strategy_defaults("crs"), strategy_defaults("er")
        ({'memory': {'kind': 'reservoir'}}, {})
    """
    return STRATEGIES[name].defaults if name in STRATEGIES else {}


def build_strategy(config: StrategyConfig) -> Strategy:
    """Build a strategy by name, or from a user's file as ``path/to/file.py:ClassName``.

    Example:
        >>> type(build_strategy(StrategyConfig("der++"))).__name__
        'DERpp'
    """
    name = ALIASES.get(config.name.lower(), config.name.lower())
    if name in STRATEGIES:
        strategy: Strategy = strategy_class(name)(config)
        return strategy
    if not is_user_code(config.name) and find_component("strategy", config.name) is None:
        known = [component.name for component in components("strategy")]
        raise unknown("strategy", config.name, [*STRATEGIES, *known, "path/to/file.py:ClassName"])
    value: Any = load_component("strategy", config.name, config.code)
    cls = value if isinstance(value, type) else type(value)
    if not issubclass(cls, importlib.import_module(f"{__name__}.base").Strategy):
        raise UserError(f"strategy {config.name!r}: is not a subclass of contnorm.bench.Strategy.")
    with user_code_errors(f"strategy {config.name!r}", "called with its settings"):
        strategy = cls(config) if value is cls else copy.deepcopy(value)  # each run has its own
    strategy.configure(config)
    return strategy


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
    built_in = next(cls for cls in type(made).__mro__ if cls.__module__.startswith(f"{__name__}."))
    defaults = strategy_defaults(built_in.__dict__["name"]).get("strategy", {})
    return replace(made.config, **{name: value for name, value in defaults.items() if name not in given})
