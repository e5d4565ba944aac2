"""Registry of all norms, and creation of norm layers by name.

This module does not import torch, so that listing the norms is fast; the module of a layer is imported when the layer
is created. Code that handles all norms (`create_norm`, the converter, the conformance tests, the benchmarks) iterates
over the registry. A norm added here, or registered with `register_norm`, is available in all of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from contnorm.norm_entry import Dim, LayerFactory, NormEntry, build_norm, describe_norm
from contnorm.plugins import current_origin, load_plugins, track_registry

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "NORMS",
    "create_norm",
    "find_norm",
    "norm_names",
    "numbered_name",
    "register_norm",
    "register_spec",
    "resolve_norm",
    "unregister_norm",
]


_STOCK = "it calls torch's operator, so that the baseline is bit-exact with torch"
_NO_PIVOT = "it computes its moments without a pivot, as torch's batch norm does"
_CONTINUAL = "contnorm.norms.continual:ContinualNorm"
_PHAM = "Pham et al., Continual Normalization, ICLR 2022"

_NORMS: dict[str, NormEntry] = {
    spec.name: spec
    for spec in (
        NormEntry(
            name="none",
            title="NoNL",
            target="contnorm.norms.none:NoNorm",
            summary="no normalization: the input as it is",
            citation=_PHAM,
            cannot={"affine_parameters": "it has no parameters"},
        ),
        NormEntry(
            name="bn",
            title="BN",
            target="contnorm.norms.batch:BatchNorm",
            summary="batch normalization; momentum=None averages all batches equally",
            citation="Ioffe and Szegedy, Batch Normalization, ICML 2015",
            keeps_moments=True,
            cannot={"large_mean": _STOCK},
        ),
        NormEntry(
            name="ln",
            title="LN",
            target="contnorm.norms.group:LayerNorm",
            summary="layer normalization over all channels and positions of a sample",
            citation="Ba et al., Layer Normalization, 2016",
            cannot={"large_mean": _STOCK},
        ),
        NormEntry(
            name="in",
            title="IN",
            target="contnorm.norms.group:InstanceNorm",
            summary="instance normalization: each channel of each sample by itself",
            citation="Ulyanov et al., Instance Normalization, 2016",
            cannot=MappingProxyType(
                {
                    "large_mean": _STOCK,
                    "rank2": "an (N, C) input has one value per instance, which normalizes to zero",
                }
            ),
        ),
        NormEntry(
            name="gn",
            title="GN",
            target="contnorm.norms.group:GroupNorm",
            summary="group normalization: groups of channels of each sample",
            citation="Wu and He, Group Normalization, ECCV 2018",
            grouped=True,
            cannot={"large_mean": _STOCK},
        ),
        NormEntry(
            name="brn",
            title="BRN",
            target="contnorm.norms.renorm:BatchRenorm",
            summary="batch renormalization: batch moments pulled to the running ones within limits",
            citation="Ioffe, Batch Renormalization, NeurIPS 2017",
            keeps_moments=True,
        ),
        NormEntry(
            name="sn",
            title="SN",
            target="contnorm.norms.switchable:SwitchNorm",
            summary="switchable normalization: a learned mixture of IN, LN and BN moments",
            citation="Luo et al., Differentiable Learning-to-Normalize, ICLR 2019",
            keeps_moments=True,
            cannot={"batch_norm_keys": "its two mixture weights are in no batch norm's checkpoint"},
        ),
        NormEntry(
            name="cn",
            title="CN",
            target=_CONTINUAL,
            summary="continual normalization: group norm without affine, then batch norm",
            citation=_PHAM,
            grouped=True,
            keeps_moments=True,
        ),
        NormEntry(
            name="bn_gn",
            title="BN then GN",
            target=_CONTINUAL,
            summary="reversed order: batch norm without affine, then group norm",
            citation=_PHAM,
            preset={"order": "bn_gn"},
            grouped=True,
            keeps_moments=True,
        ),
        NormEntry(
            name="cn_tied",
            title="CN + tw",
            target=_CONTINUAL,
            summary="continual normalization with one pair of weights used in both steps",
            citation=_PHAM,
            preset={"tied": True},
            grouped=True,
            keeps_moments=True,
        ),
        NormEntry(
            name="bn_gn_tied",
            title="BN then GN + tw",
            target=_CONTINUAL,
            summary="reversed order with one pair of weights used in both steps",
            citation=_PHAM,
            preset={"order": "bn_gn", "tied": True},
            grouped=True,
            keeps_moments=True,
        ),
        NormEntry(
            name="adab2n",
            title="AdaB2N",
            target="contnorm.norms.adaptive:AdaptiveBalanceNorm",
            summary="batch norm with a learned balance of the tasks in the batch and a modified momentum",
            citation="Lyu et al., Overcoming Recency Bias of Normalization Statistics, NeurIPS 2023",
            keeps_moments=True,
            cannot={
                "large_mean": _NO_PIVOT,
                "batch_norm_keys": "its balance of tasks is in no batch norm's checkpoint",
            },
        ),
        NormEntry(
            name="tbbn",
            title="TBBN",
            target="contnorm.norms.task_balanced:TaskBalancedNorm",
            summary="task-balanced batch norm: parts of the stream samples, each with all memory samples",
            citation="Cha et al., Rebalancing Batch Normalization, CVPR 2023",
            keeps_moments=True,
            cannot={
                "large_mean": _NO_PIVOT,
                "batch_norm_keys": "its number of tasks is in no batch norm's checkpoint",
                "vmap": "shapes depend on its number of tasks, which must be the same for all",
            },
        ),
        NormEntry(
            name="bnt",
            title="BNT",
            target="contnorm.norms.balanced:BalancedBatchNorm",
            summary="BN Tricks: batch norm whose running moments are those of class-balanced batches",
            citation="Zhou et al., Diagnosing Batch Normalization in Class Incremental Learning, 2022",
            keeps_moments=True,
            cannot={"large_mean": _STOCK},
        ),
        NormEntry(
            name="iabn",
            title="IABN",
            target="contnorm.norms.instance_aware:InstanceAwareBatchNorm",
            summary="instance-aware batch norm: corrects the moments for samples that differ from the batch",
            citation="Gong et al., NOTE, NeurIPS 2022",
            keeps_moments=True,
        ),
        NormEntry(
            name="rbn",
            title="RBN",
            target="contnorm.norms.robust:RobustBatchNorm",
            summary="robust batch norm: normalizes with a mixture of running and batch moments, and stores it",
            citation="Yuan et al., RoTTA, CVPR 2023",
            keeps_moments=True,
            cannot={
                "evaluation_uses_running_moments": "training stores the moments that it normalizes with, so evaluation "
                "of the same batch gives the same output"
            },
        ),
        NormEntry(
            name="evonorm_s0",
            title="EvoNorm-S0",
            target="contnorm.norms.evonorm:EvoNorm",
            summary="EvoNorm-S0: groups of each sample, with an activation that replaces the one that follows",
            citation="Liu et al., Evolving Normalization-Activation Layers, NeurIPS 2020",
            grouped=True,
            absorbs_activation=True,
            cannot={"large_mean": "it does not subtract the mean, which costs its gradients their precision"},
        ),
        NormEntry(
            name="frn",
            title="FRN",
            target="contnorm.norms.filter_response:FilterResponseNorm",
            summary="filter response normalization with a thresholded linear unit in place of the activation",
            citation="Singh and Krishnan, Filter Response Normalization Layer, CVPR 2020",
            absorbs_activation=True,
            cannot={"rank2": "an (N, C) input has one value per channel, of which only the sign would remain"},
        ),
        NormEntry(
            name="gn_ws",
            title="GN + WS",
            target="contnorm.norms.weight_standardization:WSGroupNorm",
            summary="group normalization after convolutions with standardized weights",
            citation="Qiao et al., Micro-Batch Training with Weight Standardization, 2019",
            grouped=True,
            standardizes_weights=True,
            cannot={"large_mean": _STOCK},
        ),
    )
}
NORMS: Mapping[str, NormEntry] = MappingProxyType(_NORMS)  # read-only view
track_registry(_NORMS)


_BUILT_IN = frozenset(_NORMS)


def norm_names() -> tuple[str, ...]:
    """Return the names of all norms, in registry order.

    Example:
        >>> norm_names()[:4]
        ('none', 'bn', 'ln', 'in')
    """
    return tuple(NORMS)


def find_norm(name: str, caller: str = "") -> tuple[NormEntry, int | None]:
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
    numbered = re.fullmatch(r"([a-z][a-z0-9_-]*?)(?:(?<=\d)-)?(\d+)", wanted)
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


def numbered_name(spec: NormEntry, groups: object) -> str:
    """Return the name of a grouped norm with its number of groups, which `find_norm` understands.

    Example:
        >>> numbered_name(NORMS["cn"], 8), numbered_name(NORMS["evonorm_s0"], 8)
        ('cn8', 'evonorm_s0-8')
    """
    return f"{spec.name}{'-' if spec.name[-1].isdigit() else ''}{groups}"


def _match_class_name(wanted: str) -> list[str]:
    """Return the norm whose class name starts with the input, such as ``BatchNorm2d``, ``group_norm``, ``continual``.

    Example:
        >>> _match_class_name("continualnorm2d"), _match_class_name("c")
        (['cn'], [])
    """
    prefix = re.sub(r"\dd$|[^a-z]", "", wanted)
    stems = {n: s.target.partition(":")[2].lower() for n, s in NORMS.items() if s.target and not s.preset}
    matches = [name for name, stem in stems.items() if stem.startswith(prefix)]
    return matches if len(matches) == 1 and len(prefix) > 3 else []


def _listed(grouped: bool = False) -> str:
    return ", ".join(name for name, spec in NORMS.items() if spec.grouped or not grouped)


def create_norm(name: str, num_features: int, *, dim: Dim = 2, **options: object) -> nn.Module:
    """Create a norm layer by name.

    Args:
        name: A name that `contnorm ls norms` lists, such as ``"cn"``, case-insensitive. The name of a grouped norm may
            end in the number of groups, as in ``"cn8"`` or ``"evonorm_s0-8"``.
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


