"""Replace the normalization layers of a model, and synchronize them over processes.

The new layer reuses the Parameter and buffer objects of the old one wherever both have them. An optimizer created
before the conversion therefore continues to train them, and converting a model and converting it back restores its
output bit for bit. All new layers are built before the model is changed: if one layer cannot be converted, the model
stays unchanged.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from contnorm.checks import auto_groups
from contnorm.detect import (
    DetectedNorm,
    Filter,
    TreatAs,
    check_names,
    detect_norm,
    drop_and_act,
    holds_moments,
    is_selected,
)
from contnorm.moments.freeze import OWN_HOOKS, carry_stale, set_stats_state, stats_state
from contnorm.moments.reestimate import calibrate_layers, check_batches, output_targets
from contnorm.norms.activation import ActivationNorm
from contnorm.norms.balanced import TaskBalancedNormBase
from contnorm.norms.base import MomentNorm, NormLayer
from contnorm.norms.continual import SyncContinualNorm
from contnorm.norms.group import WSGroupNorm, standardize_convolutions, unstandardize
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
    with_num_groups,
)


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
    calibrate: Iterable[Any] | None = None,
    **options: object,
) -> nn.Module:
    """Replace the norm layers of a model with another norm, in place.

    Works on any module tree, including nested modules, shared layers (which stay shared) and models of torchvision,
    timm and other libraries. Parameters (the same objects), running moments, eps, momentum, device, dtype, training
    mode and ``requires_grad`` are kept. State that the new norm does not have is dropped; state that the old norm did
    not have is initialized.

    Layers of torch and of this package are known, and so are those of `contnorm.detect`. Subclasses of these
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
        calibrate: For a trained model: batches of samples without labels, as for `reestimate`. Layer by layer, the
            weight and bias of the new layer are set, in place, so that each channel of its outputs has the mean and
            standard deviation on these samples that it has in the old model, in evaluation mode; running moments are
            set to those of the samples, also frozen ones. A layer that is called several times has one weight and bias
            for all its calls. Layers that no sample reaches are converted only. Converting back does not restore the
            old values: keep a copy of the model.
        **options: Arguments of the new norm, such as ``num_groups``, ``eps`` or ``momentum``. They override the
            options of the old layer. ``num_groups="auto"`` gives each layer the largest divisor of its number of
            channels, up to 32, that leaves at least 2 channels in a group (8 for (N, C) input), or one group if there
            is no such divisor. ``channels_per_group`` gives groups of the same size in all layers.

    Returns:
        The model.

    Raises:
        ValueError: If there is nothing to convert, or if a layer cannot be converted or calibrated. The message
            contains the layer's name and the reason, and the model is unchanged.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> weight = model[1].weight
        >>> convert_norm(model, "cn", num_groups=8)[1]
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
        >>> model[1].weight is weight
        True

        A trained model, converted so that its layers have outputs like before:

        >>> samples = [torch.randn(8, 3, 16, 16) for _ in range(4)]
        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> convert_norm(model, "gn", channels_per_group=16, calibrate=samples)[1].weight is model[1].weight
        True
    """
    entry, options = resolve_norm(to, options)
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
        detected = layer.detected
        try:
            if synced := detected.synced and entry.keeps_moments:
                check_synced_form(entry)
            group = getattr(layer.module, "process_group", None)
            new_dim = None if synced else detected.dim or known_dim(fallback)
            replace[layer.module] = build_layer(layer, entry, options, new_dim, group)
        except ValueError as error:
            error.args = (f"convert_norm: {located(layer)}: {error} The model is unchanged.",)
            raise
    if calibrate is None:
        warn_of_optimizer(model, replace)
        return replace_layers(model, replace)
    check_batches(calibrate, "convert_norm: calibrate")
    for layer in layers:
        new, shape = replace[layer.module], (layer.detected.channels,)
        if any(getattr(getattr(new, name, None), "shape", None) != shape for name in ("weight", "bias")):
            raise ValueError(
                f"convert_norm: {located(layer)}: calibrate= sets a weight and a bias for each channel, which the new "
                f"layer does not have. Give affine=True, or exclude it with skip=. The model is unchanged."
            )
    targets = output_targets(model, {layer.name: layer.module for layer in layers}, calibrate)
    warn_of_optimizer(model, replace)
    with ExitStack() as undo:
        model = replace_layers(model, replace)
        undo.callback(replace_layers, model, {new: old for old, new in replace.items()})
        calibrate_layers(model, {layer.name: replace[layer.module] for layer in layers}, targets, calibrate)
        undo.pop_all()
    return model


def replace_layers(model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace layers, and standardize the convolutions of a model with ``gn_ws``; of no other."""
    if standardizing := [new for new in replace.values() if isinstance(new, WSGroupNorm)]:
        standardize_convolutions(model, standardizing[0].weight_eps)
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
    names: list[str] = []
    for layer in norm_layers(model, treat_as):
        name, module, detected = layer.name, layer.module, layer.detected
        names.append(name)
        if isinstance(detected, DetectedNorm) and not wants(module, detected):
            continue
        if not is_selected(name, module, only, skip):
            continue
        if reason := getattr(detected, "reason", None) or obstacles.get(module):
            raise ValueError(
                f"{caller}: {located(layer)} can't be converted: {reason}. Remove the cause, or exclude the layer with "
                f"skip=. The model is unchanged."
            )
        if detected is not None:
            layers.append(layer)
    check_names((only, skip), names, caller)
    if not names:
        raise ValueError(
            f"{caller}: nothing to convert in {type(model).__name__}: it has no batch, group or instance norm of "
            f"torch, and no norm of contnorm. Name other classes: treat_as={{Class: 'bn'}}."
        )
    if not layers:
        raise ValueError(
            f"{caller}: nothing to convert in {type(model).__name__}: none of its {len(names)} norm layers needs it, "
            f"or only= and skip= exclude them. See contnorm.summarize(model)."
        )
    return layers


