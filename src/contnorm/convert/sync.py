"""Synchronized norm layers of a model: conversion to them and back."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from contnorm.checks import check_model
from contnorm.convert.conversion import (
    Filter,
    build_like,
    build_synced,
    dim_of_convolutions,
    has_synced_form,
    located,
    select_layers,
    swap_modules,
)
from contnorm.convert.detect import DetectedNorm
from contnorm.registry import NORMS, Dim

__all__ = ["convert_sync", "needs_sync", "revert_sync"]


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
    layers = select_layers(check_model(model, "convert_sync"), only, skip, "convert_sync", needs_sync)
    for layer in layers:
        if not has_synced_form(NORMS[layer.detected.norm]):
            raise ValueError(
                f"convert_sync: {located(layer)}: {layer.detected.norm!r} has no synchronised form. Convert it to 'bn' "
                f"or 'cn' first. The model is unchanged."
            )
    replace = {layer.module: build_synced(layer, NORMS[layer.detected.norm], {}, process_group) for layer in layers}
    return swap_modules(model, replace)


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
    check_model(model, "revert_sync")
    layers = select_layers(model, only, skip, "revert_sync", lambda module, detected: detected.synced)
    usual = dim or dim_of_convolutions(model)
    replace = {}
    for layer in layers:
        local_dim = cast("Dim | None", layer.detected.dim) or usual
        if local_dim is None:
            raise ValueError(
                f"revert_sync: {located(layer)}: it accepts input of any rank, and the model's convolutions have "
                f"several. Give dim=1, 2 or 3. The model is unchanged."
            )
        replace[layer.module] = build_like(layer, NORMS[layer.detected.norm], local_dim, {})
    return swap_modules(model, replace)


def needs_sync(module: nn.Module, detected: DetectedNorm) -> bool:
    """Whether the moments of a layer depend on the batch of its process."""
    constant = detected.constant or getattr(module, "use_running", False)
    return NORMS[detected.norm].keeps_moments and not detected.synced and not constant
