"""Check that a user's network contains the normalization layer of its run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from contnorm.bench.config.schema import NormConfig
from contnorm.bench.models.norm_layers import NormMaker
from contnorm.convert.detect import DetectedNorm, detect_norm
from contnorm.errors import UserError
from contnorm.registry import find_norm

__all__ = ["calls_recorded", "check_norms", "count_norms", "marked"]

_MARK = "_contnorm_made_by_run"  # an attribute, so that a deep copy of a layer has it too
_OTHER = re.compile(r"norm(?!al)|LRN", re.IGNORECASE)  # LayerNorm, RMSNorm, ...; not Normalize
_WEIGHTS = re.compile(r"weight_?norm|spectral_?norm", re.IGNORECASE)  # these normalize weights, not activations
SHOWN = 3  # layers named in a message


def marked(make: NormMaker) -> NormMaker:
    """Wrap a norm maker so that the layers it creates are marked and can be identified later."""

    def make_marked(channels: int) -> nn.Module:
        layer = make(channels)
        for module in layer.modules():
            setattr(module, _MARK, True)
        return layer

    return make_marked


def count_norms(model: nn.Module) -> dict[str, int]:
    """Count the normalization layers of a network by class, with the number of groups if they have one.

    Example:
        >>> count_norms(nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)))
        {'BatchNorm2d': 1, 'GroupNorm(4)': 2}
    """
    return dict(Counter(_label(module) for module in _norm_layers(model).values()))


@contextmanager
def calls_recorded(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Collect the normalization layers that are called within the context."""
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda this, _: called.add(this)) for module in _norm_layers(model).values()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def check_norms(model: nn.Module, name: str, norm: NormConfig, called: set[nn.Module]) -> None:
    """Reject a network without a layer of the run's norm: its record would name a norm that it does not use.

    Layers created by ``norm(channels)`` count, and so do copies of them and layers of the same kind. A network may have
    other norms too, such as layer norms in attention.

    Args:
        model: The network.
        name: Name of the network in the settings.
        norm: Settings of the run's norm.
        called: Normalization layers that a forward pass called; if empty, all layers of the network are checked.

    Raises:
        UserError: If no layer is of the run's norm.
    """
    layers = _norm_layers(model)
    used = {path: layer for path, layer in layers.items() if layer in called} or layers
    if any(_is_of_run(layer, norm) for layer in used.values()):
        return
    others = [f"{path or 'the network'} ({_label(layer)})" for path, layer in used.items()]
    spec, groups = find_norm(norm.name)
    if not others and spec.name == "none":
        return
    norm_label = f"{spec.name}{groups or norm.groups}" if spec.grouped else spec.name
    if not others:
        raise UserError(
            f"model {name!r}: has no normalization layer, and would be recorded as norm {norm_label!r}. Make its "
            f"layers with the norm(channels) that make(shape, outputs, norm) is given, or use --norm none."
        )
    rest = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    raise UserError(
        f"model {name!r}: none of its normalization layers is the run's norm {norm_label!r}, but "
        f"{', '.join(others[:SHOWN])}{rest}. Make them with the norm(channels) that make(shape, outputs, norm) is "
        f"given."
    )


def _norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if _normalizes(module)}


def _normalizes(module: nn.Module) -> bool:
    if detect_norm(module) is not None:
        return True
    name = type(module).__name__
    leaf = next(module.children(), None) is None
    is_marked = hasattr(module, _MARK) and leaf  # such as the identity for norm "none"
    return is_marked or (leaf and _OTHER.search(name) is not None and _WEIGHTS.search(name) is None)


def _is_of_run(module: nn.Module, norm: NormConfig) -> bool:
    if hasattr(module, _MARK):
        return True
    kind = detect_norm(module)
    spec, groups = find_norm(norm.name)
    if not isinstance(kind, DetectedNorm) or kind.norm != spec.name:
        return False
    expected = groups or norm.groups
    return not spec.grouped or expected == "auto" or kind.options.get("num_groups") == expected


def _label(module: nn.Module) -> str:
    kind = detect_norm(module)
    groups = kind.options.get("num_groups") if isinstance(kind, DetectedNorm) else None
    return type(module).__name__ + (f"({groups})" if groups is not None else "")
