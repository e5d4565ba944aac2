"""Differences between the settings of runs and their defaults, or between runs, formatted as for ``--set``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from contnorm.bench.config.schema import RunConfig, flatten_settings, from_dict, merge_settings
from contnorm.bench.strategy_registry import strategy_defaults
from contnorm.bench.streams.tasks import STREAMS, stream_defaults

__all__ = ["changed", "differences", "format_settings", "format_value", "varying"]


def format_value(value: Any) -> str:
    """Format a value as it is typed for ``--set``.

    Example:
        >>> format_value(None), format_value(True), format_value(0.1), format_value("cn")
        ('none', 'true', '0.1', 'cn')
    """
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def format_settings(settings: dict[str, Any], keys: Collection[str]) -> str:
    """Format the settings whose key is among the keys.

    Example:
        >>> format_settings({"train.lr": 0.1, "norm.name": "cn"}, ["train.lr"])
        'train.lr=0.1'
    """
    return " ".join(f"{key}={format_value(value)}" for key, value in settings.items() if key in keys)


def changed(config: RunConfig) -> dict[str, Any]:
    """Settings that differ from the defaults of the run's stream and strategy, by dotted key.

    Example:
        >>> changed(from_dict({"stream": {"name": "split-cifar10"}, "train": {"lr": 0.03, "batch": 10}}))["train.batch"]
        10
    """
    return dict(_changed(config))


@lru_cache(maxsize=4096)
def _changed(config: RunConfig) -> dict[str, Any]:
    defaults = _defaults(config.stream.name, config.stream.scenario, config.strategy.name)
    return {key: value for key, value in flatten_settings(config.as_dict()).items() if value != defaults[key]}


@lru_cache(maxsize=256)
def _defaults(stream_name: str, scenario: str | None, strategy: str) -> dict[str, Any]:
    """Defaults of a stream and a strategy, by dotted key."""
    stream = STREAMS.get(stream_name)
    of_stream = stream_defaults(stream, scenario) if stream else {}
    return flatten_settings(from_dict(merge_settings(of_stream, strategy_defaults(strategy))).as_dict())


def varying(configs: Sequence[RunConfig]) -> set[str]:
    """Keys of changed settings whose value is not the same in all runs.

    Runs that use the defaults of their streams do not vary, even if the defaults of the streams differ.

    Example:
        >>> sorted(varying([from_dict({"train": {"lr": lr}}) for lr in (0.03, 0.1)]))
        ['train.lr']
    """
    changes = [changed(config) for config in configs]
    if not changes:
        return set()
    same = set.intersection(*({(key, format_value(value)) for key, value in settings.items()} for settings in changes))
    return {key for settings in changes for key, value in settings.items() if (key, format_value(value)) not in same}


def differences(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ, by dotted key, with both values.

    Example:
        >>> differences(RunConfig(), from_dict({"train": {"lr": 0.1}}))
        {'train.lr': (0.03, 0.1)}
    """
    first, second = (flatten_settings(config.as_dict()) for config in (a, b))
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}
