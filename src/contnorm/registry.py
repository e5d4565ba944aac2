"""Registry of all norms, and creation of norm layers by name.

This module does not import torch, so that listing the norms is fast; the module of a layer is imported when the layer
is created. Code that handles all norms (`create_norm`, the converter, the conformance tests, the benchmarks) iterates
over the registry. A norm added here, or registered with `register_norm`, is available in all of them.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from contnorm.plugins import BUILT_IN, Origin, load_plugins

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "NORMS",
    "Dim",
    "NormSpec",
    "accepted_options",
    "accepts_any_option",
    "build_norm",
    "check_options",
    "create_norm",
    "describe_norm",
    "find_norm",
    "layer_parameters",
    "norm_class",
    "norm_names",
    "register_norm",
    "register_spec",
    "resolve_norm",
    "unregister_norm",
]

Dim = Literal[1, 2, 3]
DIMS: tuple[Dim, ...] = (1, 2, 3)
# A class of layers, or a function that creates a layer: called with the number of channels and options by keyword.
LayerFactory = Callable[..., "nn.Module"]
_F = TypeVar("_F", bound=Callable[..., Any])


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
        cannot: Conformance checks that it fails, each with the reason; see `contnorm.testing.check_norm`.
        layers: For a norm that is not of this package: its class or factory for each dimension. ``target`` is empty.
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
    layers: Mapping[Dim, LayerFactory] = field(default_factory=dict)


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
            cannot={"affine_parameters": "it has no parameters"},
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


_BUILT_IN = frozenset(_NORMS)


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
    numbered = re.fullmatch(r"([a-z][a-z0-9_-]*?)(\d+)", wanted)
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
    stems = {n: s.target.partition(":")[2].lower() for n, s in NORMS.items() if s.target and not s.preset}
    matches = [name for name, stem in stems.items() if stem.startswith(prefix)]
    return matches if len(matches) == 1 and len(prefix) > 3 else []


def _listed(grouped: bool = False) -> str:
    return ", ".join(name for name, spec in NORMS.items() if spec.grouped or not grouped)


def create_norm(name: str, num_features: int, *, dim: Dim = 2, **options: object) -> nn.Module:
    """Create a norm layer by name.

    Args:
        name: One of ``none bn ln in gn brn sn cn bn_gn cn_tied bn_gn_tied``, case-insensitive, or the name of a
            registered norm. The name of a grouped norm may end in the number of groups, as in ``"cn8"``.
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
    norm: str | LayerFactory | NormSpec, options: dict[str, object], caller: str
) -> tuple[NormSpec, dict[str, object]]:
    """Return the spec of a norm by name, class or factory, and the options with the number of groups from the name."""
    if isinstance(norm, NormSpec):
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


def build_norm(spec: NormSpec, num_features: int, dim: Dim, options: Mapping[str, object], caller: str) -> nn.Module:
    """Check the options and create the layer that a spec describes."""
    factory = norm_class(spec, dim, caller)
    check_options(spec, factory, options, caller)
    if not spec.layers:
        return factory(num_features, **{**options, **spec.preset})
    return _build_user_layer(spec, factory, num_features, dim, options, caller)


