"""Registry of all norms, and creation of norm layers by name.

This module does not import torch, so that listing the norms is fast; the module of a layer is imported when the layer
is created. Code that handles all norms (`create_norm`, the converter, the conformance tests, the benchmarks) iterates
over the registry. A norm added here is available in all of them.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from contnorm.plugins import BUILT_IN, Origin, load_plugins

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "NORMS",
    "Dim",
    "NormSpec",
    "accepted_options",
    "build_norm",
    "check_options",
    "create_norm",
    "find_norm",
    "norm_class",
    "norm_names",
    "resolve_norm",
]

Dim = Literal[1, 2, 3]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """Registry entry of a norm.

    Attributes:
        name: The name in ``create_norm``, ``convert_norm`` and ``--norm``.
        title: The name in the paper's tables.
        target: ``"module:Class"``, where ``1d``, ``2d`` or ``3d`` is appended to the class name.
        summary: A one-line description for listings.
        citation: The publication of the method.
        preset: Constructor arguments that select this norm among those of its class.
        origin: The package that it comes from.
        grouped: Whether it accepts ``num_groups``.
        keeps_moments: Whether it has running moments.
        cannot: Conformance tests that do not apply, each with the reason. The test suite checks that they fail.
    """

    name: str
    title: str
    target: str
    summary: str
    citation: str
    preset: Mapping[str, object] = field(default_factory=dict)
    origin: Origin = BUILT_IN
    grouped: bool = False
    keeps_moments: bool = False
    cannot: Mapping[str, str] = field(default_factory=dict)


_STOCK = "it calls torch's operator, so that the baseline is bit-exact with torch"
_CONTINUAL = "contnorm.layers.continual:ContinualNorm"
_PHAM = "Pham et al., Continual Normalization, ICLR 2022"

_NORMS: dict[str, NormSpec] = {
    spec.name: spec
    for spec in (
        NormSpec(
            name="none",
            title="NoNL",
            target="contnorm.layers.none:NoNorm",
            summary="no normalization: the input as it is",
            citation=_PHAM,
        ),
        NormSpec(
            name="bn",
            title="BN",
            target="contnorm.layers.batch:BatchNorm",
            summary="batch normalization; momentum=None averages all batches equally",
            citation="Ioffe and Szegedy, Batch Normalization, ICML 2015",
            keeps_moments=True,
            cannot={"large_mean": _STOCK},
        ),
        NormSpec(
            name="ln",
            title="LN",
            target="contnorm.layers.group:LayerNorm",
            summary="layer normalization over all channels and positions of a sample",
            citation="Ba et al., Layer Normalization, 2016",
            cannot={"large_mean": _STOCK},
        ),
        NormSpec(
            name="in",
            title="IN",
            target="contnorm.layers.group:InstanceNorm",
            summary="instance normalization: each channel of each sample by itself",
            citation="Ulyanov et al., Instance Normalization, 2016",
            cannot=MappingProxyType(
                {
                    "large_mean": _STOCK,
                    "rank2": "an (N, C) input has one value per instance, which normalizes to zero",
                }
            ),
        ),
        NormSpec(
            name="gn",
            title="GN",
            target="contnorm.layers.group:GroupNorm",
            summary="group normalization: groups of channels of each sample",
            citation="Wu and He, Group Normalization, ECCV 2018",
            grouped=True,
            cannot={"large_mean": _STOCK},
        ),
        NormSpec(
            name="brn",
            title="BRN",
            target="contnorm.layers.renorm:BatchRenorm",
            summary="batch renormalization: batch moments pulled to the running ones within limits",
            citation="Ioffe, Batch Renormalization, NeurIPS 2017",
            keeps_moments=True,
        ),
        NormSpec(
            name="sn",
            title="SN",
            target="contnorm.layers.switchable:SwitchNorm",
            summary="switchable normalization: a learned mixture of IN, LN and BN moments",
            citation="Luo et al., Differentiable Learning-to-Normalize, ICLR 2019",
            keeps_moments=True,
            cannot={"batch_norm_keys": "its two mixture weights are in no batch norm's checkpoint"},
        ),
        NormSpec(
            name="cn",
            title="CN",
            target=_CONTINUAL,
            summary="continual normalization: group norm without affine, then batch norm",
            citation=_PHAM,
            grouped=True,
            keeps_moments=True,
        ),
        NormSpec(
            name="bn_gn",
            title="BN then GN",
            target=_CONTINUAL,
            summary="reversed order: batch norm without affine, then group norm",
            citation=_PHAM,
            preset={"order": "bn_gn"},
            grouped=True,
            keeps_moments=True,
        ),
        NormSpec(
            name="cn_tied",
            title="CN + tw",
            target=_CONTINUAL,
            summary="continual normalization with one pair of weights used in both steps",
            citation=_PHAM,
            preset={"tied": True},
            grouped=True,
            keeps_moments=True,
        ),
        NormSpec(
            name="bn_gn_tied",
            title="BN then GN + tw",
            target=_CONTINUAL,
            summary="reversed order with one pair of weights used in both steps",
            citation=_PHAM,
            preset={"order": "bn_gn", "tied": True},
            grouped=True,
            keeps_moments=True,
        ),
    )
}
NORMS: Mapping[str, NormSpec] = MappingProxyType(_NORMS)  # read-only view


def norm_names() -> tuple[str, ...]:
    """Return the names of all norms, in registry order.

    Example:
        >>> norm_names()[:4]
        ('none', 'bn', 'ln', 'in')
    """
    return tuple(NORMS)


def find_norm(name: str, caller: str = "") -> tuple[NormSpec, int | None]:
    """Look up a norm by name; return its spec, and the number of groups if the name ends in one.

    Args:
        name: A name in the registry, case-insensitive. The name of a grouped norm may end in the number of groups.
        caller: The function named at the start of error messages; empty for none.

    Raises:
        TypeError: If the name is not a string.
        ValueError: For an unknown name; the message suggests similar names.

    Example:
        >>> find_norm("cn8")[0].title, find_norm("cn8")[1]
        ('CN', 8)
        >>> find_norm("BN")[1] is None
        True
    """
    where = f"{caller}: " if caller else ""
    if not isinstance(name, str):
        raise TypeError(f"{where}the norm's name must be a string such as 'cn', got {name!r}.")
    wanted = name.strip().lower()
    if wanted in NORMS:
        return NORMS[wanted], None
    numbered = re.fullmatch(r"([a-z_]+?)(\d+)", wanted)
    if numbered and numbered[1] in NORMS:
        spec = NORMS[numbered[1]]
        if spec.grouped:
            return spec, int(numbered[2])
        raise ValueError(
            f"{where}norm {name!r} ends in a number of groups, but {spec.name!r} has no groups. "
            f"Use {spec.name!r}, or one of the grouped norms: {_listed(grouped=True)}."
        )
    if load_plugins():
        return find_norm(name, caller)  # a plugin may have added it
    near = _match_class_name(wanted) or difflib.get_close_matches(wanted, NORMS, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(
        f"{where}unknown norm {name!r}.{hint} There are {len(NORMS)}: {_listed()}. "
        f"A number of groups may follow {_listed(grouped=True)}, as in 'cn8'."
    )


def _match_class_name(wanted: str) -> list[str]:
    """Return the norm whose class name starts with the input, such as ``BatchNorm2d``, ``group_norm``, ``continual``.

    Example:
        >>> _match_class_name("continualnorm2d"), _match_class_name("c")
        (['cn'], [])
    """
    prefix = re.sub(r"\dd$|[^a-z]", "", wanted)
    matches = [n for n, s in NORMS.items() if not s.preset and s.target.partition(":")[2].lower().startswith(prefix)]
    return matches if len(matches) == 1 and len(prefix) > 3 else []


def _listed(grouped: bool = False) -> str:
    return ", ".join(name for name, spec in NORMS.items() if spec.grouped or not grouped)


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
    spec, options = resolve_norm(name, options, "create_norm")
    return build_norm(spec, num_features, dim, options, "create_norm")


def resolve_norm(name: str, options: dict[str, object], caller: str) -> tuple[NormSpec, dict[str, object]]:
    """Look up a norm by name; return its spec, and the options with the number of groups from the name added."""
    spec, groups = find_norm(name, caller)
    if groups is None:
        return spec, options
    if options.get("num_groups", groups) != groups:
        raise ValueError(
            f"{caller}: {name!r} means {groups} groups, and num_groups={options['num_groups']!r} contradicts it. "
            f"Give one of the two."
        )
    return spec, {**options, "num_groups": groups}


def build_norm(spec: NormSpec, num_features: int, dim: Dim, options: Mapping[str, object], caller: str) -> nn.Module:
    """Check the options and create the layer that a spec describes."""
    cls = norm_class(spec, dim)
    check_options(spec, cls, options, caller)
    return cls(num_features, **{**options, **spec.preset})


def check_options(spec: NormSpec, cls: type[nn.Module], options: Mapping[str, object], caller: str) -> None:
    """Raise for an option that the class does not accept, or that contradicts the presets of the spec."""
    allowed = accepted_options(cls)
    for key, value in options.items():
        if key in spec.preset and spec.preset[key] != value:
            raise ValueError(
                f"{caller}: {key}={value!r} contradicts the norm {spec.name!r}, which has {key}={spec.preset[key]!r}."
            )
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{caller}: norm {spec.name!r} does not accept {key!r}.{hint} Use {', '.join(allowed)}.")


def norm_class(spec: NormSpec, dim: Dim, caller: str = "create_norm") -> type[nn.Module]:
    """Return the class of a norm for 1d, 2d or 3d input."""
    if dim not in (1, 2, 3):
        raise ValueError(
            f"{caller}: dim={dim!r} must be 1, 2 or 3: the number of spatial dimensions (1 also for none)."
        )
    module, _, stem = spec.target.partition(":")
    cls: type[nn.Module] = getattr(importlib.import_module(module), f"{stem}{dim}d")
    return cls


def accepted_options(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the constructor's arguments, without ``num_features``."""
    parameters = list(inspect.signature(cls).parameters)
    return tuple(p for p in parameters if p != "num_features")
