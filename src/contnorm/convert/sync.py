"""Synchronized norm layers of a model: conversion to them and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from contnorm.checks import check_model
from contnorm.convert.detect import DetectedNorm
from contnorm.convert.replacement import placement, swap_modules, transfer_state
from contnorm.convert.selection import Filter, NormToReplace, layer_named_in_errors, select_layers
from contnorm.layers.sync import SyncContinualNorm
from contnorm.norm_entry import NormEntry, accepted_options, check_options
from contnorm.registry import NORMS

__all__ = ["build_synced", "convert_sync", "has_synced_form"]


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
