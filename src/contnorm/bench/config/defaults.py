"""Defaults of streams and strategies: complete settings with them, and list what differs from them.

This module does not import torch, so it does not fill in the hash of a weights file; `resolve` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from contnorm.bench.components import ComponentKind, code_hash, components, find_component, is_file_code, is_user_code
from contnorm.bench.config.schema import (
    NormConfig,
    RunConfig,
    StreamConfig,
    flatten_settings,
    format_value,
    from_dict,
    merge_settings,
    resolve_options,
)
from contnorm.bench.memories import MEMORIES
from contnorm.bench.models import NETWORKS
from contnorm.bench.models.user_norms import norm_code, resolve_norm_options
from contnorm.bench.strategies import ALIASES, STRATEGIES, strategy_class, strategy_defaults
from contnorm.bench.streams.tasks import STREAMS, find_stream, stream_defaults
from contnorm.errors import UserError, unknown
from contnorm.registry import NormInfo, find_norm, numbered_name

# Settings of a stream for which None means its default; for the others, None means "all".
DEFAULT_IF_NONE = ("stream.scenario", "stream.part", "stream.augment")
# Settings that are computed from others.
FILLED_IN = ("strategy.code", "memory.code", "model.code", "norm.code", "model.weights_hash")


def complete(values: Mapping[str, Any], source: str) -> RunConfig:
    """Complete the settings of a run on a known data set.

    Example:
        >>> complete({"stream": {"name": "split-cifar10"}, "strategy": {"name": "der++"}}, "cifar10").strategy.name
        'derpp'
    """
    config = apply_defaults(values)
    return replace(config, stream=replace(config.stream, source=source))


def apply_defaults(values: Mapping[str, Any]) -> RunConfig:
    """Check user settings, add the defaults of their stream and strategy, and make names canonical.

    The result has the hash of user code. It has no data set, unless the values or the stream name one.

    Example:
        >>> config = apply_defaults({"stream": {"name": "splitmnist"}, "train": {"batch": 5}})
        >>> config.stream.name, config.stream.scenario, config.train.batch, config.train.replay
        ('split-mnist', 'task', 5, 10)
    """
    requested = from_dict(values)
    stream = find_stream(requested.stream.name)
    strategy = canonical_strategy(requested.strategy.name)
    defaults = merge_settings(stream_defaults(stream, requested.stream.scenario), strategy_defaults(strategy))
    of_stream = values.get("stream", {})
    given = {key: one for key, one in of_stream.items() if one is not None or f"stream.{key}" not in DEFAULT_IF_NONE}
    chosen = {**values, "stream": given}
    groups: dict[str, Any] = dict(vars(from_dict(merge_settings(defaults, chosen))))
    usual = from_dict(defaults)
    if strategy in STRATEGIES:
        readers = {name: spec.keys for name, spec in STRATEGIES.items()}
        _refuse_unread("strategy", strategy, readers, values.get("strategy", {}), usual.strategy)
    if groups["memory"].kind in MEMORIES:
        readers = {name: memory.keys for name, memory in MEMORIES.items()}
        _refuse_unread("memory", groups["memory"].kind, readers, values.get("memory", {}), usual.memory)
    groups["stream"] = replace(groups["stream"], name=stream.name)
    groups["strategy"] = replace(groups["strategy"], name=strategy)
    kinds: tuple[tuple[ComponentKind, str, Collection[str]], ...] = (
        ("strategy", "name", STRATEGIES), ("memory", "kind", MEMORIES), ("model", "name", NETWORKS)
    )  # fmt: skip
    for kind, key, built_in in kinds:  # own settings of user code are checked in `resolve`, which may execute it
        name = getattr(groups[kind], key)
        if name not in built_in:
            if not is_user_code(name):
                find_component(kind, name)  # raises if no plugin has it
            groups[kind] = replace(groups[kind], code=code_hash(kind, name, groups[kind].code))
        elif kind != "model":
            has_own = kind == "strategy" and STRATEGIES[name].own_settings  # others need no module that imports torch
            own = resolve_options(kind, groups[kind], strategy_class(name) if has_own else None)
            groups[kind] = replace(groups[kind], options=own)
    if groups["memory"].kind not in MEMORIES and not is_user_code(groups["memory"].kind):
        known = [component.name for component in components("memory")]
        raise unknown("memory.kind", groups["memory"].kind, [*MEMORIES, *known, "path/to/file.py:Class"])
    groups["norm"] = _canonical_norm(groups["norm"], values.get("norm", {}))
    return RunConfig(**groups)


def _refuse_unread(
    group: str, name: str, readers: Mapping[str, Collection[str]], given: Mapping[str, Any], usual: object
) -> None:
    """Raise a `UserError` for a setting that has no effect: the run would be another experiment with the same result.

    Example:
        >>> _refuse_unread("memory", "ring", {"ring": ["per"], "prs": ["rho"]}, {"rho": 0.5}, RunConfig().memory)
        Traceback (most recent call last):
        contnorm.errors.UserError: memory.rho=0.5: has no effect with 'ring', but with prs. Leave it out.
    """
    for key, value in given.items():
        known = [other for other, keys in readers.items() if key in keys]
        if known and name not in known and value != getattr(usual, key):
            raise UserError(
                f"{group}.{key}={value}: has no effect with {name!r}, but with {', '.join(known)}. Leave it out."
            )


def _canonical_norm(norm: NormConfig, chosen: Collection[str]) -> NormConfig:
    """Settings of a norm under its canonical name, so that equal networks have equal hashes.

    A number of groups in the name becomes the setting ``groups``. ``groups="auto"`` also gets the current rule for
    choosing groups, unless the user chose one.

    Example:
        >>> canonical = _canonical_norm(NormConfig("CN8"), ())
        >>> canonical.name, canonical.groups
        ('cn', 8)
        >>> _canonical_norm(NormConfig("cn", groups="auto"), ()).auto_channels
        2
    """
    if is_user_code(norm.name):
        return replace(norm, code=norm_code(norm.name, norm.code))
    found = known_norm(norm.name)
    if found is None:  # an unknown name is reported where the network is built
        return norm
    spec, groups = found
    if groups is not None and "groups" in chosen and norm.groups != groups:
        raise UserError(f"norm.name={norm.name} and norm.groups={norm.groups} contradict each other. Give one of them.")
    norm = replace(norm, name=spec.name, options=resolve_norm_options(norm, spec), code=norm_code(spec.name))
    if groups is not None:
        return replace(norm, groups=groups)
    if spec.grouped and norm.groups == "auto" and "auto_channels" not in chosen:
        return replace(norm, auto_channels=2)
    return norm


def canonical_strategy(name: str) -> str:
    """Canonical name of a strategy, case-insensitive; the path of a user's strategy is returned unchanged."""
    lowered = name.lower()
    return ALIASES.get(lowered, lowered if lowered in STRATEGIES else name)


