"""Registry of all norms, creation of norm layers by name, and plugins.

This module does not import torch, so that listing the norms is fast; the module of a layer is imported when the layer
is created. Code that handles all norms (`create_norm`, the converter, the conformance tests, the benchmarks) iterates
over the registry. A norm added here, or registered with `register_norm`, is available in all of them.

Plugins are installed packages that add norms, strategies, memories, networks and data sets. A package names a function
in the entry point group ``contnorm.plugins``. The function is called once, when a name is used that this package does
not have, or when components are listed. It calls the ``register_...`` functions. A plugin that fails is reported with
one warning. Plugins are loaded in the order of the names of their packages, so that of two that register the same name
always the same one fails.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from contnorm.errors import unknown

if TYPE_CHECKING:
    from torch import nn

Dim = Literal[1, 2, 3]
DIMS: tuple[Dim, ...] = (1, 2, 3)
# A class of layers, or a function that creates a layer: called with the number of channels and options by keyword.
LayerFactory = Callable[..., "nn.Module"]


@dataclass(frozen=True)
class Origin:
    """Where a component comes from.

    Attributes:
        package: Name of the distribution; empty for a component that a program registered in this process.
        version: Its version; empty if it is unknown.

    Example:
        >>> str(Origin("my-norms", "1.2")), str(Origin())
        ('my-norms 1.2', 'this process')
    """

    package: str = ""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.package} {self.version}".strip() or "this process"


BUILT_IN = Origin("contnorm")


@dataclass(frozen=True, slots=True)
class NormInfo:
    """A norm of the registry.

    Attributes:
        name: The name in ``create_norm``, ``convert_norm`` and ``--norm``.
        title: The name in the paper's tables.
        target: ``"module:Class"`` in `contnorm.norms`, where ``1d``, ``2d`` or ``3d`` is appended to the class name.
        summary: A one-line description for listings.
        citation: The publication of the method.
        preset: Constructor arguments that select this norm among those of its class.
        origin: The package that it comes from.
        grouped: Whether it accepts ``num_groups``.
        keeps_moments: Whether it has running moments.
        absorbs_activation: Whether it contains an activation, which replaces the one that follows it.
        standardizes_weights: Whether the weights of the convolutions before it are standardized.
        cannot: Conformance checks that it fails, each with the reason; see `contnorm.testing.check_norm`.
        layers: For a norm that is not of this package: its class or factory for each dimension. ``target`` is empty.
        is_registered: Whether it was added to the registry with `register_norm`.
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
    absorbs_activation: bool = False
    standardizes_weights: bool = False
    cannot: Mapping[str, str] = field(default_factory=dict)
    layers: Mapping[Dim, LayerFactory] = field(default_factory=dict)
    is_registered: bool = False


_STOCK = {"large_mean": "it calls torch's operator, so that the baseline is bit-exact with torch"}
_NO_PIVOT = {"large_mean": "it computes its moments without a pivot, as torch's batch norm does"}
_BUILT_IN_ACT = {"conversion": "it contains an activation, so it is for networks that are built with it"}
_PHAM = "Pham et al., Continual Normalization, ICLR 2022"
_GROUPED_MOMENTS: dict[str, Any] = {"grouped": True, "keeps_moments": True}


