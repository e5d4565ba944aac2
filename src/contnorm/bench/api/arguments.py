"""The arguments of `run`: names of streams, settings, and objects of the user, which become the settings of a run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from rich.console import Console
from torch import nn

from contnorm.bench.api.stream import Stream, load_stream
from contnorm.bench.components import Component, ComponentKind, identify, loading_user_code
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RUN_ARGUMENTS, flatten_settings, meant_keys, with_setting
from contnorm.bench.engine.run import Run
from contnorm.bench.label_metrics import LABEL_SCORES
from contnorm.bench.memories import Memory
from contnorm.bench.metrics import SCORES
from contnorm.bench.models.user_norms import built_in_name
from contnorm.bench.strategies.base import Strategy
from contnorm.errors import UserError, unknown


class _Default(str):
    """The default of an argument, which ``settings`` may override."""


DEFAULT_NORM, DEFAULT_STRATEGY = _Default("cn"), _Default("er")
Model = str | nn.Module | Callable[..., nn.Module]
Norm = str | Callable[..., nn.Module]
ARGUMENTS = (*RUN_ARGUMENTS, "settings", "tag")  # arguments of `run` that describe an experiment
P = ParamSpec("P")
R = TypeVar("R")
_BASES: dict[str, type] = {"strategy": Strategy, "memory": Memory}


def names_known_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: an unknown keyword argument raises an error that names one with a similar meaning."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known.keys():
            raise unknown_argument(name, known)
        return function(*args, **kwargs)

    return checked


def unknown_argument(name: str, known: Iterable[str]) -> UserError:
    meant = []
    for key in meant_keys(name):
        here = [argument for argument, setting in RUN_ARGUMENTS.items() if setting == key]
        group, _, field = key.partition(".")
        there = f"load_stream(..., {field}=...)" if group == "stream" else f"settings={{{key!r}: ...}}"
        meant += here or [there]
    return unknown("argument", name, known, meant or None)


def as_stream(stream: Stream | str) -> Stream:
    """Return a stream, or the one of a name, for a run."""
    if loading_user_code():
        raise UserError(
            "bench.run was called by a file that is loaded as user code. Call it if __name__ == '__main__'."
        )
    found = load_stream(stream) if isinstance(stream, str) else stream
    if not isinstance(found, Stream):
        raise UserError(
            f"stream: use a name or a bench.Stream, such as Stream.from_arrays makes, not {type(stream).__name__}."
        )
    return found


def resolve_run(stream: Stream, arguments: Mapping[str, Any], recorded: bool) -> Run:
    """Check and complete the settings of an experiment; returns its run with seed 0.

    Args:
        stream: The stream.
        arguments: Arguments of `run`: those of `ARGUMENTS`.
        recorded: Whether runs are recorded, so that Python objects need an identity.
    """
    for name in arguments:
        if name not in ARGUMENTS:
            raise unknown_argument(str(name), ARGUMENTS)
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
        settings = _settings_of(argument, key, value)
        for own_key, own_value in settings.items():
            give(f"{argument}={type(value).__name__}(...)", own_key, own_value)
        if key not in settings:
            found = identify(value, cast(ComponentKind, argument), arguments.get("tag"), recorded, _definition(value))
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


def _settings_of(argument: str, key: str, value: Any) -> dict[str, Any]:
    """Return the settings of an object, with its name (``key``) if it is a strategy or memory of this package.

    An object of a user's subclass has the settings of its base class, but not its name: its code differs. An object
    that can't be used as a norm, a strategy, a memory or a network is refused.
    """
    if isinstance(value, list | tuple):
        raise UserError(f"{argument}={value!r}: takes one value. Run several with bench.sweep.")
    base = _BASES.get(argument)
    if base is not None:
        kind = value if isinstance(value, type) else type(value)
        if not issubclass(kind, base):
            raise UserError(f"{argument}={value!r}: use a name, or a subclass of bench.{base.__name__} or its object.")
        built_in = kind.__module__.startswith("contnorm.bench.")
        settings = {key: getattr(value, "name", "")} if isinstance(value, type) else getattr(value, "overrides", {})
        return {name: own for name, own in settings.items() if name != key or (built_in and own)}
    if not callable(value) or (argument == "norm" and isinstance(value, nn.Module | Mapping)):
        raise UserError(f"{argument}={value!r}: use a name, or a function or class that makes it.")
    if argument == "norm" and (name := built_in_name(value)) is not None:
        raise UserError(f"norm={value.__name__}: is a norm of contnorm. Use its name, norm={name!r}.")
    return {}


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


def console_of(progress: bool | Console | None) -> Console | None:
    """Return the console of the argument ``progress``; None for no output."""
    if not isinstance(progress, bool | Console | None):
        raise UserError(f"progress={progress!r}: use True, False or a rich.console.Console.")
    return progress if isinstance(progress, Console) else Console(stderr=True) if progress else None


def check_score(score: str | None, stream: Stream) -> str:
    """Return the name of a score of a stream; by default the first one."""
    scores = list(LABEL_SCORES if stream._spec.kind == "multi-label" else SCORES)
    if score is not None and score not in scores:
        raise unknown("score", score, scores)
    return score or scores[0]