def resolve_norm(
    norm: str | LayerFactory | NormEntry, options: dict[str, object], caller: str
) -> tuple[NormEntry, dict[str, object]]:
    """Return the spec of a norm by name, class or factory, and the options with the number of groups from the name."""
    if isinstance(norm, NormEntry):
        return norm, options
    if not isinstance(norm, str):
        return describe_norm(norm, caller=caller), options
    spec, groups = find_norm(norm, caller)
    if groups is None:
        return spec, options
    if options.get("num_groups", groups) != groups:
        raise ValueError(
            f"{caller}: {norm!r} means {groups} groups, and num_groups={options['num_groups']!r} contradicts it. "
            f"Give one of the two."
        )
    return spec, {**options, "num_groups": groups}


# --- norms of other packages and programs --------------------------------------------------------------------------

_NAME = re.compile(r"[a-z][a-z0-9_-]*[a-z_]|[a-z]")


def register_norm(
    name: str,
    layer: LayerFactory | None = None,
    *,
    layers: Mapping[Dim, LayerFactory] | None = None,
    title: str | None = None,
    summary: str | None = None,
    citation: str = "",
    grouped: bool | None = None,
    keeps_moments: bool | None = None,
    cannot: Mapping[str, str] | None = None,
    exist_ok: bool = False,
) -> Any:
    """Register a norm under a name, for `create_norm`, `convert_norm` and the bench (``--norm``, ``bench.run``).

    A layer is created as ``layer(num_features, **options)``. `contnorm.testing.check_norm` checks that a norm behaves
    as a norm layer of torch does. Without ``layer`` and ``layers``, it returns a decorator.

    Args:
        name: The new name: lower-case letters, digits, ``_`` and ``-``; it does not end in a digit.
        layer: A class of `torch.nn.Module`, or a function that returns a layer. A subclass of ``BatchNorm2d`` is used
            for 2d input, and one of ``BatchNorm1d`` or ``BatchNorm3d`` likewise; any other for 1d, 2d and 3d input.
        layers: The same for each dimension, as ``{1: MyNorm1d, 2: MyNorm2d}``.
        title: The name in tables. Default: the name.
        summary: A one-line description. Default: the first line of the docstring.
        citation: The publication of the method.
        grouped: Whether it accepts ``num_groups``. Default: whether the constructor has this argument.
        keeps_moments: Whether it has running moments. Default: whether a new layer has a buffer ``running_mean``.
        cannot: Checks of `contnorm.testing.check_norm` that it fails, each with the reason. Default: the attribute
            ``cannot`` of the class.
        exist_ok: Whether to replace a norm that was registered under this name.

    Returns:
        The layer, or the decorator.

    Raises:
        ValueError: If the name is invalid or taken, or a layer can't be created with a number of channels.
        TypeError: If the layer is neither a class of modules nor a function.

    Example:
        >>> class RMSNorm(nn.Module):
        ...     "Divide by the root mean square over the channels."
        ...     def __init__(self, num_features, eps=1e-5):
        ...         super().__init__()
        ...         self.num_features, self.eps = num_features, eps
        ...         self.weight = nn.Parameter(torch.ones(num_features))
        ...     def forward(self, x):
        ...         scale = (x.square().mean(1, keepdim=True) + self.eps).rsqrt()
        ...         return x * scale * self.weight.reshape(-1, *[1] * (x.dim() - 2))
        >>> _ = register_norm("rms", RMSNorm)
        >>> create_norm("rms", 64, eps=1e-3).eps
        0.001
        >>> unregister_norm("rms")
    """
    _check_name(name, exist_ok)
    facts: dict[str, Any] = {
        "title": title,
        "summary": summary,
        "citation": citation,
        "grouped": grouped,
        "keeps_moments": keeps_moments,
        "cannot": cannot,
    }
    if layer is None and layers is None:  # a decorator
        return lambda decorated: register_norm(name, decorated, exist_ok=exist_ok, **facts)
    if layer is not None and layers is not None:
        raise ValueError("register_norm: give layer or layers, not both.")
    spec = describe_norm(
        cast("LayerFactory | Mapping[Dim, LayerFactory]", layers if layer is None else layer),
        name,
        caller="register_norm",
        **facts,
    )
    register_spec(replace(spec, origin=current_origin()))
    return layer if layer is not None else layers


def register_spec(spec: NormEntry) -> None:
    """Add a norm to the registry as it is, such as one of another process; it replaces one of the same name."""
    _NORMS[spec.name] = replace(spec, is_registered=True)


def unregister_norm(name: str) -> None:
    """Remove a norm that was registered with `register_norm`.

    Raises:
        ValueError: If there is no registered norm of this name. Norms of this package can't be removed.

    Example:
        >>> _ = register_norm("mine", lambda channels: nn.GroupNorm(2, channels))
        >>> unregister_norm("mine")
        >>> "mine" in norm_names()
        False
    """
    if name in _BUILT_IN or name not in _NORMS:
        raise ValueError(f"unregister_norm: {name!r} is not the name of a registered norm.")
    del _NORMS[name]


def _check_name(name: object, exist_ok: bool) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"register_norm: the name {name!r} is not valid. Use lower-case letters, digits, '_' and '-', starting "
            f"with a letter and not ending in a digit, which would be a number of groups."
        )
    if name in _BUILT_IN:
        raise ValueError(f"register_norm: {name!r} is a norm of contnorm. Use another name.")
    if name in _NORMS and not exist_ok:
        raise ValueError(f"register_norm: {name!r} is already registered. Use another name, or exist_ok=True.")
