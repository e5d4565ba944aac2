"""Registry of strategies: names, aliases and one-line summaries.

It does not import torch, so that listing strategies is fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ALIASES", "STRATEGIES", "StrategySpec", "settings_owner", "strategy_defaults"]


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """Registry entry of a strategy.

    Attributes:
        name: Name for ``--strategy``.
        target: ``"module:Class"``.
        summary: One-line description for listings.
        aliases: Other names in the literature.
        memory: Default kind of memory; None for the default of the stream.
        own_settings: The own settings that its class declares as ``Settings``, with their defaults. They are
            repeated here because the class needs torch.
        defaults: Defaults of the settings of every strategy, which override those of the stream.
    """

    name: str
    target: str
    summary: str
    aliases: tuple[str, ...] = ()
    memory: Literal["reservoir", "prs"] | None = None
    own_settings: Mapping[str, float] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)


STRATEGIES: dict[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec(
            "single",
            "contnorm.bench.strategies.base:Single",
            "train on the stream only, without replay",
            ("naive", "sgd", "finetune"),
        ),
        StrategySpec(
            "er",
            "contnorm.bench.strategies.er:ER",
            "experience replay: a batch of the stream and one of the memory per step",
        ),
        StrategySpec(
            "er-ace",
            "contnorm.bench.strategies.er_ace:ERACE",
            "experience replay; the stream's loss is over the classes of its batch only",
            ("er_ace", "erace"),
            defaults={"forward": "separate", "replay_from": "all"},
        ),
        StrategySpec(
            "derpp",
            "contnorm.bench.strategies.derpp:DERpp",
            "dark experience replay++: replay stored logits and labels",
            ("der++",),
        ),
        StrategySpec(
            "ewc",
            "contnorm.bench.strategies.ewc:EWC",
            "online elastic weight consolidation: important weights stay near their old values",
            ("online-ewc", "ewc-online"),
            own_settings={"strength": 10.0, "gamma": 1.0, "fisher_samples": 256},
        ),
        StrategySpec(
            "lwf",
            "contnorm.bench.strategies.lwf:LwF",
            "learning without forgetting: distillation from the network before the task",
            own_settings={"temperature": 2.0, "strength": 1.0},
        ),
        StrategySpec(
            "prs",
            "contnorm.bench.strategies.er:ER",
            "experience replay from a partitioning reservoir, which balances labels",
            ("partitioning-reservoir",),
            memory="prs",
        ),
        StrategySpec(
            "crs",
            "contnorm.bench.strategies.er:ER",
            "experience replay from a conventional reservoir, the baseline of prs",
            ("reservoir",),
            memory="reservoir",
        ),
    )
}

ALIASES = {alias: spec.name for spec in STRATEGIES.values() for alias in spec.aliases}


def settings_owner(name: str) -> object:
    """Return the class that declares the own settings of a built-in strategy; None if it has none.

    The module of the class imports torch; strategies without own settings do not need it.
    """
    spec = STRATEGIES.get(name)
    if spec is None or not spec.own_settings:
        return None
    module, _, class_name = spec.target.partition(":")
    return getattr(importlib.import_module(module), class_name)


def strategy_defaults(name: str) -> dict[str, Any]:
    """Default settings of a strategy, which override those of the stream, such as its kind of memory.

    Example:
        >>> strategy_defaults("crs"), strategy_defaults("er")
        ({'memory': {'kind': 'reservoir'}}, {})
    """
    spec = STRATEGIES.get(name)
    if spec is None:
        return {}
    memory = {} if spec.memory is None else {"memory": {"kind": spec.memory}}
    return {**memory, **({"strategy": dict(spec.defaults)} if spec.defaults else {})}