def replacement_obstacles(model: nn.Module) -> dict[nn.Module, str]:
    """Return modules that can't be replaced: with hooks, or referred to by plain attributes, which would keep them."""
    reasons: dict[nn.Module, str] = {}
    for parent in model.modules():
        if isinstance(compiled := getattr(parent, "_orig_mod", None), nn.Module):
            reasons[compiled] = "it is compiled separately; convert first, then compile"
            continue
        for key, value in vars(parent).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            if key.endswith("_hooks") and any(hook not in OWN_HOOKS for hook in held):
                reasons[parent] = "it has hooks, which would be lost; remove them first"
            for module in held if key != "_modules" else ():
                if isinstance(module, nn.Module) and module is not parent:
                    reasons[module] = f"the attribute {key!r} refers to it outside the module tree"
    return reasons


def dim_of_convolutions(model: nn.Module) -> Dim | None:
    """Return the dimension of the model's convolutions; 1 if it has none, None if they differ."""
    dims = {len(m.kernel_size) for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)}
    return cast("Dim", max(dims, default=1)) if len(dims) < 2 else None


def known_dim(dim: Dim | None) -> Dim:
    """Return the dimension of a layer whose class accepts any rank."""
    if dim is None:
        raise ValueError("its class accepts any rank, and the model's convolutions have several. Give dim=1, 2 or 3.")
    return dim


def _floating_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Iterate over the floating-point parameters and buffers that modules hold directly."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and tensor.is_floating_point():
                yield tensor


# --- new layers -----------------------------------------------------------------------------------------------------


def check_synced_form(entry: NormInfo) -> None:
    """Raise for a norm without a synchronized form."""
    if entry.name != "bn" and entry.target != NORMS["cn"].target:
        raise ValueError(f"{entry.name!r} has no synchronized form. Use contnorm.revert_sync, or another norm.")


def build_layer(
    layer: NormInModel, entry: NormInfo, options: Mapping[str, object], dim: Dim | None, group: Any = None
) -> nn.Module:
    """Build a layer with the tensors of an old one, on its device, and with its options where none are given.

    Args:
        layer: The old layer.
        entry: The norm.
        options: Options of the new layer, which come before those of the old one.
        dim: Its dimension; None for the synchronized form, which records the dimension of the old layer.
        group: The process group of a synchronized layer.
    """
    old, detected = layer.module, layer.detected
    factory: Any = norm_class(entry, dim) if dim else nn.SyncBatchNorm if entry.name == "bn" else SyncContinualNorm
    taken = layer_parameters(factory)
    carried = {k: v for k, v in detected.options.items() if k in taken and k not in entry.preset}
    if carried.get("track_running_stats") is True:  # a default that instance norms do not have
        del carried["track_running_stats"]
    options = {**carried, **with_num_groups(entry, detected.channels, options)}
    if entry.layers and options.get("num_groups") == "auto":  # a user's norm may not support automatic groups
        options["num_groups"] = auto_groups(detected.channels, one_position=dim == 1)
    if dim is not None:
        new = build_norm(entry, detected.channels, dim, options)
    else:
        check_preset(entry, options)
        new = factory(detected.channels, **{**options, **entry.preset})
        new.process_group = group
        if detected.dim is not None:
            vars(new)["_contnorm_dim"] = detected.dim
    tensor = next(_floating_tensors([old]), layer.near)
    if tensor is not None and "device" not in options and "dtype" not in options:
        new = new.to(tensor.device, tensor.dtype)
    _transfer_state(old, new, detected)
    return new


