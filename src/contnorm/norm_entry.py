"""Description of a norm, creation of its layers, and the description of classes and functions of other packages.

This module does not import torch; the module of a layer is imported when the layer is created.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, cast

from contnorm.plugins import BUILT_IN, Origin

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "DIMS",
    "Dim",
    "LayerFactory",
    "NormEntry",
    "accepted_options",
    "accepts_any_option",
    "build_norm",
    "check_options",
    "describe_norm",
    "layer_parameters",
    "needs_joint_forward",
    "needs_tags",
    "norm_class",
]

Dim = Literal[1, 2, 3]
DIMS: tuple[Dim, ...] = (1, 2, 3)
# A class of layers, or a function that creates a layer: called with the number of channels and options by keyword.
LayerFactory = Callable[..., "nn.Module"]


@dataclass(frozen=True, slots=True)
class NormEntry:
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


def build_norm(spec: NormEntry, num_features: int, dim: Dim, options: Mapping[str, object], caller: str) -> nn.Module:
    """Check the options and create the layer that a spec describes."""
    factory = norm_class(spec, dim, caller)
    check_options(spec, factory, options, caller)
    if not spec.layers:
        return factory(num_features, **{**options, **spec.preset})
    return _build_user_layer(spec, factory, num_features, dim, options, caller)


def _build_user_layer(
    spec: NormEntry, factory: LayerFactory, num_features: int, dim: Dim, options: Mapping[str, object], caller: str
) -> nn.Module:
    try:
        layer = factory(num_features, **options)
    except Exception as error:
        if isinstance(error, importlib.import_module("contnorm.checks").GroupsError):
            raise  # the caller suggests another number of groups
        arguments = "".join(f", {key}={value!r}" for key, value in options.items())
        raise ValueError(
            f"{caller}: norm {spec.name!r} can't be created with ({num_features}{arguments}): {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if not isinstance(layer, _module_class()):
        raise ValueError(
            f"{caller}: norm {spec.name!r} must create a torch.nn.Module, and created {_brief(layer)} of type "
            f"{type(layer).__name__}."
        )
    # For `detect_norm`: one class may serve all dimensions, and a factory may return a layer of any class.
    vars(layer)["_contnorm_dim"] = dim
    if spec.is_registered:
        vars(layer)["_contnorm_norm"] = spec.name
    return layer


def check_options(spec: NormEntry, factory: LayerFactory, options: Mapping[str, object], caller: str) -> None:
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


def norm_class(spec: NormEntry, dim: Dim, caller: str = "create_norm") -> LayerFactory:
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


def needs_joint_forward(spec: NormEntry) -> bool:
    """Whether a norm is defined only for stream and memory samples in one forward pass; see `contnorm.tags`.

    Tables use it to mark combinations that are not defined. It imports the module of the layer.

    Example:
        >>> from contnorm.registry import NORMS
        >>> needs_joint_forward(NORMS["tbbn"]), needs_joint_forward(NORMS["bn"])
        (True, False)
    """
    return _declares(spec, "needs_joint_forward")


def needs_tags(spec: NormEntry) -> bool:
    """Whether a norm reads tags of the batch in training; see `contnorm.tags`. It imports the module of the layer.

    Example:
        >>> from contnorm.registry import NORMS
        >>> needs_tags(NORMS["adab2n"]), needs_tags(NORMS["bn"])
        (True, False)
    """
    return _declares(spec, "needs_tags")


def _declares(spec: NormEntry, attribute: str) -> bool:
    """Whether the layer of a norm sets an attribute to True."""
    factory = norm_class(spec, min(spec.layers) if spec.layers else 2)
    return bool(getattr(factory, attribute, False))


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


# --- classes and functions of other packages and programs ---------------------------------------------------------

_TORCH_DIMS = re.compile(r"(?:Lazy)?(?:BatchNorm|InstanceNorm)([123])d")
_PROBED_CHANNELS = (64, 60)  # a norm may need a multiple of 32 or, more rarely, of another number


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
) -> NormEntry:
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
    spec = NormEntry(
        name=label,
        title=title or label,
        target="",
        summary=summary or _first_line(first) or "no description",
        citation=citation,
        grouped=accepts_groups if grouped is None else grouped,
        cannot=dict(declared),
        layers=layers,
        origin=Origin(),
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
            f"every layer of a network needs its own norm."
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


def _new_layer_has_moments(spec: NormEntry, caller: str) -> bool:
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