@lru_cache(maxsize=4096)
def changed(config: RunConfig) -> Mapping[str, Any]:
    """Settings that differ from the defaults of the run's stream and strategy, by dotted key.

    Example:
        >>> changed(from_dict({"stream": {"name": "split-cifar10"}, "train": {"lr": 0.03, "batch": 10}}))["train.batch"]
        10
    """
    defaults = _flat_defaults(config.stream.name, config.stream.scenario, config.strategy.name)
    settings = flatten_settings(config.as_dict())
    return MappingProxyType({k: v for k, v in settings.items() if k not in defaults or v != defaults[k]})


@lru_cache(maxsize=256)
def _flat_defaults(stream_name: str, scenario: str | None, strategy: str) -> dict[str, Any]:
    """Defaults of a stream and a strategy, by dotted key; those of the schema for a stream that is not known."""
    stream = STREAMS.get(stream_name)
    of_stream = stream_defaults(stream, scenario) if stream else {}
    values = merge_settings(of_stream, strategy_defaults(strategy))
    if strategy in STRATEGIES:
        values = merge_settings(values, {"strategy": dict(STRATEGIES[strategy].own_settings)})
    return flatten_settings(from_dict(values).as_dict())


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
    keys = dict.fromkeys([*first, *second])  # a component's own settings may be in one of them only
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


