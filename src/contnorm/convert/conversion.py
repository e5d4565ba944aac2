"""Replace the normalization layers of a model.

The new layer reuses the Parameter and buffer objects of the old one wherever both have them. An optimizer created
before the conversion therefore continues to train them, and converting a model and converting it back restores its
output bit for bit. All new layers are built before the model is changed: if one layer cannot be converted, the model
stays unchanged.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from torch import Tensor, nn

from contnorm.checks import auto_groups, check_model, nearest_groups
from contnorm.convert.detect import (
    DetectedNorm,
    TreatAs,
    UnsupportedNorm,
    detect_norm,
    drop_and_act,
    holds_moments,
)
from contnorm.errors import GroupsError
from contnorm.moments.freeze import FREEZING_HOOKS, freeze_stats, is_frozen
from contnorm.norms.activation import ActivationNorm
from contnorm.norms.base import MomentNorm, NormLayer
from contnorm.norms.continual import SyncContinualNorm
from contnorm.norms.weight_standardization import WSGroupNorm, standardize_convolutions, unstandardize
from contnorm.registry import (
    NORMS,
    Dim,
    LayerFactory,
    NormInfo,
    build_norm,
    check_preset,
    layer_parameters,
    norm_class,
    resolve_norm,
)

__all__ = [
    "Filter",
    "NormInModel",
    "build_like",
    "build_synced",
    "convert_norm",
    "dim_of_convolutions",
    "has_synced_form",
    "located",
    "norm_layers",
    "replacement_obstacles",
    "select_layers",
    "swap_modules",
]

Choice = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Filter = Choice | Iterable[Choice]


@dataclass(frozen=True, eq=False)
class NormInModel:
    """A norm layer of a model: its first name in the model, what it is, and a tensor near it in the model."""

    name: str
    module: nn.Module
    detected: Any  # a DetectedNorm, an UnsupportedNorm, or None for a layer made by a user's function
    near: Tensor | None


def convert_norm(
    model: nn.Module,
    to: str | LayerFactory | NormInfo,
    *,
    only: Filter | None = None,
    skip: Filter | None = None,
    dim: Dim | None = None,
    treat_as: TreatAs = MappingProxyType({}),
    **options: object,
) -> nn.Module:
    """Replace the norm layers of a model with another norm, in place.

    Works on any module tree, including nested modules, shared layers (which stay shared) and models of torchvision,
    timm and other libraries. Parameters (the same objects), running moments, eps, momentum, device, dtype, training
    mode and ``requires_grad`` are kept. State that the new norm does not have is dropped; state that the old norm did
    not have is initialized.

    Layers of torch and of this package are known, and so are those of `contnorm.convert.detect`. Subclasses of these
    with a ``forward`` of their own may compute anything: they are refused unless ``treat_as`` says what they compute.

    Norms that contain an activation (``evonorm_s0``, ``frn``) are for networks that are built with them. A model is
    converted to them only with ``apply_act=False``: without their activation, and with those of the model.
    ``gn_ws`` standardizes the weights of all convolutions of the model, until no layer is ``gn_ws`` any more.

    Args:
        model: The model. If it is itself a norm layer, its replacement is returned.
        to: The name of the new norm, as in ``create_norm``; or a class of layers, or a function
            ``(num_features, **options)`` that returns one. See `register_norm` to convert from such a norm, too.
        only: The layers to convert: a name or pattern (``"layer1.*"``), a class, a function
            ``f(name, module) -> bool``, or a list of these, at least one of which must match.
        skip: The layers not to convert, in the same forms.
        dim: The dimension of layers whose class does not define it (``GroupNorm``, ``SyncBatchNorm``). By default,
            that of the model's convolutions.
        treat_as: Classes of other libraries by the norm that they compute, such as ``{MyBatchNorm: "bn"}``.
        **options: Arguments of the new norm, such as ``num_groups``, ``eps`` or ``momentum``. They override the
            options of the old layer. ``num_groups="auto"`` gives each layer the largest divisor of its number of
            channels, up to 32, that leaves at least 2 channels in a group (8 for (N, C) input), or one group if there
            is no such divisor.

    Returns:
        The model.

    Raises:
        ValueError: If there is nothing to convert, or if a layer cannot be converted. The message contains the
            layer's name and the reason, and the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> weight = model[1].weight
        >>> convert_norm(model, "cn", num_groups=8)[1]
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> model[1].weight is weight
        True
    """
    entry, options = resolve_norm(to, options)
    check_model(model, "convert_norm")
    layers = select_layers(model, only, skip, "convert_norm", treat_as=treat_as)
    others = [layer.name for layer in layers if not isinstance(layer.module, ActivationNorm)]
    if entry.absorbs_activation and "apply_act" not in options and others:
        raise ValueError(
            f"convert_norm: {entry.name!r} contains an activation, and layer {others[0]!r} does not. Build the network "
            f"with this norm, or give apply_act=False to use the activations of the model. The model is unchanged."
        )
    fallback = dim or dim_of_convolutions(model)
    replace = {}
    for layer in layers:
        try:
            replace[layer.module] = _build_replacement(layer, entry, options, fallback)
        except GroupsError as error:
            suggestion = nearest_groups([layer.detected.channels for layer in layers], error.num_groups)
            raise GroupsError(
                f"convert_norm: {located(layer)}: num_groups={error.num_groups} does not divide the {error.channels} "
                f"channels. Use num_groups={suggestion}, which divides those of every layer, or "
                f"num_groups='auto'. The model is unchanged.",
                error.num_groups,
                error.channels,
                suggestion,
            ) from error
        except ValueError as error:
            raise ValueError(f"convert_norm: {located(layer)}: {error} The model is unchanged.") from error
    if entry.standardizes_weights:
        standardize_convolutions(model, next(iter(cast("dict[Any, WSGroupNorm]", replace).values())).weight_eps)
    model = swap_modules(model, replace)
    if not any(isinstance(module, WSGroupNorm) for module in model.modules()):
        for module in model.modules():
            unstandardize(module)
    return model


def located(layer: NormInModel) -> str:
    """Return the name and the class of a layer, for a message."""
    return f"layer {layer.name!r} ({type(layer.module).__name__})"


# --- selection ------------------------------------------------------------------------------------------------------


def norm_layers(model: nn.Module, treat_as: TreatAs = MappingProxyType({})) -> Iterator[NormInModel]:
    """Iterate over the norm layers of a model, without layers that are inside of others."""
    inside: set[nn.Module] = set()
    near = next(_floating_tensors(model.modules()), None)
    for name, module in model.named_modules():
        near = next(_floating_tensors([module]), near)
        detected = None if module in inside else detect_norm(module, treat_as)
        if isinstance(detected, DetectedNorm):
            inside |= set(module.modules())
        if detected is not None or ("_contnorm_dim" in vars(module) and module not in inside):
            yield NormInModel(name, module, detected, near)


def select_layers(
    model: nn.Module,
    only: Filter | None,
    skip: Filter | None,
    caller: str,
    wants: Callable[[nn.Module, DetectedNorm], bool] = lambda module, detected: True,
    treat_as: TreatAs = MappingProxyType({}),
) -> list[NormInModel]:
    """Return the norm layers selected by ``wants`` and the filters; raise if one of them cannot be replaced."""
    obstacles = replacement_obstacles(model)
    layers: list[NormInModel] = []
    refused: dict[str, list[str]] = {}  # names by class and reason
    names: list[str] = []
    for layer in norm_layers(model, treat_as):
        name, module, detected = layer.name, layer.module, layer.detected
        names.append(name)
        if isinstance(detected, DetectedNorm) and not wants(module, detected):
            continue
        if not _matches("*" if only is None else only, name, module) or _matches(skip or (), name, module):
            continue
        if isinstance(detected, UnsupportedNorm) or module in obstacles:
            reason = detected.reason if isinstance(detected, UnsupportedNorm) else obstacles[module]
            refused.setdefault(f"({type(module).__name__}): {reason}", []).append(repr(name))
        elif detected is not None:
            layers.append(layer)
    if refused:
        listed = "; ".join(f"{', '.join(names[:3])}{' ...' * (len(names) > 3)} {why}" for why, names in refused.items())
        raise ValueError(
            f"{caller}: can't convert {listed}. Remove the cause, or exclude the layers with skip=. The model is "
            f"unchanged."
        )
    _check_names([only, skip], names, caller)
    if not layers:
        raise ValueError(
            f"{caller}: nothing to convert in {type(model).__name__}: none of its {len(names)} norm layers needs it, "
            f"or only= and skip= exclude them. See contnorm.summarize(model)."
        )
    return layers


def _matches(filter_: Filter, name: str, module: nn.Module) -> bool:
    if isinstance(filter_, str):
        return fnmatch.fnmatchcase(name, filter_)
    if isinstance(filter_, type):
        return isinstance(module, filter_)
    if callable(filter_):
        return filter_(name, module)
    return any(_matches(choice, name, module) for choice in filter_)


def _check_names(filters: Sequence[Filter | None], names: Sequence[str], caller: str) -> None:
    """Raise for a name that no norm layer has, because a misspelt name would change which layers are converted."""
    for filter_ in filters:
        choices = [filter_] if isinstance(filter_, str) else filter_ if isinstance(filter_, Iterable) else ()
        for name in choices:
            if isinstance(name, str) and name not in names and not any(sign in name for sign in "*?["):
                raise ValueError(
                    f"{caller}: {name!r} is not the name of a norm layer to convert; for the layers inside of a module "
                    f"write '{name}.*'. See contnorm.summarize(model). The model is unchanged."
                )


def replacement_obstacles(model: nn.Module) -> dict[nn.Module, str]:
    """Return modules that can't be replaced: with hooks, or referred to by plain attributes, which would keep them."""
    reasons: dict[nn.Module, str] = {}
    for parent in model.modules():
        hooks = [value for name, value in vars(parent).items() if name.endswith("_hooks") and value]
        if any(hook not in (drop_and_act, *FREEZING_HOOKS) for table in hooks for hook in table.values()):
            reasons[parent] = "it has hooks, which would be lost; remove them first"
        if isinstance(compiled := getattr(parent, "_orig_mod", None), nn.Module):
            reasons[compiled] = "it is compiled separately; convert first, then compile"
            continue
        for key, value in vars(parent).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for module in held if key != "_modules" else ():
                if isinstance(module, nn.Module) and module is not parent:
                    reasons[module] = f"the attribute {key!r} refers to it outside the module tree"
    return reasons


