"""Settings that a component, such as a user's strategy, declares itself: a dataclass ``Settings`` in its class.

They are set like all others (``--set strategy.temperature=2``), are checked against the types of the dataclass, and are
recorded with their resolved values. In a `ComponentConfig` they are its ``options``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, get_type_hints

import pydantic
from pydantic import ConfigDict, ValidationError

from contnorm.bench.config.schema import ComponentConfig, Options, Scalar, show_value, unknown_key
from contnorm.errors import UserError

__all__ = ["make_settings", "own_setting_names", "resolve_options"]


def own_setting_names(component: object) -> tuple[str, ...]:
    """Return the names of a component's own settings; empty if it declares none.

    Example:
        >>> class Component:
        ...     @dataclasses.dataclass(frozen=True)
        ...     class Settings:
        ...         temperature: float = 2.0
        >>> own_setting_names(Component), own_setting_names(object)
        (('temperature',), ())
    """
    declared = getattr(component, "Settings", None)
    fields = dataclasses.fields(declared) if dataclasses.is_dataclass(declared) else ()
    return tuple(field.name for field in fields if field.init)


def resolve_options(group: str, config: ComponentConfig, component: object) -> Options:
    """Check a component's own settings and add the defaults of those that are not set.

    Args:
        group: The group of the settings, such as ``"strategy"``.
        config: The settings of the group; its ``options`` are checked.
        component: The class (or object) of the component, with the dataclass ``Settings`` if it has own settings.

    Raises:
        UserError: For an unknown setting, a value of another type, or an unusable ``Settings``.

    Example:
        >>> from contnorm.bench.config.schema import StrategyConfig
        >>> class Component:
        ...     @dataclasses.dataclass(frozen=True)
        ...     class Settings:
        ...         temperature: float = 2.0
        ...         strength: float = 1.0
        >>> resolve_options("strategy", StrategyConfig("mine.py:Component", options=(("strength", 3),)), Component)
        (('strength', 3.0), ('temperature', 2.0))
        >>> resolve_options("strategy", StrategyConfig("mine.py:Component", options=(("strenth", 3),)), Component)
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown key 'strategy.strenth'. Did you mean 'strategy.strength'? ...
    """
    given, declared = dict(config.options), getattr(component, "Settings", None)
    if declared is None:
        if given:
            raise unknown_key(f"{group}.{next(iter(given))}")
        return ()
    names = _checked_names(group, config, component)
    stray = next((name for name in given if name not in names), None)
    if stray is not None:
        raise unknown_key(f"{group}.{stray}", names)
    settings = _validate(group, declared, given)
    resolved: Options = tuple((name, getattr(settings, name)) for name in sorted(names))
    for name, value in resolved:
        if not isinstance(value, Scalar):
            raise UserError(
                f"{group}.{name}={show_value(value)}: its default must be a number, a text, True, False or None."
            )
    again = _validate(group, declared, dict(resolved))
    changed = next((name for name, value in resolved if getattr(again, name) != value), None)
    if changed is not None:  # the recorded value would not be the one that gives these results
        raise UserError(
            f"{group}.{changed}: __post_init__ of Settings changes the value {dict(resolved)[changed]!r} again to "
            f"{getattr(again, changed)!r}. Keep the value as it is set, and compute others from it."
        )
    return resolved


def make_settings(component: type, values: Mapping[str, Any]) -> Any:
    """Return an object of a component's ``Settings``; None if it declares none."""
    declared = getattr(component, "Settings", None)
    return None if declared is None else declared(**values)


def _checked_names(group: str, config: ComponentConfig, component: object) -> tuple[str, ...]:
    declared = getattr(component, "Settings", None)
    label = getattr(component, "__name__", type(component).__name__)
    if not (isinstance(declared, type) and dataclasses.is_dataclass(declared)):
        raise UserError(f"{group} {label}: Settings must be a dataclass. Decorate it with @dataclass(frozen=True).")
    names = own_setting_names(component)
    taken = next((name for name in names if hasattr(type(config), name) or name in vars(config)), None)
    if taken is not None:
        raise UserError(
            f"{group} {label}: {group}.{taken} is a setting of every {group}, so Settings can't declare {taken!r} "
            f"again. Use another name."
        )
    return names


@lru_cache(maxsize=256)
def _checker(declared: type) -> Any:
    for field in dataclasses.fields(declared):  # cloudpickle, for worker processes, copies the marker of no default
        for part in ("default", "default_factory"):
            if type(getattr(field, part)) is type(dataclasses.MISSING):
                setattr(field, part, dataclasses.MISSING)
    _evaluate_annotations(declared)
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, validate_default=True)
    frozen = declared.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return pydantic.dataclasses.dataclass(declared, frozen=frozen, config=strict)


def _evaluate_annotations(declared: type) -> None:
    """Replace annotations that are text by their types: a worker process does not have the names of a script."""
    try:
        types = get_type_hints(declared, include_extras=True)
    except Exception:  # a name that is not defined here; pydantic reports it if it needs it
        return
    for field in dataclasses.fields(declared):
        if isinstance(field.type, str):
            field.type = types[field.name]


def _validate(group: str, declared: type, given: Mapping[str, Scalar]) -> Any:
    try:
        return _checker(declared)(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"][:1]))
        if first["type"] == "missing":
            raise UserError(f"{group}.{place}: must be set, such as --set {group}.{place}=VALUE.") from None
        value = f"={show_value(first['input'])}" if place else ""
        message = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise UserError(f"{group}{'.' if place else ''}{place}{value}: {message[:1].lower()}{message[1:]}.") from None
    except Exception as error:  # annotations that pydantic can't use, or code in __post_init__
        reason = " ".join(str(error).partition("\n\nFor further information")[0].split())
        raise UserError(f"{group}: its Settings can't be used: {type(error).__name__}: {reason}") from error