def _build_user_layer(
    spec: NormSpec, factory: LayerFactory, num_features: int, dim: Dim, options: Mapping[str, object], caller: str
) -> nn.Module:
    try:
        layer = factory(num_features, **options)
    except ValueError:  # such as a number of groups that does not divide the channels
        raise
    except Exception as error:
        given = "".join(f", {key}={value!r}" for key, value in options.items())
        raise ValueError(
            f"{caller}: norm {spec.name!r} can't be created with ({num_features}{given}): {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if not isinstance(layer, _module_class()):
        raise ValueError(
            f"{caller}: norm {spec.name!r} must create a torch.nn.Module, and created {_brief(layer)} of type "
            f"{type(layer).__name__}."
        )
    # For `detect_norm`: one class may serve all dimensions, and a factory may return a layer of any class.
    vars(layer)["_contnorm_dim"] = dim
    if _NORMS.get(spec.name) is spec:
        vars(layer)["_contnorm_norm"] = spec.name
    return layer


def check_options(spec: NormSpec, factory: LayerFactory, options: Mapping[str, object], caller: str) -> None:
    """Raise for an option that the class does not accept, or that contradicts the presets of the spec."""
    allowed = accepted_options(factory)
    takes_any = accepts_any_option(factory)
    for key, value in options.items():
        if key in spec.preset and spec.preset[key] != value:
            raise ValueError(
                f"{caller}: {key}={value!r} contradicts the norm {spec.name!r}, which has {key}={spec.preset[key]!r}."
            )
        if key not in allowed and not takes_any:
            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            use = f"Use {', '.join(allowed)}." if allowed else "It accepts no options."
            raise ValueError(f"{caller}: norm {spec.name!r} does not accept {key!r}.{hint} {use}")


def norm_class(spec: NormSpec, dim: Dim, caller: str = "create_norm") -> LayerFactory:
    """Return the class (or the factory) of a norm for 1d, 2d or 3d input."""
    if dim not in DIMS:
        raise ValueError(
            f"{caller}: dim={dim!r} must be 1, 2 or 3: the number of spatial dimensions (1 also for none)."
        )
    if spec.layers:
        if dim not in spec.layers:
            dims = " and ".join(f"{known}d" for known in sorted(spec.layers))
            raise ValueError(f"{caller}: norm {spec.name!r} has no layer for {dim}d input, only for {dims}.")
        return spec.layers[dim]
    module, _, stem = spec.target.partition(":")
    cls: type[nn.Module] = getattr(importlib.import_module(module), f"{stem}{dim}d")
    return cls


def accepted_options(factory: LayerFactory) -> tuple[str, ...]:
    """Return the names of the arguments of a class or factory, without the first one, the number of channels."""
    return tuple(layer_parameters(factory))


def layer_parameters(factory: LayerFactory) -> dict[str, inspect.Parameter]:
    """Return the arguments that a class or factory takes by keyword, after the number of channels.

    Example:
        >>> def scaled_norm(channels, *, temperature=1.0): ...
        >>> list(layer_parameters(scaled_norm))
        ['temperature']
    """
    parameters = list(_signature(factory).values())[1:]
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in parameters if parameter.kind in by_keyword}


def accepts_any_option(factory: LayerFactory) -> bool:
    """Whether a class or factory has an argument ``**options``."""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in _signature(factory).values())


def _signature(factory: LayerFactory) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(factory).parameters


# --- norms of other packages and programs --------------------------------------------------------------------------

_NAME = re.compile(r"[a-z][a-z0-9_-]*[a-z_]|[a-z]")
_TORCH_DIMS = re.compile(r"(?:Lazy)?(?:BatchNorm|InstanceNorm)([123])d")
_PROBED_CHANNELS = (64, 60)  # a norm may need a multiple of 32 or, more rarely, of another number


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
    if layer is None and layers is None:

        def decorate(decorated: _F) -> _F:
            register_norm(
                name,
                decorated,
                title=title,
                summary=summary,
                citation=citation,
                grouped=grouped,
                keeps_moments=keeps_moments,
                cannot=cannot,
                exist_ok=exist_ok,
            )
            return decorated

        return decorate
    if layer is not None and layers is not None:
        raise ValueError("register_norm: give layer or layers, not both.")
    spec = describe_norm(
        cast("LayerFactory | Mapping[Dim, LayerFactory]", layers if layer is None else layer),
        name,
        caller="register_norm",
        title=title,
        summary=summary,
        citation=citation,
        grouped=grouped,
        keeps_moments=keeps_moments,
        cannot=cannot,
    )
    register_spec(spec)
    return layer if layer is not None else layers


def register_spec(spec: NormSpec) -> None:
    """Add a norm to the registry as it is, such as one of another process; it replaces one of the same name."""
    _NORMS[spec.name] = spec


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