def dim_of_convolutions(model: nn.Module) -> Dim | None:
    """Return the dimension of the model's convolutions; 1 if it has none, None if they differ."""
    kinds: tuple[tuple[Dim, tuple[type[nn.Module], ...]], ...] = (
        (1, (nn.Conv1d, nn.ConvTranspose1d)),
        (2, (nn.Conv2d, nn.ConvTranspose2d)),
        (3, (nn.Conv3d, nn.ConvTranspose3d)),
    )
    present = [dim for dim, classes in kinds if any(isinstance(m, classes) for m in model.modules())]
    if not present:
        return 1
    return present[0] if len(present) == 1 else None


def _floating_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Iterate over the floating-point parameters and buffers that modules hold directly."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                yield tensor


# --- new layers -----------------------------------------------------------------------------------------------------


def _build_replacement(
    layer: NormInModel, entry: NormInfo, options: Mapping[str, object], fallback: Dim | None
) -> nn.Module:
    detected = layer.detected
    if detected.synced and entry.keeps_moments:
        if not has_synced_form(entry):
            raise ValueError(
                f"it is synchronised, and {entry.name!r} has no synchronised form. Call contnorm.revert_sync(model) "
                f"first."
            )
        return build_synced(layer, entry, options, getattr(layer.module, "process_group", None))
    dim = cast("Dim | None", detected.dim) or fallback
    if dim is None:
        raise ValueError("its class accepts any rank, and the model's convolutions have several. Give dim=1, 2 or 3.")
    return build_like(layer, entry, dim, options)