def _transfer_state(old: nn.Module, new: Any, detected: DetectedNorm) -> None:
    """Give a new layer the parameters, moments and state of an old one: the same objects, not copies."""
    for name in ("weight", "bias"):
        parameter, trained, constant = new._parameters.get(name), old._parameters.get(name), old._buffers.get(name)
        if parameter is not None and trained is not None and trained.shape == parameter.shape:
            new._parameters[name] = trained
        elif parameter is not None and constant is not None:  # it must not become trainable
            new._parameters[name] = nn.Parameter(constant.clone(), requires_grad=False)
    names: tuple[str, ...] = ()
    if NORMS[detected.norm].keeps_moments:
        names = ("running_mean", "running_var", "num_batches_tracked")
    if isinstance(new, NormLayer) and type(old) is type(new):
        names += new.own_tensors
    tables: Any = ((new._parameters, old._parameters), (new._buffers, old._buffers))
    for name, (tensors, others) in product(names, tables):
        current, other = tensors.get(name), others.get(name)
        if current is not None and other is not None and current.shape == other.shape:
            tensors[name] = other
    new.train(old.training)
    if isinstance(new, TaskBalancedNormBase) and isinstance(old, TaskBalancedNormBase):
        new.on_task_start(old.task)
    if holds_moments(new) or isinstance(new, MomentNorm):
        set_stats_state(new, *(("running", False) if detected.constant else stats_state(old)))
    if detected.acts:
        new.drop, new.act = cast(Any, old).drop, cast(Any, old).act
        new.register_forward_hook(drop_and_act)


def warn_of_optimizer(model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> None:
    """Warn if an optimizer trains parameters of the model, and the new layers have others."""
    own = set(model.parameters())
    added = sorted({name for new in replace.values() for name, p in new.named_parameters() if p not in own})
    optimizers = (t for t in gc.get_objects() if issubclass(type(t), torch.optim.Optimizer)) if added else ()
    for optimizer in optimizers:
        if any(parameter in own for group in optimizer.param_groups for parameter in group["params"]):
            warnings.warn(
                f"convert_norm: the new layers have parameters ({', '.join(added)}) that an existing optimizer of this "
                f"model, {type(optimizer).__name__}, does not train. Make the optimizer after the conversion.",
                stacklevel=3,
            )
            return


def swap_modules(model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules at all places of a model; return the model, or the replacement of itself."""
    names = {module: name for name, module in model.named_modules() if module in replace}
    layers: list[str] = []
    for old, new in replace.items():
        if old is not new and carry_stale(old, new, layers):
            layers.append(names[old])
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replace:
                parent._modules[name] = replace[child]
    return replace.get(model, model)


# --- synchronized layers --------------------------------------------------------------------------------------------


def convert_sync(
    model: nn.Module, process_group: Any = None, *, only: Filter | None = None, skip: Filter | None = None
) -> nn.Module:
    """Replace continual and batch norms with their synchronized forms, in place, for training on several processes.

    Use it instead of ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, which supports only batch norm. Norms that
    normalize each sample (GN, IN, LN) and norms with constant moments need no synchronization and are not replaced. A
    norm without a synchronized form raises an error.

    Args:
        model: The model.
        process_group: The processes whose batches are normalized together; None for all processes.
        only: The layers to convert, as in `convert_norm`.
        skip: The layers not to convert.

    Returns:
        The model.

    Example:
        >>> from contnorm import ContinualNorm2d
        >>> type(convert_sync(nn.Sequential(ContinualNorm2d(64)))[0]).__name__
        'SyncContinualNorm'
    """
    layers = select_layers(model, only, skip, "convert_sync", needs_sync)
    for layer in layers:
        check_synced_form(NORMS[layer.detected.norm])
    entries = [NORMS[layer.detected.norm] for layer in layers]
    news = [build_layer(layer, e, {}, None, process_group) for layer, e in zip(layers, entries, strict=True)]
    return swap_modules(model, {layer.module: new for layer, new in zip(layers, news, strict=True)})


def revert_sync(
    model: nn.Module, *, dim: Dim | None = None, only: Filter | None = None, skip: Filter | None = None
) -> nn.Module:
    """Replace synchronized continual and batch norms with their local forms, in place: the reverse of `convert_sync`.

    Parameters (the same objects), running moments, options and frozen moments are kept. A synchronized layer accepts
    input of any rank, and its local form of one. `convert_sync` records the dimension of the layers that it replaces.

    Args:
        model: The model.
        dim: The dimension of layers that were not made by `convert_sync`. By default, that of the model's convolutions.
        only: The layers to convert, as in `convert_norm`.
        skip: The layers not to convert.

    Returns:
        The model.

    Raises:
        ValueError: If there is nothing to convert, or if the dimension of a layer is unknown. The model is unchanged.

    Example:
        >>> from contnorm import ContinualNorm2d
        >>> model = convert_sync(nn.Sequential(ContinualNorm2d(64, num_groups=8)))
        >>> revert_sync(model)[0]
        ContinualNorm2d(64, num_groups=8, eps=1e-05, momentum=0.1)
    """
    layers = select_layers(model, only, skip, "revert_sync", lambda module, detected: detected.synced)
    usual = dim or dim_of_convolutions(model)
    replace = {
        layer.module: build_layer(layer, NORMS[layer.detected.norm], {}, layer.detected.dim or known_dim(usual))
        for layer in layers
    }
    return swap_modules(model, replace)


def needs_sync(module: nn.Module, detected: DetectedNorm) -> bool:
    """Whether the moments of a layer depend on the batch of its process."""
    constant = detected.constant or stats_state(module) == ("running", False)
    return NORMS[detected.norm].keeps_moments and not detected.synced and not constant
