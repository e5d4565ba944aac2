"""The arguments of `run`, as settings of a run and the Python objects that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from contnorm.bench.api.stream import Stream
from contnorm.bench.components import Component, Kind
from contnorm.bench.config.schema import flatten_settings
from contnorm.bench.config.sources import with_setting
from contnorm.bench.identity import identify
from contnorm.bench.memories import Memory
from contnorm.bench.models.user_norms import built_in_name
from contnorm.bench.strategies.base import Strategy
from contnorm.errors import UserError

__all__ = ["ARGUMENTS", "DEFAULT_NORM", "DEFAULT_STRATEGY", "Model", "Norm", "RunValues", "collect_values"]


class _Default(str):
    """The default of an argument, which ``settings`` may override."""


DEFAULT_NORM, DEFAULT_STRATEGY = _Default("cn"), _Default("er")
Model = str | nn.Module | Callable[..., nn.Module]
Norm = str | Callable[..., nn.Module]
ARGUMENTS = ("norm", "strategy", "model", "memory", "lr", "batch_size", "replay", "settings", "tag")


def collect_values(
    stream: Stream,
    recorded: bool,
    *,
    norm: Norm = DEFAULT_NORM,
    strategy: str | Strategy | type[Strategy] = DEFAULT_STRATEGY,
    model: Model | None = None,
    memory: str | Memory | type[Memory] | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    replay: int | None = None,
    settings: Mapping[str, Any] | None = None,
    tag: str | None = None,
) -> RunValues:
    """Check the arguments of `run`; ``recorded`` is whether the run is recorded, so that objects need an identity."""
    values = RunValues(stream)
    for argument, value, hint in (
        ("norm", norm, "'none' for no norm layers, 'bn' for batch norm"),
        ("strategy", strategy, "'single' for training without replay"),
    ):
        if value is None:
            raise UserError(f"{argument}=None: use a name, such as {hint}.")
    values.set_component("norm", "norm.name", norm, (), tag, recorded)
    values.set("lr", "train.lr", lr)
    values.set("batch_size", "train.batch", batch_size)
    values.set("replay", "train.replay", replay)
    values.set_component("strategy", "strategy.name", strategy, Strategy, tag, recorded)
    values.set_component("memory", "memory.kind", memory, Memory, tag, recorded)
    values.set_component("model", "model.name", model, (), tag, recorded)
    if not isinstance(settings, Mapping | None) or not all(isinstance(key, str) for key in settings or {}):
        raise UserError(f"settings={settings!r}: use a dictionary of settings by name, such as {{'train.lr': 0.1}}.")
    for key, value in flatten_settings(settings or {}).items():
        values.set(f"settings[{key!r}]", key, value, none=True)
    return values


class RunValues:
    """Settings of a run from the arguments of `run`; arguments that contradict each other are rejected.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._settings: dict[str, tuple[str, Any]] = {}  # by setting key: the argument and its value
        self.objects: list[Component] = []  # kept until the runs are done

    def set(self, argument: str, key: str, value: Any, none: bool = False) -> None:
        """Set a setting from an argument; None leaves the default, unless ``none`` is True."""
        if (value is None and not none) or isinstance(value, _Default):
            return
        if isinstance(value, np.generic):
            value = value.item()
        if key in self._settings and self._settings[key][1] != value:
            other, earlier = self._settings[key]
            raise UserError(f"{other} and {argument} set {key} to {earlier!r} and to {value!r}. Give it once.")
        self._settings[key] = (argument, value)

    def set_component(
        self, argument: Kind, key: str, value: Any, base: type | tuple[type, ...], tag: str | None, recorded: bool
    ) -> None:
        """Set a norm, a strategy, a memory or a network by name, or as an object."""
        if value is None or isinstance(value, str):
            self.set(argument, key, value)
            return
        component = _component_settings(value, key, base)
        if key not in component:
            _check_component(argument, value)
        for component_key, component_value in component.items():
            self.set(f"{argument}={type(value).__name__}(...)", component_key, component_value, none=True)
        if key in component:
            return
        found = identify(value, argument, tag, recorded)
        self.set(argument, key, found.name)
        if found.code is not None:
            self.set(argument, f"{key.partition('.')[0]}.code", found.code)
        self.objects.append(found)

    def nested(self) -> dict[str, Any]:
        """Return nested settings: those of the stream, the defaults of `run`, and the arguments."""
        defaults = {
            "norm": {"name": str(DEFAULT_NORM)},
            "strategy": {"name": str(DEFAULT_STRATEGY)},
            **self._stream.defaults,
        }
        values: dict[str, Any] = {**defaults, "stream": self._stream.settings}
        for key, (_, value) in self._settings.items():
            values = with_setting(values, key, value)
        return values


def _component_settings(value: object, key: str, base: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the settings of a strategy or memory object, with its name (``key``) if it is one of this package.

    An object of a user's subclass has the settings of its base class, but not its name: its code differs.
    """
    kind = value if isinstance(value, type) else type(value)
    if not issubclass(kind, base):
        return {}
    built_in = kind.__module__.startswith("contnorm.bench.")
    settings = {key: getattr(value, "name", "")} if isinstance(value, type) else getattr(value, "overrides", {})
    return {k: v for k, v in settings.items() if k != key or (built_in and v)}


def _check_component(argument: str, value: Any) -> None:
    """Reject objects that can't be used as a norm, a strategy, a memory or a network."""
    if argument == "norm":
        _check_norm(value)
    is_memory = isinstance(value, Memory) or (isinstance(value, type) and issubclass(value, Memory))
    if argument == "memory" and not is_memory:
        raise UserError(
            f"memory={value!r}: use a name, a subclass of bench.Memory, or an object such as bench.Ring(50)."
        )
    is_strategy = isinstance(value, Strategy) or (isinstance(value, type) and issubclass(value, Strategy))
    if argument == "strategy" and not is_strategy:
        raise UserError(f"strategy={value!r}: use a name, a subclass of bench.Strategy, or an object of one.")
    if argument == "model" and not callable(value):
        raise UserError(f"model={value!r}: use a name, a torch.nn.Module, or a function that makes one.")


def _check_norm(value: Any) -> None:
    if isinstance(value, nn.Module) or not callable(value) or isinstance(value, Mapping):
        raise UserError(
            f"norm={value!r}: use one name, such as 'cn', a class of layers, or a function that creates a layer. "
            f"bench.run_all runs several experiments."
        )
    name = built_in_name(value)
    if name is not None:
        raise UserError(f"norm={value.__name__}: is a norm of contnorm. Use its name, norm={name!r}.")