def build_like(layer: NormInModel, entry: NormInfo, dim: Dim, options: Mapping[str, object]) -> nn.Module:
    """Build a layer with the tensors of an old one, on its device, and with its options where none are given."""
    allowed = layer_parameters(norm_class(entry, dim))
    carried = {
        key: value for key, value in layer.detected.options.items() if key in allowed and key not in entry.preset
    }
    options = {**carried, **_placement(layer, allowed), **options}
    channels = layer.detected.channels
    if entry.layers and options.get("num_groups") == "auto":  # a user's norm may not support automatic groups
        options["num_groups"] = auto_groups(channels, one_position=dim == 1)
    new = build_norm(entry, channels, dim, options)
    tensor = next(_floating_tensors([layer.module]), layer.near)
    if entry.layers and tensor is not None and "device" not in allowed:
        new = new.to(tensor.device, tensor.dtype)
    return _transfer_state(layer, new)


def has_synced_form(entry: NormInfo) -> bool:
    return entry.name == "bn" or entry.target == NORMS["cn"].target


def build_synced(layer: NormInModel, entry: NormInfo, options: Mapping[str, object], group: Any) -> nn.Module:
    """Build the synchronized form of a norm; it records the dimension of the layer that it replaces."""
    cls: type[nn.Module] = nn.SyncBatchNorm if entry.name == "bn" else SyncContinualNorm
    check_preset(entry, options)
    allowed = layer_parameters(cls)
    carried = {key: value for key, value in layer.detected.options.items() if key in allowed}
    arguments = {**carried, **_placement(layer, allowed), **options, **entry.preset}
    new: Any = cls(layer.detected.channels, **arguments)
    new.process_group = group
    if layer.detected.dim is not None:
        vars(new)["_contnorm_dim"] = layer.detected.dim
    return _transfer_state(layer, new)


