"""Replace the normalization layers of a model.

The new layer reuses the Parameter and buffer objects of the old one wherever both have them. An optimizer created
before the conversion therefore continues to train them, and converting a model and converting it back restores its
output bit for bit. All new layers are built before the model is changed: if one layer cannot be converted, the model
stays unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from contnorm.checks import auto_groups, check_model, nearest_groups
from contnorm.convert.activations import Absorption, plan_absorption
from contnorm.convert.neighbours import find_neighbours, run_example
from contnorm.convert.replacement import build_layer, swap_modules, transfer_state
from contnorm.convert.selection import (
    Filter,
    NormToReplace,
    dim_of_convolutions,
    layer_named_in_errors,
    select_layers,
)
from contnorm.convert.standardization import Standardization, plan_standardization
from contnorm.convert.sync import build_synced, has_synced_form
from contnorm.errors import GroupsError
from contnorm.registry import (
    DIMS,
    Dim,
    LayerFactory,
    NormInfo,
    accepted_options,
    check_options,
    layer_parameters,
    norm_class,
    resolve_norm,
)

__all__ = ["convert_norm"]


def convert_norm(
    model: nn.Module,
    to: str | LayerFactory | NormInfo,
    *,
    only: Filter | None = None,
    skip: Filter | None = None,
    dim: Dim | None = None,
    example_input: object = None,
    **options: object,
) -> nn.Module:
    """Replace the norm layers of a model with another norm, in place.

    Works on any module tree, including nested modules, shared layers (which stay shared) and models of torchvision,
    timm and other libraries. Parameters (the same objects), running moments, eps, momentum, device, dtype, training
    mode and ``requires_grad`` are kept. State that the new norm does not have is dropped; state that the old norm did
    not have is initialized. A layer of another library is converted only if a copy of it computes the expected norm
    on random input. Otherwise the conversion raises an error.

    Args:
        model: The model. If it is itself a norm layer, its replacement is returned.
        to: The name of the new norm, as in ``create_norm``; or a class of layers, or a function
            ``(num_features, **options)`` that returns one. See `register_norm` to convert from such a norm, too.
        only: The layers to convert: a name or pattern (``"layer1.*"``), a class, a function
            ``f(name, module) -> bool``, or a list of these, at least one of which must match.
        skip: The layers not to convert, in the same forms.
        dim: The dimension of layers whose class does not define it (``GroupNorm``, ``SyncBatchNorm``). By default,
            that of the model's convolutions.
        example_input: An input of the model (a tuple or a dict for several arguments). The model is run on it once, in
            evaluation mode. With ``num_groups="auto"``, layers whose input has one position get groups of at least 8
            channels instead of 2. For norms that contain an activation (``evonorm_s0``, ``frn``) or standardize the
            weights of convolutions (``gn_ws``), the run shows what is applied before and after each layer. It is
            needed for them unless all layers are in ``nn.Sequential``.
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
    spec, options = resolve_norm(to, options)
    check_model(model, "convert_norm")
    used: Dim = dim or (2 if not spec.layers or 2 in spec.layers else min(spec.layers))
    check_options(spec, norm_class(spec, used), options)
    layers = select_layers(model, only, skip, "convert_norm")
    fallback = dim or dim_of_convolutions(model)
    if spec.grouped:
        _check_groups(spec, layers, options)
    narrow = _single_position_layers(model, layers, example_input) if options.get("num_groups") == "auto" else set()
    absorption, standardization = _plan_neighbours(model, layers, spec, options, example_input)
    replace = {}
    for layer in layers:
        chosen = absorption.options(layer.module)
        if layer.module in narrow:
            chosen["num_groups"] = auto_groups(layer.detected.channels, one_position=True)
        with layer_named_in_errors(layer, "convert_norm"):
            replace[layer.module] = _build_replacement(layer, spec, {**options, **chosen}, fallback)
    standardization.apply(model, replace)
    return swap_modules(model, {**replace, **absorption.changes(model, replace)})


def _plan_neighbours(
    model: nn.Module, layers: list[NormToReplace], spec: NormInfo, options: Mapping[str, object], example_input: object
) -> tuple[Absorption, Standardization]:
    """Plan what happens to the activations after the layers and to the convolutions before them."""
    absorbs = spec.absorbs_activation and "apply_act" not in options
    if not absorbs and not spec.standardizes_weights:
        return Absorption(), Standardization()
    neighbours = find_neighbours(model, [layer.module for layer in layers], example_input)
    if absorbs:
        described = [(layer.name, layer.module, layer.detected) for layer in layers]
        return plan_absorption(described, neighbours), Standardization()
    return Absorption(), plan_standardization(model, [(layer.name, layer.module) for layer in layers], neighbours)


def _check_groups(spec: NormInfo, layers: list[NormToReplace], options: Mapping[str, object]) -> None:
    """Raise if the number of groups does not divide the channels of every layer, and suggest one that does."""
    usual = layer_parameters(norm_class(spec, min(spec.layers or DIMS)))["num_groups"].default
    counts = {layer: options.get("num_groups", layer.detected.options.get("num_groups", usual)) for layer in layers}
    wrong = [
        layer
        for layer, count in counts.items()
        if type(count) is int and count > 0 and layer.detected.channels % count  # the layer itself reports the rest
    ]
    if not wrong:
        return
    first, more = wrong[0], len(wrong) - 1
    others = f" and {more} more layer{'s' if more > 1 else ''}" if more else ""
    channels, requested = first.detected.channels, cast(int, counts[first])
    suggestion = nearest_groups([layer.detected.channels for layer in layers], requested)
    reason = f"which divides the channels of all {len(layers)} layers, " if len(layers) > 1 else ""
    raise GroupsError(
        f"convert_norm: layer {first.name!r} ({type(first.module).__name__}){others}: num_groups={requested} does "
        f"not divide the {channels} channels. Use num_groups={suggestion}, {reason}or num_groups='auto', which chooses "
        f"a number for each layer. The model is unchanged.",
        requested,
        channels,
        suggestion,
    )


def _single_position_layers(model: nn.Module, layers: list[NormToReplace], example_input: object) -> set[nn.Module]:
    """Run the model once, and return the layers whose input has one position per sample and channel."""
    positions: dict[nn.Module, int] = {}
    if example_input is None:
        return set()

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if x is not None and x.dim() >= 2:
            positions[module] = min(x.shape[2:].numel(), positions.get(module, x.shape[2:].numel()))

    handles = [layer.module.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    try:
        run_example(model, example_input)
    finally:
        for handle in handles:
            handle.remove()
    return {module for module, count in positions.items() if count == 1}


def _build_replacement(
    layer: NormToReplace, spec: NormInfo, options: Mapping[str, object], fallback: Dim | None
) -> nn.Module:
    """Build the replacement of a layer, with the layer's tensors."""
    detected = layer.detected
    if detected.synced and spec.keeps_moments:
        if not has_synced_form(spec):
            raise ValueError(
                f"it is synchronised, and {spec.name!r} has no synchronised form. Call contnorm.revert_sync(model) "
                f"first."
            )
        group = getattr(layer.module, "process_group", None)
        return transfer_state(layer, build_synced(layer, spec, options, group))
    dim = cast("Dim | None", detected.dim) or fallback
    if dim is None:
        raise ValueError("its class accepts any rank, and the model's convolutions have several. Give dim=1, 2 or 3.")
    allowed = accepted_options(norm_class(spec, dim))
    carried = {key: value for key, value in detected.options.items() if key in allowed and key not in spec.preset}
    return transfer_state(layer, build_layer(layer, spec, dim, {**carried, **options}))
