"""The format of a norm spec, and the check that a dict has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FORMAT", "VERSION", "check_spec"]

FORMAT = "contnorm.norm_spec"
VERSION = 1

_NUMBERS = (int, float)
_ENTRY: Mapping[str, tuple[type, ...]] = {
    "norm": (str,),
    "dim": (int, type(None)),
    "num_features": (int,),
    "options": (dict,),
    "parameters": (list,),
    "running_moments": (bool,),
    "constant": (bool,),
    "frozen": (bool,),
    "synced": (bool,),
    "has_act": (bool,),
    "also_at": (list,),
}
_OPTIONAL: Mapping[str, tuple[type, ...]] = {"absorbed": (list,), "standardized": (list,), "other_options": (list,)}
_UNREGISTERED: Mapping[str, tuple[type, ...]] = {
    "norm": (type(None),),
    "class": (str,),
    "frozen": (bool,),
    "also_at": (list,),
}
_ACTIVATION: Mapping[str, tuple[type, ...]] = {"shared": (bool,), "also_at": (list,)}
_CONVOLUTION: Mapping[str, tuple[type, ...]] = {"weight_eps": _NUMBERS, "also_at": (list,)}


def check_spec(spec: object) -> dict[str, dict[str, Any]]:
    """Return the three tables of a spec; raise if it is not one."""
    if not isinstance(spec, Mapping):
        raise TypeError(f"apply_norm_spec: expected a spec of contnorm.norm_spec, a dict, got {type(spec).__name__}.")
    if spec.get("format") != FORMAT:
        keys = ", ".join(map(repr, list(spec)[:3])) or "no keys"
        raise ValueError(
            f"apply_norm_spec: this is not a spec of contnorm.norm_spec: 'format' must be {FORMAT!r}. The dict has "
            f"{keys}{', ...' if len(spec) > 3 else ''}."
        )
    if spec.get("version") != VERSION:
        raise ValueError(
            f"apply_norm_spec: the spec has version {spec.get('version')!r}, and this release of contnorm reads "
            f"version {VERSION}. Install the release that wrote it, or a newer one."
        )
    tables: dict[str, dict[str, Any]] = {}
    for name, fields in (("norms", None), ("activations", _ACTIVATION), ("convolutions", _CONVOLUTION)):
        table = spec.get(name)
        if not isinstance(table, Mapping):
            raise ValueError(f"apply_norm_spec: the spec is damaged: {name!r} is {table!r} and must be a dict.")
        for path, entry in table.items():
            _check_fields(f"{name}[{path!r}]", entry, fields or _norm_fields(entry), _OPTIONAL if not fields else {})
        tables[name] = dict(table)
    return tables


def _norm_fields(entry: object) -> Mapping[str, tuple[type, ...]]:
    return _UNREGISTERED if isinstance(entry, Mapping) and entry.get("norm") is None else _ENTRY


def _check_fields(
    where: str, entry: object, fields: Mapping[str, tuple[type, ...]], optional: Mapping[str, tuple[type, ...]]
) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"apply_norm_spec: the spec is damaged: {where} is {entry!r} and must be a dict.")
    known = {**fields, **optional}
    missing, unknown = sorted(set(fields) - set(entry)), sorted(set(entry) - set(known))
    if missing or unknown:
        what = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which is unknown"
        raise ValueError(f"apply_norm_spec: the spec is damaged: {where} {what}.")
    for name, value in entry.items():
        kinds = known[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ValueError(
                f"apply_norm_spec: the spec is damaged: {where}[{name!r}] is {value!r} and must be {expected}."
            )
