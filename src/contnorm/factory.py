"""Create norm layers by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from typing import Literal

from torch import nn

from contnorm.registry import NormSpec, find_norm

__all__ = ["Dim", "accepted_options", "create_norm", "norm_class"]

Dim = Literal[1, 2, 3]


def create_norm(name: str, num_features: int, *, dim: Dim = 2, **options: object) -> nn.Module:
    """Create a norm layer by name.

    Args:
        name: One of ``none bn ln in gn brn sn cn bn_gn cn_tied bn_gn_tied``, case-insensitive. The name of a grouped
            norm may end in the number of groups, as in ``"cn8"``.
        num_features: Number of channels.
        dim: 1 for (N, C) and (N, C, L) input, 2 for (N, C, H, W), 3 for (N, C, D, H, W).
        **options: Further arguments of that norm's class, such as ``num_groups``, ``eps`` or ``momentum``.

    Raises:
        ValueError: For an unknown name, or an option that the norm does not accept.

    Example:
        >>> create_norm("cn", 64, num_groups=8)
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> create_norm("gn32", 64, dim=1)
        GroupNorm1d(64, num_groups=32, eps=1e-05)
    """
    spec, options = named(name, options, "create_norm")
    return build(spec, num_features, dim, options, "create_norm")


def named(name: str, options: dict[str, object], caller: str) -> tuple[NormSpec, dict[str, object]]:
    """Look up a norm by name; return its spec, and the options with the number of groups from the name added."""
    spec, groups = find_norm(name, caller)
    if groups is None:
        return spec, options
    if options.get("num_groups", groups) != groups:
        raise ValueError(
            f"{caller}: {name!r} asks for {groups} groups and num_groups={options['num_groups']!r} for others. "
            f"Give one of the two."
        )
    return spec, {**options, "num_groups": groups}


def build(spec: NormSpec, num_features: int, dim: Dim, options: Mapping[str, object], caller: str) -> nn.Module:
    """Check the options and create the layer that a spec describes."""
    cls = norm_class(spec, dim)
    check_options(spec, cls, options, caller)
    layer = cls(num_features, **{**options, **spec.preset})
    assert isinstance(layer, nn.Module)
    return layer


def check_options(spec: NormSpec, cls: type[nn.Module], options: Mapping[str, object], caller: str) -> None:
    """Raise for an option that the class does not accept, or that contradicts the presets of the spec."""
    allowed = accepted_options(cls)
    for key, value in options.items():
        if key in spec.preset and spec.preset[key] != value:
            raise ValueError(
                f"{caller}: {key}={value!r} contradicts the norm {spec.name!r}, which is {key}={spec.preset[key]!r}."
            )
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{caller}: norm {spec.name!r} takes no {key!r}.{hint} It takes {', '.join(allowed)}.")


def norm_class(spec: NormSpec, dim: Dim, caller: str = "create_norm") -> type[nn.Module]:
    """Return the class of a norm for 1d, 2d or 3d input."""
    if dim not in (1, 2, 3):
        raise ValueError(f"{caller}: dim={dim!r} must be 1, 2 or 3: the number of spatial dimensions, 1 for none.")
    module, _, stem = spec.target.partition(":")
    cls: type[nn.Module] = getattr(importlib.import_module(module), f"{stem}{dim}d")
    return cls


def accepted_options(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the constructor's arguments, without ``num_features``."""
    parameters = list(inspect.signature(cls).parameters)
    return tuple(p for p in parameters if p != "num_features")
