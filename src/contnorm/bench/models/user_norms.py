"""Norms of the user in runs: lookup, identity, and settings. This module does not import torch.

A user's norm is a class or a function in a file (``path/to/file.py:Class``), an object of the Python API, or a norm
that was registered with `contnorm.register_norm`. Its own settings are the keyword arguments of its constructor
(``--set norm.temperature=2``), which are recorded with their resolved values. Those of built-in norms are recorded only
if they differ from their defaults, so that the hashes of other runs do not depend on them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from contnorm.bench.components import code_hash, definition_hash, is_user_code, load_component, user_code_errors
from contnorm.bench.config.schema import NormConfig, Options, Scalar, resolve_options, unknown_key
from contnorm.errors import UserError
from contnorm.registry import (
    NORMS,
    NormInfo,
    accepts_any_option,
    describe_norm,
    find_norm,
    layer_parameters,
    norm_class,
)

_PLACEMENT = ("device", "dtype")  # where a layer is created is not a setting
_SET_ELSEWHERE = {"num_groups": "norm.groups", "momentum": "norm.momentum"}
_SCALARS = (bool, int, float, str, NoneType)


def find_run_norm(config: NormConfig) -> tuple[NormInfo, int | None]:
    """Return the norm that settings name, and the number of groups if its name ends in one.

    Raises:
        UserError: If user code can't be loaded, or is not a norm.
        ValueError: For an unknown name.
    """
    if not is_user_code(config.name):
        return find_norm(config.name)
    value: Any = load_component("norm", config.name, config.code)
    if isinstance(value, NormInfo):
        return value, None
    with user_code_errors(f"norm {config.name!r}", "it can't be created with a number of channels"):
        return describe_norm(value, config.name), None


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
    """Load a norm of the user and complete its own settings; other norms are not changed."""
    if not is_user_code(config.name) and not (config.name in NORMS and NORMS[config.name].layers):
        return config
    spec, _ = find_run_norm(config)
    return dataclasses.replace(config, options=resolve_norm_options(config, spec))


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
    own, requested = own_norm_settings(spec), dict(config.options)
    for name, setting in _SET_ELSEWHERE.items():
        if name in requested:
            raise UserError(f"norm.{name}: is set with {setting}.")
    further = {name: value for name, value in requested.items() if name not in own and accepts_any_option(factory)}
    checked = dataclasses.replace(config, options=tuple((n, v) for n, v in config.options if n not in further))
    if not own and checked.options:
        raise unknown_key(f"norm.{checked.options[0][0]}")
    resolved: Options = ()
    if own:
        try:
            hints = get_type_hints(vars(factory).get("__init__", factory) if isinstance(factory, type) else factory)
        except (NameError, AttributeError):  # names that exist for type checkers only
            hints = {}
        fields = [(n, _scalar_type(hints.get(n), v), dataclasses.field(default=v)) for n, v in own.items()]
        declared = dataclasses.make_dataclass("Settings", fields, frozen=True)
        resolved = resolve_options("norm", checked, type(spec.name, (), {"Settings": declared}))
    if not spec.layers:
        resolved = tuple((n, v) for n, v in resolved if n in requested and v != own[n])
    return tuple(sorted((*resolved, *further.items())))


def own_norm_settings(spec: NormInfo) -> dict[str, Scalar]:
    """Return the own settings of a norm with their defaults: arguments with a default that a record can contain.

    Example:
        >>> own_norm_settings(NORMS["gn"])
        {'eps': 1e-05, 'affine': True}
    """
    parameters = layer_parameters(norm_class(spec, min(spec.layers) if spec.layers else 2))
    others = (*_PLACEMENT, *_SET_ELSEWHERE, *spec.preset)
    return {n: p.default for n, p in parameters.items() if n not in others and isinstance(p.default, Scalar)}


def _scalar_type(hint: Any, default: Scalar) -> Any:
    """Return the type of an argument: its annotation if that has scalars only, or else the type of its default."""
    choices = get_args(hint) if get_origin(hint) is not Literal else (str,)
    if hint in _SCALARS or (choices and all(choice in _SCALARS for choice in choices)):
        return hint
    return Any if default is None else type(default)
