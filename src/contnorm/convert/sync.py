"""Synchronized norm layers of a model: conversion to them and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from contnorm.checks import check_model
from contnorm.convert.detected import DetectedNorm
from contnorm.convert.neighbours import input_dims
from contnorm.convert.replacement import build_layer, placement, swap_modules, transfer_state
from contnorm.convert.selection import Filter, NormToReplace, dim_of_convolutions, layer_named_in_errors, select_layers
from contnorm.norm_entry import Dim, NormEntry, accepted_options, check_options, norm_class
from contnorm.norms.sync import SyncContinualNorm
from contnorm.registry import NORMS

__all__ = ["build_synced", "convert_sync", "has_synced_form", "revert_sync"]


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
    check_model(model, "convert_sync")
    replace = {}
    for layer in select_layers(model, only, skip, "convert_sync", _needs_sync):
        with layer_named_in_errors(layer, "convert_sync"):
            if not has_synced_form(NORMS[layer.detected.norm]):
                raise ValueError(f"{layer.detected.norm!r} has no synchronised form. Convert it to 'bn' or 'cn' first.")
            new = build_synced(layer, NORMS[layer.detected.norm], {}, process_group)
            replace[layer.module] = transfer_state(layer, new)
    return swap_modules(model, replace)


def revert_sync(
    model: nn.Module,
    *,
    dim: Dim | None = None,
    example_input: object = None,
    only: Filter | None = None,
    skip: Filter | None = None,
) -> nn.Module:
    """Replace synchronized continual and batch norms with their local forms, in place: the reverse of `convert_sync`.

    Parameters (the same objects), running moments, options and frozen moments are kept. A synchronized layer accepts
    input of any rank, and its local form of one. `convert_sync` records the dimension of the layers that it replaces.

    Args:
        model: The model.
        dim: The dimension of layers that were not made by `convert_sync`. By default, that of the example input, or of
            the model's convolutions.
        example_input: An input of the model (a tuple or a dict for several arguments). The model is run on it once, in
            evaluation mode, to see the dimension of such layers.
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
    check_model(model, "revert_sync")
    layers = select_layers(model, only, skip, "revert_sync", lambda module, detected: detected.synced)
    unknown = [layer.module for layer in layers if layer.detected.dim is None]
    seen = {} if dim or not unknown else input_dims(model, unknown, example_input, "revert_sync")
    usual = dim or dim_of_convolutions(model)
    replace = {}
    for layer in layers:
        with layer_named_in_errors(layer, "revert_sync"):
            local_dim = cast("Dim | None", layer.detected.dim) or seen.get(layer.module, usual)
            if local_dim is None:
                raise ValueError(
                    "it accepts input of any rank, and the model's convolutions have several. Give dim=1, 2 or 3, or "
                    "example_input=."
                )
            replace[layer.module] = transfer_state(layer, _build_local(layer, local_dim))
    return swap_modules(model, replace)


def _build_local(layer: NormToReplace, dim: Dim) -> nn.Module:
    entry = NORMS[layer.detected.norm]
    allowed = accepted_options(norm_class(entry, dim))
    options = layer.detected.options.items()
    return build_layer(layer, entry, dim, {key: value for key, value in options if key in allowed})


def has_synced_form(spec: NormEntry) -> bool:
    return spec.name == "bn" or spec.target == NORMS["cn"].target


def _needs_sync(module: nn.Module, detected: DetectedNorm) -> bool:
    constant = detected.constant or getattr(module, "use_running", False)
    return NORMS[detected.norm].keeps_moments and not detected.synced and not constant


def build_synced(layer: NormToReplace, entry: NormEntry, options: Mapping[str, object], group: Any) -> nn.Module:
    """Build the synchronized form of a norm; it records the dimension of the layer that it replaces."""
    cls: type[nn.Module] = nn.SyncBatchNorm if entry.name == "bn" else SyncContinualNorm
    check_options(entry, cls, options, "the new norm")
    allowed = accepted_options(cls)
    carried = {key: value for key, value in layer.detected.options.items() if key in allowed}
    arguments = {**carried, **placement(layer, allowed), **options, **entry.preset, "process_group": group}
    new = cls(layer.detected.channels, **arguments)
    if layer.detected.dim is not None:
        vars(new)["_contnorm_dim"] = layer.detected.dim
    return new
