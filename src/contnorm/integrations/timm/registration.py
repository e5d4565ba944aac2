"""The norms of this package in timm's tables of layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NoReturn

import timm.layers
from timm.layers import create_norm, create_norm_act
from torch import nn

from contnorm.integrations.timm.layers import ACT_CLASS_OF, ACT_CLASSES
from contnorm.integrations.timm.tools import replace_functions, swap_functions
from contnorm.norm_entry import DIMS, norm_class
from contnorm.norms.activation import ActivationNorm
from contnorm.norms.group import LayerNorm2d
from contnorm.registry import NORMS

__all__ = ["register", "registered_names", "unregister"]

_NUMBERS_OF_GROUPS = range(1, 129)
_PREFIX = "contnorm_"  # of names that timm already has


@dataclass
class _Registration:
    """What `register` added to timm."""

    names: dict[str, str] = field(default_factory=dict)  # by norm, its name in timm
    entries: list[tuple[dict[str, Any], str, object]] = field(default_factory=list)
    members: list[tuple[set[Any], object]] = field(default_factory=list)
    functions: dict[FunctionType, FunctionType] = field(default_factory=dict)  # timm's by ours

    def add_entry(self, table: dict[str, Any], key: str, value: object) -> None:
        if key not in table:
            table[key] = value
            self.entries.append((table, key, value))

    def add_member(self, table: set[Any], value: object) -> None:
        if value not in table:
            table.add(value)
            self.members.append((table, value))


_registration: _Registration | None = None


def register() -> None:
    """Add the norms of this package to timm. A second call changes nothing.

    Afterwards these work in ``timm.create_model(..., norm_layer=...)``, ``create_norm_layer``, ``get_norm_layer``,
    ``create_norm_act_layer`` and ``get_norm_act_layer``:

    - the names of `registered_names`, such as ``"cn"``. A grouped norm takes the number of groups in its name
      (``"cn8"``); without one it is ``num_groups="auto"``, since the widths of timm's networks differ;
    - the classes, such as `contnorm.ContinualNorm2d`, and a `functools.partial` of them.

    Names that timm has keep their meaning. ``timm.utils.freeze``, ``unfreeze``, ``freeze_batch_norm_2d`` and
    ``convert_sync_batchnorm`` treat the layers of this package correctly, and ``convert_splitbn_model`` raises an error
    before it changes the model. Features can be extracted with torch.fx (``feature_cls="fx"``).

    Example:
        >>> import timm
        >>> register()
        >>> timm.layers.create_norm_act_layer("cn8", 64, act_layer="silu")
        ContinualNormAct2d(
          64, num_groups=8, eps=1e-05, momentum=0.1
          (drop): Identity()
          (act): SiLU(inplace=True)
        )
        >>> unregister()
    """
    global _registration
    if _registration is None:
        _registration = _Registration()
        _add_names(_registration)
        _add_classes(_registration)
        _add_leaves(_registration)
        _registration.functions = replace_functions()


def unregister() -> None:
    """Restore timm to its state before `register`. Models that were built in between keep working.

    Example:
        >>> register()
        >>> unregister()
        >>> "cn" in timm.layers.create_norm._NORM_MAP
        False
    """
    global _registration
    if _registration is None:
        return
    for table, key, value in _registration.entries:
        if table.get(key) is value:
            del table[key]
    for members, value in _registration.members:
        members.discard(value)
    swap_functions(_registration.functions)
    _registration = None


def registered_names() -> dict[str, str]:
    """Return the name in timm of each norm of this package; empty before `register`.

    The names differ where timm has the same name for another layer: its ``"iabn"`` is in-place activated batch norm,
    and its ``"frn"`` and ``"evonorm_s0"`` are its own implementations.

    Example:
        >>> register()
        >>> registered_names()["cn"], registered_names()["iabn"]
        ('cn', 'contnorm_iabn')
        >>> unregister()
    """
    return {} if _registration is None else dict(_registration.names)


def _key(name: str) -> str:
    """Return the key of a name in timm's tables."""
    return name.replace("_", "").lower()


def _add_names(registration: _Registration) -> None:
    norms, norm_acts = create_norm._NORM_MAP, create_norm_act._NORM_ACT_MAP
    for name, entry in NORMS.items():
        if entry.layers:
            continue  # a norm of another package
        if entry.standardizes_weights:
            for table in (norms, norm_acts):
                registration.add_entry(table, _key(name), _refusal(name, _STANDARDIZES))
            continue
        name_in_timm = name if _key(name) not in {*norms, *norm_acts} else f"{_PREFIX}{name}"
        registration.names[name] = name_in_timm
        plain = norm_class(entry, 2)
        assert isinstance(plain, type)
        for suffix, options in _variants(entry.grouped):
            key = f"{_key(name_in_timm)}{suffix}"
            norm = functools.partial(plain, **{**options, **entry.preset}) if options or entry.preset else plain
            act: Any = _with_keywords(ACT_CLASS_OF[plain], norm)
            registration.add_entry(norms, key, _refusal(name, _ABSORBS) if entry.absorbs_activation else norm)
            registration.add_entry(norm_acts, key, act)
            if not entry.absorbs_activation:
                registration.add_member(create_norm_act._NORM_ACT_REQUIRES_ARG, act)


def _variants(grouped: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """Iterate over the suffixes of a norm's name and the options that they stand for."""
    yield "", {"num_groups": "auto"} if grouped else {}
    if grouped:
        for count in _NUMBERS_OF_GROUPS:
            yield str(count), {"num_groups": count}


def _with_keywords(cls: type[nn.Module], norm: object) -> object:
    """Return a class with the arguments that are bound in a partial of another one."""
    return functools.partial(cls, **norm.keywords) if isinstance(norm, functools.partial) else cls


_STANDARDIZES = (
    "it also standardizes the weights of the convolutions before it, which timm's architectures do not let a norm do"
)
_ABSORBS = "it contains an activation, and this architecture applies one after each norm"


def _refusal(name: str, reason: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise ValueError(
            f"norm_layer={name!r}: {reason}. Build the model with its own norm, then use "
            f"contnorm.convert_norm(model, {name!r}, example_input=...)."
        )

    return refuse


def _add_classes(registration: _Registration) -> None:
    """Let timm find the norm-and-activation class of a norm class, which it looks up by the name of the class."""
    by_name = getattr(create_norm_act, "_NORM_TO_NORM_ACT_MAP", {})  # older versions of timm have a fixed list
    for plain, act in ACT_CLASSES.items():
        registration.add_member(create_norm_act._NORM_ACT_TYPES, act)
        if not issubclass(plain, ActivationNorm):
            registration.add_member(create_norm_act._NORM_ACT_REQUIRES_ARG, act)
            registration.add_entry(by_name, plain.__name__.lower(), act)
    # timm has another class with the name LayerNorm2d. As a member of these sets, ours is called with `act_layer`,
    # which it refuses; otherwise timm would silently build its own.
    registration.add_member(create_norm_act._NORM_ACT_TYPES, LayerNorm2d)
    registration.add_member(create_norm_act._NORM_ACT_REQUIRES_ARG, LayerNorm2d)


def _add_leaves(registration: _Registration) -> None:
    """Let timm's feature extraction with torch.fx treat the layers as units, as it does its own."""
    leaves = timm.layers._fx._leaf_modules if hasattr(timm.layers, "_fx") else set()  # elsewhere in older versions
    for entry in NORMS.values():
        for dim in DIMS if not entry.layers else ():
            registration.add_member(leaves, norm_class(entry, dim))
    for cls in ACT_CLASSES.values():
        registration.add_member(leaves, cls)
