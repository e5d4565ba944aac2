"""Complete settings of a run on a known data set: user settings override the strategy's and the stream's defaults.

This module does not import torch, so it does not fill in the hash of a weights file; `resolve` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from contnorm.bench.config.schema import NormConfig, RunConfig, from_dict, merge_settings
from contnorm.bench.strategy_registry import ALIASES, STRATEGIES, strategy_defaults
from contnorm.bench.streams.tasks import find_stream, stream_defaults
from contnorm.bench.user_code import code_hash
from contnorm.registry import find_norm

__all__ = ["complete"]

STREAMS_OWN = ("scenario", "part", "augment")  # None means the stream's default for these; for others it means "all"


def complete(values: Mapping[str, Any], source: str) -> RunConfig:
    """Complete the settings of a run on a data set.

    Example:
        >>> complete({"stream": {"name": "split-cifar10"}, "strategy": {"name": "der++"}}, "cifar10").strategy.name
        'derpp'
    """
    requested = from_dict(values)
    spec = find_stream(requested.stream.name)
    stream_values = {k: v for k, v in values.get("stream", {}).items() if not (v is None and k in STREAMS_OWN)}
    name = _canonical_strategy(requested.strategy.name)
    defaults = merge_settings(stream_defaults(spec, requested.stream.scenario), strategy_defaults(name))
    merged = merge_settings(defaults, {**values, "stream": stream_values})
    strategy = {**merged.get("strategy", {}), "name": name, "code": code_hash(name)}
    model = {**merged.get("model", {})}
    model["code"] = code_hash(model.get("name", ""))
    stream = {**merged["stream"], "name": spec.name, "source": source}
    norm = _resolve_norm(merged.get("norm", {}))
    return from_dict({**merged, "stream": stream, "strategy": strategy, "model": model, "norm": norm})


def _resolve_norm(norm: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a norm under its canonical name, so that equal networks have equal hashes.

    A number of groups in the name becomes the setting ``groups``. ``groups="auto"`` also gets the current rule for
    choosing groups.

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


def _canonical_strategy(name: str) -> str:
    """Canonical name of a strategy, case-insensitive; the path of a user's strategy is returned unchanged."""
    lowered = name.lower()
    return ALIASES.get(lowered, lowered if lowered in STRATEGIES else name)