@lru_cache(maxsize=4096)
def resolved_settings(config: RunConfig) -> Mapping[str, Any]:
    """All settings of a run by dotted key, with the value that the run used.

    Where None means the default of the stream, that default is returned. The groups of a norm without groups are None.

    Example:
        >>> settings = resolved_settings(from_dict({"stream": {"name": "split-mnist"}}))
        >>> settings["stream.scenario"], settings["norm.name"], settings["norm.groups"]
        ('task', 'bn', None)
    """
    settings = flatten_settings(config.as_dict())
    stream = STREAMS.get(config.stream.name)
    defaults = stream_defaults(stream, config.stream.scenario).get("stream", {}) if stream else {}
    for key in DEFAULT_IF_NONE:
        if settings[key] is None:
            settings[key] = defaults.get(key.removeprefix("stream."))
    norm = known_norm(config.norm.name)
    if norm is not None and not norm[0].grouped:
        settings |= {"norm.groups": None, "norm.auto_channels": None}
    return MappingProxyType(settings)


def run_names(config: RunConfig) -> tuple[str, str, str]:
    """Names of the stream, strategy and norm of a run, for tables.

    A stream is named with its data set if that is not the usual one, a norm with its number of groups.

    Example:
        >>> run_names(RunConfig(StreamConfig("split-mnist", "digits"), norm=NormConfig("cn", 8)))
        ('split-mnist (digits)', 'single', 'cn8')
        >>> run_names(RunConfig(norm=NormConfig("cn", "auto", freeze_after=1)))[2]
        'cn (auto groups) frozen'
    """
    stream, source = stream_name(config.stream), (config.stream.source or "mnist").partition("@")[0]
    if stream == config.stream.name and source not in ("mnist", stream.partition("-")[2], stream):
        stream += f" ({source})"
    if config.train.max_steps is not None:
        stream += f", first {config.train.max_steps} steps"
    norm = config.norm.name
    if found := known_norm(norm):
        spec, in_name = found
        groups = in_name or config.norm.groups
        if not spec.grouped:
            norm = spec.name
        else:
            norm = f"{spec.name} (auto groups)" if groups == "auto" else numbered_name(spec, groups)
    return stream, config.strategy.name, norm + frozen_label(config.norm.freeze_after)


def known_norm(name: str) -> tuple[NormInfo, int | None] | None:
    """Norm of a name, with the number of groups in it; None if it is unknown to this version."""
    try:
        return find_norm(name)
    except ValueError:
        return None


def frozen_label(freeze_after: int | None) -> str:
    """Part of a norm's label for frozen moments.

    Example:
        >>> frozen_label(None), frozen_label(1), frozen_label(3)
        ('', ' frozen', ' frozen after 3')
    """
    if freeze_after is None:
        return ""
    return " frozen" if freeze_after == 1 else f" frozen after {freeze_after}"


def stream_name(stream: StreamConfig) -> str:
    """Name of a stream that its user knows it by: that of the data, if these are the user's own.

    Example:
        >>> stream_name(StreamConfig("split-mnist", "digits")), stream_name(StreamConfig("folder", "cats@1a2b3c"))
        ('split-mnist', 'cats')
    """
    spec = STREAMS.get(stream.name)
    if spec is not None and spec.kind == "user" and stream.source:
        return stream.source.partition("@")[0]
    return stream.name


def refuse_code(values: Mapping[str, Any], typed: Mapping[str, Any], where: str) -> None:
    """Raise a `UserError` if a file names code that the call does not: it may come from somebody else.

    Args:
        values: Nested settings.
        typed: Nested settings of the call.
        where: The file, for messages.
    """
    of_call = flatten_settings(typed)
    for key, value in flatten_settings(values).items():
        names = value if isinstance(value, list) else [value]
        if key not in of_call and any(isinstance(name, str) and is_file_code(name) for name in names):
            raise UserError(
                f"{where}: {key}={value} is code, which is not executed because a file names it. Name it in the call: "
                f"--set {key}={value}."
            )
