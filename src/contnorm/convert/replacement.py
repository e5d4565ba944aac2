"""New layers in place of old ones, with the Parameter and buffer objects of the old layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from torch import Tensor, nn

from contnorm.checks import auto_groups
from contnorm.convert.activations import absorbed_act
from contnorm.convert.detect import drop_and_act, holds_moments
from contnorm.convert.selection import NormToReplace, floating_tensors
from contnorm.moments.freeze import freeze_stats, is_frozen
from contnorm.norm_entry import Dim, NormEntry, accepted_options, build_norm, norm_class
from contnorm.norms.base import MomentNorm, NormLayer
from contnorm.registry import NORMS

__all__ = ["build_layer", "placement", "swap_modules", "transfer_state"]


def build_layer(layer: NormToReplace, entry: NormEntry, dim: Dim, options: Mapping[str, object]) -> nn.Module:
    """Build a layer on the device of the old one, and with its dtype, but not yet with its tensors."""
    allowed = accepted_options(norm_class(entry, dim, "the new norm"))
    options = {**placement(layer, allowed), **options}
    if not entry.layers:
        return build_norm(entry, layer.detected.channels, dim, options, "the new norm")
    # A norm that is not of this package may support neither devices nor automatic groups.
    if options.get("num_groups") == "auto":
        options["num_groups"] = auto_groups(layer.detected.channels, one_position=dim == 1)
    new = build_norm(entry, layer.detected.channels, dim, options, "the new norm")
    tensor = next(floating_tensors([layer.module]), layer.near)
    return new if tensor is None or "device" in options else new.to(tensor.device, tensor.dtype)


def placement(layer: NormToReplace, allowed: Iterable[str]) -> dict[str, object]:
    """Return device and dtype for new tensors: those of the old layer, or else of the nearest tensor in the model."""
    tensor = next(floating_tensors([layer.module]), layer.near)
    if tensor is None or "device" not in allowed:
        return {}
    return {"device": tensor.device, "dtype": tensor.dtype}


def transfer_state(layer: NormToReplace, new: nn.Module) -> nn.Module:
    """Move the parameters, moments and state of the old layer to the new one: the same objects, not copies."""
    old, detected = layer.module, layer.detected
    _take_parameters(old, new)
    if NORMS[detected.norm].keeps_moments:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            buffer = old._buffers.get(name)
            if buffer is not None and _fits(new._buffers.get(name), buffer):
                new._buffers[name] = buffer
    if isinstance(new, NormLayer) and type(old) is type(new):
        _take_own_tensors(old, new)
    new.train(old.training)
    if isinstance(new, MomentNorm):
        new.use_running = detected.constant or getattr(old, "use_running", False)
    if holds_moments(new) and (detected.constant or is_frozen(old)):
        freeze_stats(new)
    if detected.acts:
        new.drop, new.act = old.drop, absorbed_act(cast(nn.Module, old.act), new)
        new.register_forward_hook(drop_and_act)
    return new


def _take_own_tensors(old: nn.Module, new: NormLayer) -> None:
    """Move the tensors that only this norm has, such as learned mixture weights, from a layer of the same class."""
    for name in new.own_tensors:
        parameter, buffer = old._parameters.get(name), old._buffers.get(name)
        if parameter is not None and _fits(new._parameters.get(name), parameter):
            new._parameters[name] = parameter
        if buffer is not None and _fits(new._buffers.get(name), buffer):
            new._buffers[name] = buffer


def _fits(new: Tensor | None, old: Tensor) -> bool:
    """Whether a new layer can use a tensor of the old one. Layers of this package always can; others have any shape."""
    return new is not None and new.shape == old.shape


def _take_parameters(old: nn.Module, new: nn.Module) -> None:
    for name in ("weight", "bias"):
        parameter = new._parameters.get(name)
        tensor: Tensor | None = old._parameters.get(name)
        tensor = old._buffers.get(name) if tensor is None else tensor
        if parameter is None or (tensor is not None and not _fits(parameter, tensor)):
            continue
        if old._parameters.get(name) is not None:
            new._parameters[name] = old._parameters[name]
        elif old._buffers.get(name) is not None:  # a constant must not become trainable
            new._parameters[name] = nn.Parameter(cast(Tensor, old._buffers[name]).clone(), requires_grad=False)
        elif old._parameters.get("weight") is not None or old._parameters.get("bias") is not None:
            # The old layer has only one of weight and bias. Code of others may not expect None in place of the other.
            if isinstance(new, NormLayer | nn.SyncBatchNorm):
                new._parameters[name] = None
            else:
                parameter.requires_grad_(False)


def swap_modules(model: nn.Module, replace: Mapping[nn.Module, nn.Module]) -> nn.Module:
    for parent, name, child in list(_edges(model)):
        if child in replace:
            parent._modules[name] = replace[child]
    return replace.get(model, model)


def _edges(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Iterate over all (parent, name, child) registrations; a shared module has several."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child
