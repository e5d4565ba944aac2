"""The arguments of `run`, as the settings of a run and the Python objects that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from contnorm.bench.api.stream import Stream
from contnorm.bench.components import Component, Kind, identify
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RUN_ARGUMENTS, flatten_settings, with_setting
from contnorm.bench.engine.run import Run
from contnorm.bench.memories import Memory
from contnorm.bench.models.user_norms import built_in_name
from contnorm.bench.strategies.base import Strategy
from contnorm.errors import UserError, unknown

__all__ = ["ARGUMENTS", "DEFAULT_NORM", "DEFAULT_STRATEGY", "Model", "Norm", "resolve_run"]


class _Default(str):
    """The default of an argument, which ``settings`` may override."""


DEFAULT_NORM, DEFAULT_STRATEGY = _Default("cn"), _Default("er")
Model = str | nn.Module | Callable[..., nn.Module]
Norm = str | Callable[..., nn.Module]
ARGUMENTS = (*RUN_ARGUMENTS, "settings", "tag")  # of `run` that describe an experiment
_BASES: dict[str, type] = {"strategy": Strategy, "memory": Memory}


def resolve_run(stream: Stream, arguments: Mapping[str, Any], recorded: bool) -> Run:
    """Check and complete the settings of an experiment; returns its run with seed 0.

    Args:
        stream: The stream.
        arguments: Arguments of `run`: those of `ARGUMENTS`.
        recorded: Whether runs are recorded, so that Python objects need an identity.
    """
    for name in arguments:
        if name not in ARGUMENTS:
            raise unknown("argument of an experiment", str(name), ARGUMENTS)
    given: dict[str, tuple[str, Any]] = {}  # by setting key: the argument and its value
    objects: list[Component] = []

    def give(argument: str, key: str, value: Any) -> None:
        value = value.item() if isinstance(value, np.generic) else value
        if key in given and given[key][1] != value:
            other, earlier = given[key]
            raise UserError(f"{other} and {argument} set {key} to {earlier!r} and to {value!r}. Give it once.")
        given[key] = argument, value

    for argument, key in RUN_ARGUMENTS.items():
        value = arguments.get(argument)
        if value is None or isinstance(value, _Default):
            continue
        if isinstance(value, str | bool | int | float | np.generic):
            give(argument, key, value)
            continue
        settings = _settings_of(value, key, _BASES.get(argument))
        for own_key, own_value in settings.items():
            give(f"{argument}={type(value).__name__}(...)", own_key, own_value)
        if key not in settings:
            _check_object(argument, value)
            found = identify(value, cast(Kind, argument), arguments.get("tag"), recorded, _definition(value))
            give(argument, key, found.name)
            if found.code is not None:
                give(argument, f"{key.partition('.')[0]}.code", found.code)
            objects.append(found)
    for key, value in flatten_settings(arguments.get("settings") or {}).items():
        give(f"settings[{key!r}]", key, value)
    defaults = {"norm": {"name": str(DEFAULT_NORM)}, "strategy": {"name": str(DEFAULT_STRATEGY)}, **stream.defaults}
    values: dict[str, Any] = {**defaults, "stream": stream.settings}
    for key, (_, value) in given.items():
        values = with_setting(values, key, value)
    return Run(resolve(values, stream.root or Path("data")), 0, objects)


def _settings_of(value: object, key: str, base: type | None) -> dict[str, Any]:
    """Return the settings of a strategy or memory object, with its name (``key``) if it is one of this package.

    An object of a user's subclass has the settings of its base class, but not its name: its code differs.
    """
    kind = value if isinstance(value, type) else type(value)
    if base is None or not issubclass(kind, base):
        return {}
    built_in = kind.__module__.startswith("contnorm.bench.")
    settings = {key: getattr(value, "name", "")} if isinstance(value, type) else getattr(value, "overrides", {})
    return {k: v for k, v in settings.items() if k != key or (built_in and v)}


def _definition(value: object) -> object:
    """Return what identifies an object: of a strategy or memory its class, with attributes that are no settings."""
    if not isinstance(value, Strategy | Memory):
        return value
    base = next(cls for cls in type(value).__mro__ if cls.__module__.startswith("contnorm."))
    fresh: object = base(1) if issubclass(base, Memory) else base()
    own = {name: part for name, part in vars(value).items() if name not in vars(fresh)}
    if isinstance(value, Strategy):
        own |= dict(value.named_children()) | dict(value.named_parameters(recurse=False))
        own |= dict(value.named_buffers(recurse=False))
    return (type(value), own) if own else type(value)


def _check_object(argument: str, value: Any) -> None:
    """Reject an object that can't be used as a norm, a strategy, a memory or a network."""
    base = _BASES.get(argument)
    if base is not None:
        kind = value if isinstance(value, type) else type(value)
        if not issubclass(kind, base):
            raise UserError(
                f"{argument}={value!r}: use a name, a subclass of bench.{base.__name__}, or an object of one."
            )
    elif not callable(value) or (argument == "norm" and isinstance(value, nn.Module | Mapping)):
        raise UserError(f"{argument}={value!r}: use a name, or a function or class that makes it.")
    elif argument == "norm" and (name := built_in_name(value)) is not None:
        raise UserError(f"norm={value.__name__}: is a norm of contnorm. Use its name, norm={name!r}.")