def _placement(layer: NormInModel, allowed: Iterable[str]) -> dict[str, object]:
    """Return device and dtype for new tensors: those of the old layer, or else of the nearest tensor in the model."""
    tensor = next(_floating_tensors([layer.module]), layer.near)
    return {} if tensor is None or "device" not in allowed else {"device": tensor.device, "dtype": tensor.dtype}


def _transfer_state(layer: NormInModel, new: nn.Module) -> nn.Module:
    """Move the parameters, moments and state of the old layer to the new one: the same objects, not copies."""
    old, detected = layer.module, layer.detected
    _take_parameters(old, new)
    names: tuple[str, ...] = ()
    if NORMS[detected.norm].keeps_moments:
        names = ("running_mean", "running_var", "num_batches_tracked")
    if isinstance(new, NormLayer) and type(old) is type(new):
        names += new.own_tensors
    tables: Any = ((new._parameters, old._parameters), (new._buffers, old._buffers))
    for name in names:
        for tensors, others in tables:
            tensor, other = tensors.get(name), others.get(name)
            if tensor is not None and other is not None and tensor.shape == other.shape:
                tensors[name] = other
    new.train(old.training)
    if isinstance(new, MomentNorm):
        new.use_running = detected.constant or getattr(old, "use_running", False)
    if holds_moments(new) and (detected.constant or is_frozen(old)):
        freeze_stats(new)
    if detected.acts:
        new.drop, new.act = old.drop, old.act
        new.register_forward_hook(drop_and_act)
    return new


def _take_parameters(old: nn.Module, new: nn.Module) -> None:
    for name in ("weight", "bias"):
        parameter = new._parameters.get(name)
        trained, constant = old._parameters.get(name), old._buffers.get(name)
        if parameter is None or any(t is not None and t.shape != parameter.shape for t in (trained, constant)):
            continue
        if trained is not None:
            new._parameters[name] = trained
        elif constant is not None:  # it must not become trainable
            new._parameters[name] = nn.Parameter(constant.clone(), requires_grad=False)
        elif old._parameters.get("weight") is not None or old._parameters.get("bias") is not None:
            # The old layer has only one of weight and bias. Code of others may not expect None in place of the other.
            if isinstance(new, NormLayer | nn.SyncBatchNorm):
                new._parameters[name] = None
            else:
                parameter.requires_grad_(False)


def swap_modules(model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules at all places of a model; return the model, or the replacement of itself."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replace:
                parent._modules[name] = replace[child]
    return replace.get(model, model)