# fmt: off
_BUILT_INS = (
    NormInfo("none", "NoNL", "activation:NoNorm", "no normalization: the input as it is", _PHAM,
        cannot={"affine_parameters": "it has no parameters"}),
    NormInfo("bn", "BN", "batch:BatchNorm", "batch normalization; momentum=None averages all batches equally",
        "Ioffe and Szegedy, Batch Normalization, ICML 2015", keeps_moments=True, cannot=_STOCK),
    NormInfo("ln", "LN", "group:LayerNorm", "layer normalization over all channels and positions of a sample",
        "Ba et al., Layer Normalization, 2016", cannot=_STOCK),
    NormInfo("in", "IN", "group:InstanceNorm", "instance normalization: each channel of each sample by itself",
        "Ulyanov et al., Instance Normalization, 2016",
        cannot={**_STOCK, "rank2": "an (N, C) input has one value per instance, which normalizes to zero"}),
    NormInfo("gn", "GN", "group:GroupNorm", "group normalization: groups of channels of each sample",
        "Wu and He, Group Normalization, ECCV 2018", grouped=True, cannot=_STOCK),
    NormInfo("brn", "BRN", "batch:BatchRenorm",
        "batch renormalization: batch moments pulled to the running ones within limits",
        "Ioffe, Batch Renormalization, NeurIPS 2017", keeps_moments=True),
    NormInfo("sn", "SN", "switchable:SwitchNorm",
        "switchable normalization: a learned mixture of IN, LN and BN moments",
        "Luo et al., Differentiable Learning-to-Normalize, ICLR 2019", keeps_moments=True,
        cannot={"batch_norm_keys": "its two mixture weights are in no batch norm's checkpoint"}),
    NormInfo("cn", "CN", "continual:ContinualNorm",
        "continual normalization: group norm without affine, then batch norm", _PHAM, **_GROUPED_MOMENTS),
    NormInfo("bn_gn", "BN then GN", "continual:ContinualNorm",
        "reversed order: batch norm without affine, then group norm", _PHAM, {"order": "bn_gn"}, **_GROUPED_MOMENTS),
    NormInfo("cn_tied", "CN + tw", "continual:ContinualNorm",
        "continual normalization with one pair of weights used in both steps", _PHAM, {"tied": True},
        **_GROUPED_MOMENTS),
    NormInfo("bn_gn_tied", "BN then GN + tw", "continual:ContinualNorm",
        "reversed order with one pair of weights used in both steps", _PHAM, {"order": "bn_gn", "tied": True},
        **_GROUPED_MOMENTS),
    NormInfo("adab2n", "AdaB2N", "balanced:AdaptiveBalanceNorm",
        "batch norm with a learned balance of the tasks in the batch and a modified momentum",
        "Lyu et al., Overcoming Recency Bias of Normalization Statistics, NeurIPS 2023", keeps_moments=True,
        cannot={**_NO_PIVOT, "batch_norm_keys": "its balance of tasks is in no batch norm's checkpoint"}),
    NormInfo("tbbn", "TBBN", "balanced:TaskBalancedNorm",
        "task-balanced batch norm: parts of the stream samples, each with all memory samples",
        "Cha et al., Rebalancing Batch Normalization, CVPR 2023", keeps_moments=True,
        cannot={**_NO_PIVOT, "batch_norm_keys": "its number of tasks is in no batch norm's checkpoint"}),
    NormInfo("bnt", "BNT", "batch:BalancedBatchNorm",
        "BN Tricks: batch norm whose running moments are those of class-balanced batches",
        "Zhou et al., Diagnosing Batch Normalization in Class Incremental Learning, 2022", keeps_moments=True,
        cannot=_STOCK),
    NormInfo("iabn", "IABN", "robust:InstanceAwareBatchNorm",
        "instance-aware batch norm: corrects the moments for samples that differ from the batch",
        "Gong et al., NOTE, NeurIPS 2022", keeps_moments=True),
    NormInfo("rbn", "RBN", "robust:RobustBatchNorm",
        "robust batch norm: normalizes with a mixture of running and batch moments, and stores it",
        "Yuan et al., RoTTA, CVPR 2023", keeps_moments=True,
        cannot={"evaluation_uses_running_moments": "training stores the moments that it normalizes with, so evaluation "
            "of the same batch gives the same output"}),
    NormInfo("hbn", "HBN", "robust:HybridBatchNorm",
        "hybrid batch norm: normalizes with a learned mixture of running and batch moments",
        "Chen et al., Hybrid Batch Normalisation, ICML 2025", keeps_moments=True,
        cannot={"batch_norm_keys": "its shares of the batch are in no batch norm's checkpoint"}),
    NormInfo("evonorm_s0", "EvoNorm-S0", "activation:EvoNorm",
        "EvoNorm-S0: groups of each sample, with an activation that replaces the one that follows",
        "Liu et al., Evolving Normalization-Activation Layers, NeurIPS 2020", grouped=True, absorbs_activation=True,
        cannot={**_BUILT_IN_ACT,
            "large_mean": "it does not subtract the mean, which costs its gradients their precision"}),
    NormInfo("frn", "FRN", "activation:FilterResponseNorm",
        "filter response normalization with a thresholded linear unit in place of the activation",
        "Singh and Krishnan, Filter Response Normalization Layer, CVPR 2020", absorbs_activation=True,
        cannot={**_BUILT_IN_ACT,
            "rank2": "an (N, C) input has one value per channel, of which only the sign would remain"}),
    NormInfo("gn_ws", "GN + WS", "group:WSGroupNorm",
        "group normalization after convolutions with standardized weights",
        "Qiao et al., Micro-Batch Training with Weight Standardization, 2019", grouped=True, standardizes_weights=True,
        cannot=_STOCK),
    NormInfo("dyt", "DyT", "activation:DynamicTanh",
        "dynamic tanh: tanh(alpha x) with a learned alpha, without moments",
        "Zhu et al., Transformers without Normalization, CVPR 2025",
        cannot={"large_mean": "a large mean saturates tanh, and its gradients are then zero",
            "batch_norm_keys": "its alpha is in no batch norm's checkpoint"}),
)
# fmt: on