def describe_norm(
    norm: LayerFactory | Mapping[Dim, LayerFactory],
    name: str | None = None,
    *,
    caller: str,
    title: str | None = None,
    summary: str | None = None,
    citation: str = "",
    grouped: bool | None = None,
    keeps_moments: bool | None = None,
    cannot: Mapping[str, str] | None = None,
) -> NormSpec:
    """Return the spec of a class, a factory, or one of them for each dimension, without registering it.

    Example:
        >>> spec = describe_norm(nn.BatchNorm2d, caller="demo")
        >>> spec.name, sorted(spec.layers), spec.keeps_moments, spec.grouped
        ('BatchNorm2d', [2], True, False)
    """
    layers = _layers_by_dim(norm, caller)
    first = layers[min(layers)]
    label = name or str(getattr(first, "__name__", type(first).__name__))
    accepts_groups = all("num_groups" in accepted_options(factory) for factory in layers.values())
    if grouped and not accepts_groups:
        raise ValueError(f"{caller}: norm {label!r} is registered as grouped, but does not accept num_groups.")
    declared = cannot if cannot is not None else getattr(first, "cannot", {})
    if not isinstance(declared, Mapping) or not all(isinstance(text, str) for text in (*declared, *declared.values())):
        raise TypeError(f"{caller}: norm {label!r}: cannot={declared!r} must map names of checks to reasons.")
    spec = NormSpec(
        name=label,
        title=title or label,
        target="",
        summary=summary or _first_line(first) or "no description",
        citation=citation,
        grouped=accepts_groups if grouped is None else grouped,
        cannot=dict(declared),
        layers=layers,
    )
    if keeps_moments is None:
        keeps_moments = _new_layer_has_moments(spec, caller)
    return replace(spec, keeps_moments=keeps_moments)


def _first_line(layer: LayerFactory) -> str:
    """Return the first line of a docstring, which is not inherited from a base class; empty if there is none."""
    text = vars(layer).get("__doc__") if isinstance(layer, type) else getattr(layer, "__doc__", None)
    return text.strip().splitlines()[0].rstrip(".") if isinstance(text, str) and text.strip() else ""


def _layers_by_dim(norm: LayerFactory | Mapping[Dim, LayerFactory], caller: str) -> dict[Dim, LayerFactory]:
    if isinstance(norm, Mapping):
        if not norm or not set(norm) <= set(DIMS):
            raise ValueError(f"{caller}: layers={dict(norm)!r} must have a class or factory for 1, 2 or 3.")
        for layer in norm.values():
            _check_layer(layer, caller)
        return {dim: norm[dim] for dim in DIMS if dim in norm}
    _check_layer(norm, caller)
    return dict.fromkeys(_dims_of(norm), norm)


def _check_layer(layer: object, caller: str) -> None:
    if isinstance(layer, _module_class()):
        raise TypeError(
            f"{caller}: {type(layer).__name__} is given as an object. Give its class, or a function that creates one: "
            f"every layer of a network needs a norm of its own."
        )
    if not callable(layer) or (isinstance(layer, type) and not issubclass(layer, _module_class())):
        raise TypeError(
            f"{caller}: {_brief(layer)} is not a norm. Give a name, a class of torch.nn.Module, or a function "
            f"(num_features, **options) that returns a layer."
        )
    try:
        parameters = _signature(layer)
    except (TypeError, ValueError) as error:  # a built-in function
        raise TypeError(f"{caller}: {_brief(layer)} has no signature. Wrap it in a Python function.") from error
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in list(parameters.values())[1:] if p.default is p.empty and p.kind not in optional]
    first = next(iter(parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD) or required:
        also = f", and {required[0]!r} has no default" if required else ""
        label = getattr(layer, "__name__", type(layer).__name__)
        raise TypeError(
            f"{caller}: {label} must be callable with the number of channels alone{also}. Give a function such as "
            f"lambda num_features: {label}(...)."
        )


def _dims_of(layer: LayerFactory) -> tuple[Dim, ...]:
    """Return the dimensions of a class: one if it derives from a class of torch or this package for one, or all."""
    for base in getattr(layer, "__mro__", ()):
        if base.__module__.partition(".")[0] in ("torch", "contnorm"):
            named = _TORCH_DIMS.fullmatch(base.__name__) or re.fullmatch(r"\w+Norm([123])d", base.__name__)
            if named:
                return (cast(Dim, int(named[1])),)
    return DIMS


def _new_layer_has_moments(spec: NormSpec, caller: str) -> bool:
    torch = importlib.import_module("torch")
    layer, failure = None, None
    with torch.random.fork_rng(devices=[]):  # a layer may draw its initial values
        for channels in _PROBED_CHANNELS:
            try:
                layer = build_norm(spec, channels, min(spec.layers), {}, caller)
                break
            except ValueError as error:
                failure = failure or error
    if layer is None and failure is not None:
        raise failure
    return isinstance(getattr(layer, "running_mean", None), torch.Tensor)


def _module_class() -> type[nn.Module]:
    cls: type[nn.Module] = importlib.import_module("torch.nn").Module
    return cls


def _brief(value: object, most: int = 60) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}..."
