"""Norms of the user in runs: lookup, identity, and settings. This module does not import torch.

A user's norm is a class or a function in a file (``path/to/file.py:Class``), an object of the Python API, or a norm
that was registered with `contnorm.register_norm`. Its own settings are the keyword arguments of its constructor
(``--set norm.temperature=2``), which are recorded with their resolved values. Those of built-in norms are recorded only
if they differ from their defaults, so that the hashes of other runs do not depend on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from contnorm.bench.components import code_hash, definition_hash, is_user_code, load_component, user_code_error
from contnorm.bench.config.schema import NormConfig, Options, Scalar, resolve_options, unknown_key
from contnorm.errors import UserError
from contnorm.registry import (
    NORMS,
    LayerFactory,
    NormInfo,
    accepts_any_option,
    build_norm,
    describe_norm,
    find_norm,
    layer_parameters,
    norm_class,
)

__all__ = [
    "built_in_name",
    "find_run_norm",
    "norm_code",
    "own_norm_settings",
    "resolve_norm_options",
    "resolve_user_norm",
]

_PLACEMENT = ("device", "dtype")  # where a layer is created is not a setting
_SET_ELSEWHERE = {"num_groups": "norm.groups", "momentum": "norm.momentum"}
_SCALARS = (bool, int, float, str, NoneType)
_PROBED_CHANNELS = 64  # usual numbers of groups divide it
_NOT_CREATED = "it can't be created with a number of channels"


def find_run_norm(config: NormConfig) -> tuple[NormInfo, int | None]:
    """Return the norm that settings name, and the number of groups if its name ends in one.

    Raises:
        UserError: If user code can't be loaded, or is not a norm.
        ValueError: For an unknown name.
    """
    if is_user_code(config.name):
        return _load_norm(config.name, config.code), None
    return find_norm(config.name)


def _load_norm(name: str, code: str | None) -> NormInfo:
    value: Any = load_component("norm", name, code)
    if isinstance(value, NormInfo):
        return value
    try:
        return describe_norm(value, name)
    except Exception as error:  # the user's code raises errors of any type
        raise user_code_error(error, f"norm {name!r}", _NOT_CREATED) from error


def built_in_name(layer: object) -> str | None:
    """Return the name of the norm of this package that a class belongs to; None for any other object.

    Example:
        >>> from contnorm import ContinualNorm2d
        >>> built_in_name(ContinualNorm2d), built_in_name(nn.BatchNorm2d) is None
        ('cn', True)
    """
    module, name = getattr(layer, "__module__", None), getattr(layer, "__name__", "")
    targets = {f"contnorm.norms.{info.target}": info.name for info in reversed(list(NORMS.values())) if info.target}
    return targets.get(f"{module}:{name[:-2]}")


def norm_code(name: str, code: str | None = None) -> str | None:
    """Return the hash of the code of a user's norm; None for norms of this package, or if no file defines it.

    Example:
        >>> norm_code("cn") is None
        True
    """
    if is_user_code(name):
        return code_hash("norm", name, code)
    spec = NORMS.get(name)
    if spec is None or not spec.layers:
        return None
    hashes = [definition_hash(factory) for factory in spec.layers.values()]
    unique = list(dict.fromkeys(text for text in hashes if text is not None))
    if None in hashes or not unique:
        return None
    return unique[0] if len(unique) == 1 else hashlib.sha256("\n".join(unique).encode()).hexdigest()[:12]


def resolve_user_norm(config: NormConfig) -> NormConfig:
    """Load a norm of the user, check a layer of it, and complete its own settings; other norms are not changed.

    Raises:
        UserError: If the norm can't be used: it can't be created, or it has no weight.
    """
    if not is_user_code(config.name) and not (config.name in NORMS and NORMS[config.name].layers):
        return config
    spec, _ = find_run_norm(config)
    config = replace(config, options=resolve_norm_options(config, spec))
    _check_layer(config, spec)
    return config


def _check_layer(config: NormConfig, spec: NormInfo) -> None:
    dim = min(spec.layers)
    groups = config.groups if isinstance(config.groups, int) else 4
    channels = _PROBED_CHANNELS if not spec.grouped or _PROBED_CHANNELS % groups == 0 else 2 * groups
    options = {**dict(config.options), **({"num_groups": groups} if spec.grouped else {})}
    try:
        layer: Any = build_norm(spec, channels, dim, options)
    except Exception as error:  # as above
        raise user_code_error(error, f"norm {config.name!r}", _NOT_CREATED) from error
    shape = getattr(getattr(layer, "weight", None), "shape", None)
    if "affine_parameters" not in spec.cannot and (shape is None or tuple(shape) != (channels,)):
        what = "has no weight" if shape is None else f"has a weight of shape {tuple(shape)} for {channels} channels"
        raise UserError(
            f"norm {config.name!r}: its layer {type(layer).__name__} {what}; a norm has one value per channel in "
            f"weight. If that is intended, declare cannot = {{'affine_parameters': 'the reason'}} in its class."
        )


def resolve_norm_options(config: NormConfig, spec: NormInfo) -> Options:
    """Check the own settings of a norm against the arguments of its constructor.

    Returns:
        All settings with their values for a user's norm; for a built-in norm those that differ from their defaults.

    Raises:
        UserError: For an unknown setting, or a value of another type.

    Example:
        >>> resolve_norm_options(NormConfig("bn", options=(("eps", 0.001),)), NORMS["bn"])
        (('eps', 0.001),)
        >>> resolve_norm_options(NormConfig("bn", options=(("eps", 1e-5),)), NORMS["bn"])
        ()
    """
    if not spec.layers and not config.options:
        return ()
    factory = norm_class(spec, min(spec.layers) if spec.layers else 2)
    parameters = _own_parameters(factory, spec)
    requested = dict(config.options)
    for name, setting in _SET_ELSEWHERE.items():
        if name in requested:
            raise UserError(f"norm.{name}: is set with {setting}.")
    further = {
        name: value for name, value in requested.items() if name not in parameters and accepts_any_option(factory)
    }
    checked = replace(config, options=tuple((n, v) for n, v in config.options if n not in further))
    component = type(spec.name, (), {"Settings": _settings_class(factory, parameters)})
    if not parameters and checked.options:
        raise unknown_key(f"norm.{checked.options[0][0]}")
    resolved = resolve_options("norm", checked, component) if parameters else ()
    if not spec.layers:
        resolved = tuple((n, v) for n, v in resolved if n in requested and v != parameters[n].default)
    return tuple(sorted((*resolved, *further.items())))


def own_norm_settings(spec: NormInfo) -> dict[str, Scalar]:
    """Return the own settings of a norm with their defaults.

    Example:
        >>> own_norm_settings(NORMS["gn"])
        {'eps': 1e-05, 'affine': True}
    """
    factory = norm_class(spec, min(spec.layers) if spec.layers else 2)
    return {name: parameter.default for name, parameter in _own_parameters(factory, spec).items()}


def _own_parameters(factory: LayerFactory, spec: NormInfo) -> dict[str, inspect.Parameter]:
    """Return the arguments of a norm that are settings: those with a default that a record can contain."""
    fields = {field.name for field in dataclasses.fields(NormConfig)}
    parameters = {}
    for name, parameter in layer_parameters(factory).items():
        if name in (*_PLACEMENT, *_SET_ELSEWHERE) or name in spec.preset or not isinstance(parameter.default, Scalar):
            continue
        if name in fields:
            raise UserError(
                f"norm {spec.name!r}: norm.{name} is a setting of every norm, so its argument {name!r} needs another "
                f"name."
            )
        parameters[name] = parameter
    return parameters


def _settings_class(factory: LayerFactory, parameters: Mapping[str, inspect.Parameter]) -> type:
    try:
        hints = get_type_hints(vars(factory).get("__init__", factory) if isinstance(factory, type) else factory)
    except Exception:  # names that exist for type checkers only
        hints = {}
    fields = [
        (name, _scalar_type(hints.get(name), parameter.default), dataclasses.field(default=parameter.default))
        for name, parameter in parameters.items()
    ]
    return dataclasses.make_dataclass("Settings", fields, frozen=True)


def _scalar_type(hint: Any, default: Scalar) -> Any:
    """Return the type of an argument: its annotation if that has scalars only, or else the type of its default."""
    choices = get_args(hint) if get_origin(hint) is not Literal else (str,)
    if hint in _SCALARS or (choices and all(choice in _SCALARS for choice in choices)):
        return hint
    return Any if default is None else type(default)