_NORMS: dict[str, NormInfo] = {info.name: info for info in _BUILT_INS}
NORMS: Mapping[str, NormInfo] = MappingProxyType(_NORMS)  # read-only view
_NAME = re.compile(r"[a-z][a-z0-9_-]*[a-z_]|[a-z]")


def find_norm(name: str) -> tuple[NormInfo, int | None]:
    """Look up a norm by name; return it, and the number of groups if the name ends in one.

    Args:
        name: A name in the registry, case-insensitive. The name of a grouped norm may end in the number of groups.

    Raises:
        ValueError: For an unknown name; the message suggests similar names.

    Example:
        >>> find_norm("cn8")[0].title, find_norm("cn8")[1]
        ('CN', 8)
        >>> find_norm("BN")[1] is None
        True
    """
    wanted = name.strip().lower()
    if wanted in NORMS:
        return NORMS[wanted], None
    numbered = re.fullmatch(r"([a-z][a-z0-9_-]*?)(?:(?<=\d)-)?([1-9]\d{0,8})", wanted)
    if numbered and numbered[1] in NORMS:
        info = NORMS[numbered[1]]
        if not info.grouped:
            raise ValueError(f"norm {name!r} ends in a number of groups, but {info.name!r} has no groups.")
        return info, int(numbered[2])
    if load_plugins():
        return find_norm(name)  # a plugin may have added it
    raise ValueError(f"{unknown('norm', name, NORMS)} A number of groups may follow, as in 'cn8'.")


def numbered_name(info: NormInfo, groups: object) -> str:
    """Return the name of a grouped norm with its number of groups, which `find_norm` understands.

    Example:
        >>> numbered_name(NORMS["cn"], 8), numbered_name(NORMS["evonorm_s0"], 8)
        ('cn8', 'evonorm_s0-8')
    """
    return f"{info.name}{'-' if info.name[-1].isdigit() else ''}{groups}"


def create_norm(name: str, num_features: int, *, dim: Dim = 2, **options: object) -> nn.Module:
    """Create a norm layer by name.

    Args:
        name: A name that `contnorm ls norms` lists, such as ``"cn"``, case-insensitive. The name of a grouped norm may
            end in the number of groups, as in ``"cn8"`` or ``"evonorm_s0-8"``.
        num_features: Number of channels.
        dim: 1 for (N, C) and (N, C, L) input, 2 for (N, C, H, W), 3 for (N, C, D, H, W).
        **options: Further arguments of that norm's class, such as ``num_groups``, ``eps`` or ``momentum``.
            ``channels_per_group`` may be given instead of ``num_groups``.

    Raises:
        ValueError: For an unknown name, or an option that contradicts it.

    Example:
        >>> create_norm("cn", 64, num_groups=8)
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> create_norm("gn32", 64, dim=1)
        GroupNorm1d(64, num_groups=32, eps=1e-05)
        >>> create_norm("gn", 64, channels_per_group=16)
        GroupNorm2d(64, num_groups=4, eps=1e-05)
    """
    info, options = resolve_norm(name, options)
    return build_norm(info, num_features, dim, options)


def resolve_norm(norm: str | LayerFactory | NormInfo, options: dict[str, object]) -> tuple[NormInfo, dict[str, object]]:
    """Return a norm by name, class or factory, and the options with the number of groups from the name."""
    if isinstance(norm, NormInfo):
        return norm, options
    if not isinstance(norm, str):
        return describe_norm(norm), options
    info, groups = find_norm(norm)
    if groups is None:
        return info, options
    if options.get("num_groups", groups) != groups:
        raise ValueError(f"norm {norm!r} has {groups} groups, but num_groups={options['num_groups']!r} is given too.")
    return info, {**options, "num_groups": groups}


