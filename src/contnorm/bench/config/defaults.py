"""The settings of a run once its data set is known: what was asked for, over what its strategy and its stream say.

Needs no torch; so what is made of files of weights is not filled in here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contnorm.bench.config.schema import NormConfig, RunConfig, from_dict, laid_over
from contnorm.bench.strategy_registry import ALIASES, STRATEGIES, strategy_defaults
from contnorm.bench.streams.tasks import find_stream, stream_defaults
from contnorm.bench.user_code import code_hash
from contnorm.registry import find_norm

__all__ = ["settle"]

STREAMS_OWN = ("scenario", "part", "augment")  # where None means what the stream says; elsewhere it means all of it


def settle(values: Mapping[str, Any], source: str) -> RunConfig:
    """All settings of a run of a data set.

    Example:
        >>> settle({"stream": {"name": "split-cifar10"}, "strategy": {"name": "der++"}}, "cifar10").strategy.name
        'derpp'
    """
    asked = from_dict(values)
    spec = find_stream(asked.stream.name)
    said = {k: v for k, v in values.get("stream", {}).items() if not (v is None and k in STREAMS_OWN)}
    name = _strategy(asked.strategy.name)
    usual = laid_over(stream_defaults(spec, asked.stream.scenario), strategy_defaults(name))
    merged = laid_over(usual, {**values, "stream": said})
    strategy = {**merged.get("strategy", {}), "name": name, "code": code_hash(name)}
    model = {**merged.get("model", {})}
    model["code"] = code_hash(model.get("name", ""))
    stream = {**merged["stream"], "name": spec.name, "source": source}
    norm = _resolve_norm(merged.get("norm", {}))
    return from_dict({**merged, "stream": stream, "strategy": strategy, "model": model, "norm": norm})


def _resolve_norm(norm: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a norm under its name in the table: one network has one name, and so one hash.

    A number of groups in the name becomes the setting; groups that are chosen automatically come with the rule.

    Example:
        >>> _resolve_norm({"name": "CN8", "groups": 4})
        {'name': 'cn', 'groups': 8}
        >>> _resolve_norm({"name": "cn", "groups": "auto"})["auto_channels"]
        2
    """
    try:
        spec, groups = find_norm(norm.get("name", NormConfig().name))
    except ValueError:  # an unknown name is reported where the network is built
        return dict(norm)
    resolved = {**norm, "name": spec.name}
    if groups is not None:
        resolved["groups"] = groups
    elif spec.grouped and norm.get("groups") == "auto":
        resolved.setdefault("auto_channels", 2)
    return resolved


def _strategy(asked: str) -> str:
    """The name a strategy has in the table, whatever its case; one of a user's own is a path, and stays as it is."""
    lowered = asked.lower()
    return ALIASES.get(lowered, lowered if lowered in STRATEGIES else asked)
