"""Settings in words, as ``--set`` takes them: in which ones runs differ from their stream's defaults and each other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from contnorm.bench.config.schema import RunConfig, dotted, from_dict, laid_over
from contnorm.bench.strategy_registry import strategy_defaults
from contnorm.bench.streams.tasks import STREAMS, stream_defaults

__all__ = ["changed", "differences", "in_words", "varying", "word"]


def word(value: Any) -> str:
    """A value as it is typed.

    Example:
        >>> word(None), word(True), word(0.1), word("cn")
        ('none', 'true', '0.1', 'cn')
    """
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def in_words(settings: dict[str, Any], keys: Collection[str]) -> str:
    """Those of the settings that are among the keys.

    Example:
        >>> in_words({"train.lr": 0.1, "norm.name": "cn"}, ["train.lr"])
        'train.lr=0.1'
    """
    return " ".join(f"{key}={word(value)}" for key, value in settings.items() if key in keys)


def changed(config: RunConfig) -> dict[str, Any]:
    """The settings that are not what the run's stream and strategy say, by dotted key.

    Example:
        >>> changed(from_dict({"stream": {"name": "split-cifar10"}, "train": {"lr": 0.03, "batch": 10}}))["train.batch"]
        10
    """
    return dict(_changed(config))


@lru_cache(maxsize=4096)
def _changed(config: RunConfig) -> dict[str, Any]:
    usual = _usual(config.stream.name, config.stream.scenario, config.strategy.name)
    return {key: value for key, value in dotted(config.as_dict()).items() if value != usual[key]}


@lru_cache(maxsize=256)
def _usual(stream_name: str, scenario: str | None, strategy: str) -> dict[str, Any]:
    """What a stream and a strategy say, by dotted key."""
    stream = STREAMS.get(stream_name)
    said = stream_defaults(stream, scenario) if stream else {}
    return dotted(from_dict(laid_over(said, strategy_defaults(strategy))).as_dict())


def varying(configs: Sequence[RunConfig]) -> set[str]:
    """The keys in which some of the runs are as their stream says, or each other, and others not.

    Two streams at their defaults differ in none, whatever the defaults are.

    Example:
        >>> sorted(varying([from_dict({"train": {"lr": lr}}) for lr in (0.03, 0.1)]))
        ['train.lr']
    """
    each = [changed(config) for config in configs]
    if not each:
        return set()
    same = set.intersection(*({(key, word(value)) for key, value in one.items()} for one in each))
    return {key for one in each for key, value in one.items() if (key, word(value)) not in same}


def differences(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two runs differ.

    Example:
        >>> differences(RunConfig(), from_dict({"train": {"lr": 0.1}}))
        {'train.lr': (0.03, 0.1)}
    """
    first, second = (dotted(config.as_dict()) for config in (a, b))
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}