def with_num_groups(info: NormInfo, num_features: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a layer with ``num_groups`` in place of ``channels_per_group``."""
    size = options.get("channels_per_group")
    if not info.grouped or size is None:
        return dict(options)
    if "num_groups" in options:
        raise ValueError(
            f"channels_per_group={size} and num_groups={options['num_groups']} are given; give one of them."
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or num_features % size:
        raise ValueError(f"channels_per_group={size!r} does not divide the {num_features} channels. Use a divisor.")
    others = {name: value for name, value in options.items() if name != "channels_per_group"}
    return {**others, "num_groups": num_features // size}


def build_norm(info: NormInfo, num_features: int, dim: Dim, options: Mapping[str, object]) -> nn.Module:
    """Create a layer of a norm."""
    options = with_num_groups(info, num_features, options)
    check_preset(info, options)
    layer = norm_class(info, dim)(num_features, **{**options, **info.preset})
    if info.layers:  # for `detect_norm`: one class may serve all dimensions, and a factory may return any class
        vars(layer)["_contnorm_dim"] = dim
    if info.is_registered:
        vars(layer)["_contnorm_norm"] = info.name
    return layer


def check_preset(info: NormInfo, options: Mapping[str, object]) -> None:
    """Raise for an option that contradicts the presets of the norm."""
    for key, value in info.preset.items():
        if options.get(key, value) != value:
            raise ValueError(f"{key}={options[key]!r} contradicts norm {info.name!r}, which has {key}={value!r}.")


def norm_class(info: NormInfo, dim: Dim) -> LayerFactory:
    """Return the class (or the factory) of a norm for 1d, 2d or 3d input."""
    if dim not in (info.layers or DIMS):
        raise ValueError(f"norm {info.name!r} has no layer for {dim}d input, only for {[*(info.layers or DIMS)]}.")
    if info.layers:
        return info.layers[dim]
    module, _, stem = info.target.partition(":")
    cls: type[nn.Module] = getattr(importlib.import_module(f"contnorm.norms.{module}"), f"{stem}{dim}d")
    return cls


def layer_parameters(factory: LayerFactory) -> dict[str, inspect.Parameter]:
    """Return the arguments that a class or factory takes by keyword, after the number of channels.

    Example:
        >>> def scaled_norm(channels, *, temperature=1.0): ...
        >>> list(layer_parameters(scaled_norm))
        ['temperature']
    """
    parameters = list(inspect.signature(factory).parameters.values())[1:]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in parameters if parameter.kind in by_keyword}


def accepts_any_option(factory: LayerFactory) -> bool:
    """Whether a class or factory has an argument ``**options``."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(factory).parameters.values())


# --- norms of other packages and programs --------------------------------------------------------------------------


def describe_norm(
    norm: LayerFactory | Mapping[Dim, LayerFactory], name: str | None = None, keeps_moments: bool | None = None
) -> NormInfo:
    """Describe a class, a factory, or one of them for each dimension, without registering it.

    Args:
        norm: The class or factory, or a dict of them.
        name: Its name. Default: that of the class or function.
        keeps_moments: Whether it has running moments. Default: whether a new layer has a buffer ``running_mean``.

    Example:
        >>> info = describe_norm(nn.BatchNorm2d)
        >>> info.name, sorted(info.layers), info.keeps_moments, info.grouped
        ('BatchNorm2d', [2], True, False)
    """
    layers = dict(norm) if isinstance(norm, Mapping) else dict.fromkeys(_dims_of(norm), norm)
    if not layers or not set(layers) <= set(DIMS) or any(not callable(layer) for layer in layers.values()):
        raise TypeError(f"{norm!r} is no norm. Give a class of modules, a function, or a dict of them for 1, 2, 3.")
    first = layers[min(layers)]
    label = name or str(getattr(first, "__name__", type(first).__name__))
    doc = (vars(first).get("__doc__") if isinstance(first, type) else first.__doc__) or ""  # not of a base class
    info = NormInfo(
        name=label,
        title=label,
        target="",
        summary=doc.strip().partition("\n")[0].rstrip(".") or "no description",
        citation="",
        grouped=all("num_groups" in layer_parameters(factory) for factory in layers.values()),
        keeps_moments=bool(keeps_moments),
        cannot=dict(getattr(first, "cannot", {})),
        layers=layers,
        origin=Origin(),
    )
    if keeps_moments is not None:
        return info
    with importlib.import_module("torch").random.fork_rng(devices=[]):  # a layer may draw its initial values
        layer = build_norm(info, 64, min(layers), {})
    return replace(info, keeps_moments=getattr(layer, "running_mean", None) is not None)


def _dims_of(layer: LayerFactory) -> tuple[Dim, ...]:
    """Return the dimensions of a class: one if it derives from a class of torch or this package for one, or all."""
    for base in getattr(layer, "__mro__", ()):
        dim = re.fullmatch(r"\w+Norm([123])d", base.__name__)
        if dim and base.__module__.partition(".")[0] in ("torch", "contnorm"):
            return (cast(Dim, int(dim[1])),)
    return DIMS


def register_norm(
    name: str,
    layer: LayerFactory | Mapping[Dim, LayerFactory],
    *,
    title: str | None = None,
    summary: str | None = None,
    citation: str | None = None,
    grouped: bool | None = None,
    keeps_moments: bool | None = None,
    cannot: Mapping[str, str] | None = None,
    exist_ok: bool = False,
) -> None:
    """Add a norm under a name, for this process: in ``create_norm``, ``convert_norm`` and all other functions.

    Layers are created as ``layer(num_features, **options)``. `contnorm.testing.check_norm` checks that a norm behaves
    as a norm layer of torch does.

    Args:
        name: The new name: lower-case letters, digits, ``_`` and ``-``; it does not end in a digit.
        layer: A class of `torch.nn.Module`, or a function that returns a layer. A subclass of ``BatchNorm2d`` is used
            for 2d input, and one of ``BatchNorm1d`` or ``BatchNorm3d`` likewise; any other for 1d, 2d and 3d input. Or
            a dict with one of them for each dimension, as ``{1: MyNorm1d, 2: MyNorm2d}``.
        title: The name in tables. Default: the name.
        summary: A one-line description. Default: the first line of the docstring.
        citation: The publication of the method.
        grouped: Whether it accepts ``num_groups``. Default: whether the constructor has this argument.
        keeps_moments: Whether it has running moments. Default: whether a new layer has a buffer ``running_mean``.
        cannot: Checks of `contnorm.testing.check_norm` that it fails, each with the reason. Default: the attribute
            ``cannot`` of the class.
        exist_ok: Whether to replace a norm that was registered under this name.

    Raises:
        ValueError: If the name is invalid or taken.
        TypeError: If the layer is neither a class of modules nor a function. An error of creating a layer with 64
            channels is raised as it is.

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
        >>> register_norm("rms", RMSNorm)
        >>> create_norm("rms", 64, eps=1e-3).eps
        0.001
        >>> unregister_norm("rms")
    """
    if not _NAME.fullmatch(name) or (name in _NORMS and not _NORMS[name].is_registered):
        raise ValueError(
            f"register_norm: {name!r} can't be used: lower-case letters, digits, '_' and '-' that start with a letter, "
            f"do not end in a digit, and are no norm of contnorm."
        )
    if name in _NORMS and not exist_ok:
        raise ValueError(f"register_norm: {name!r} is already registered. Use another name, or exist_ok=True.")
    given = {"title": title, "summary": summary, "citation": citation, "grouped": grouped, "cannot": cannot}
    facts: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    add_norm(replace(describe_norm(layer, name, keeps_moments), origin=current_origin(), **facts))


def add_norm(info: NormInfo) -> None:
    """Add a norm to the registry as it is, such as one of another process; it replaces one of the same name."""
    _NORMS[info.name] = replace(info, is_registered=True)


def unregister_norm(name: str) -> None:
    """Remove a norm that was registered with `register_norm`. Norms of this package can't be removed.

    Example:
        >>> register_norm("mine", lambda channels: nn.GroupNorm(2, channels))
        >>> unregister_norm("mine")
        >>> "mine" in NORMS
        False
    """
    if name not in _NORMS or not _NORMS[name].is_registered:
        raise ValueError(f"unregister_norm: {name!r} is not the name of a registered norm.")
    del _NORMS[name]


# --- plugins --------------------------------------------------------------------------------------------------------

_origin = Origin()  # the plugin that is being loaded
_is_loaded = False


def current_origin() -> Origin:
    """Return the origin of a component that is registered now: the plugin that is being loaded, or this process."""
    return _origin


def load_plugins() -> bool:
    """Load the plugins of all installed packages; return False if that was done before."""
    global _is_loaded, _origin
    if _is_loaded:
        return False
    _is_loaded = True  # first: a plugin that uses an unknown name must not start this again
    for entry in sorted(entry_points(group="contnorm.plugins"), key=lambda entry: (str(_origin_of(entry)), entry.name)):
        _origin = _origin_of(entry)
        try:
            entry.load()()
        except (Exception, SystemExit) as error:  # plugins raise errors of any type
            logging.getLogger("contnorm").warning(
                f"plugin {entry.name!r} of {_origin}: can't be loaded ({type(error).__name__}: "
                f"{' '.join(str(error).split())}). Update or uninstall the package."
            )
        finally:
            _origin = Origin()
    return True


def _origin_of(entry: EntryPoint) -> Origin:
    return Origin(entry.dist.name, entry.dist.version) if entry.dist is not None else Origin(entry.module)
