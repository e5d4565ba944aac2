"""Norm layers of a network: creation from the settings of a run, and checks of user networks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from contnorm.bench.config.schema import NormConfig
from contnorm.bench.models.user_norms import find_run_norm
from contnorm.checks import MAX_AUTO_GROUPS, auto_groups
from contnorm.detect import DetectedNorm, detect_norm
from contnorm.errors import UserError
from contnorm.kernels.reference import backward_would_crash, group_norm_in_layout
from contnorm.norms.switchable import SwitchNorm1d, SwitchNorm2d, SwitchNorm3d
from contnorm.registry import Dim, NormInfo, build_norm, layer_parameters, norm_class, numbered_name

NormMaker = Callable[[int], nn.Module]


def norm_maker(config: NormConfig, dim: Dim, total_steps: int) -> NormMaker:
    """Function that creates the norm of a run for a number of channels."""
    spec, groups = find_run_norm(config)
    if config.layers == "stock":
        stock = _stock_maker(spec, groups, config, dim)
        return lambda channels: mark_layer(stock(channels))  # stock CN consists of a GN and a BN
    options = norm_options(config, spec, groups, total_steps)
    norm_class(spec, dim)  # a user's norm may not have layers for this dimension

    def make(channels: int) -> nn.Module:
        own = {}
        if options.get("num_groups") == "auto":
            # Networks with 1d norms are fully connected here, so their input is (N, C). Settings of version 0.1 keep
            # the rule of that version.
            own["num_groups"] = (
                auto_groups(channels, one_position=dim == 1)
                if dim == 1 or config.auto_channels != 1
                else next(groups for groups in range(min(channels, MAX_AUTO_GROUPS), 0, -1) if channels % groups == 0)
            )
        layer = build_norm(spec, channels, dim, options | own)
        return mark_layer(layer) if spec.layers else layer  # a user's can't be recognized by its class

    return make


def norm_options(config: NormConfig, spec: NormInfo, groups: int | None, total_steps: int) -> dict[str, Any]:
    """Options of the layers of a run's norm.

    Args:
        config: The settings of the norm.
        spec: The norm.
        groups: Number of groups in its name, if any.
        total_steps: Number of steps of the run.

    Example:
        >>> from contnorm.registry import NORMS
        >>> norm_options(NormConfig("bn", momentum=0.2), NORMS["bn"], None, 100)
        {'momentum': 0.2}
    """
    options: dict[str, Any] = dict(config.options)
    if config.momentum is not None and (spec.layers or spec.keeps_moments):
        if spec.layers and "momentum" not in layer_parameters(norm_class(spec, min(spec.layers))):
            raise ValueError(f"norm.momentum={config.momentum!r}: norm {spec.name!r} has no argument momentum.")
        options["momentum"] = None if config.momentum == "cumulative" else config.momentum
    if spec.name == "brn" and config.schedule == "scaled":
        options["total_steps"] = total_steps
    return {**options, "num_groups": groups or config.groups} if spec.grouped else options


STOCK_NORMS = ("none", "bn", "gn", "sn", "cn")
_BATCH = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_SWITCH = {1: SwitchNorm1d, 2: SwitchNorm2d, 3: SwitchNorm3d}


class StockGroupNorm(nn.GroupNorm):
    """Torch's group norm that also accepts, on a CPU, a channels_last input that requires no gradient.

    For such an input, torch's backward pass crashes the process.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)
        >>> StockGroupNorm(2, 4)(x).sum().backward()
    """

    normalizes_as: ClassVar[type[nn.Module]] = nn.GroupNorm

    def forward(self, input: Tensor) -> Tensor:
        if backward_would_crash(input, self.weight, self.bias):
            return group_norm_in_layout(input, self.num_groups, self.weight, self.bias, self.eps)
        return super().forward(input)


def _stock_maker(spec: NormInfo, groups: int | None, config: NormConfig, dim: Dim) -> NormMaker:
    """Function that creates a norm of torch's layers only, as timed in the paper: no fused kernels and no checks.

    Continual norm is two layers: group norm without affine parameters, then batch norm. Torch has no switchable norm,
    so the one of this package is used.
    """
    num_groups = groups or config.groups
    known = spec.name in STOCK_NORMS and not config.options
    if not known or isinstance(num_groups, str) or isinstance(config.momentum, str):
        raise ValueError(
            f"norm.layers='stock': torch has layers for {', '.join(STOCK_NORMS)}, without own settings, "
            f"norm.groups=auto and norm.momentum=cumulative. Use norm.layers='ours'."
        )
    momentum = 0.1 if config.momentum is None else config.momentum
    makers: dict[str, NormMaker] = {
        "none": lambda channels: nn.Identity(),
        "bn": lambda channels: _BATCH[dim](channels, momentum=momentum),
        "gn": lambda channels: StockGroupNorm(num_groups, channels),
        "sn": lambda channels: _SWITCH[dim](channels, momentum=momentum),
        "cn": lambda channels: nn.Sequential(
            nn.GroupNorm(num_groups, channels, affine=False), _BATCH[dim](channels, momentum=momentum)
        ),
    }
    return makers[spec.name]


_MARK = "_contnorm_made_by_run"  # an attribute, so that a deep copy of a layer has it too
PART = "_contnorm_part_of_norm"  # marks the modules inside such a layer
_OTHER = re.compile(r"norm(?!al)|LRN", re.IGNORECASE)  # LayerNorm, RMSNorm, ...; not Normalize
_WEIGHTS = re.compile(r"weight_?norm|spectral_?norm", re.IGNORECASE)  # these normalize weights, not activations


def mark_layer(layer: nn.Module) -> nn.Module:
    """Mark a layer as one of the run's norm. A layer that consists of others counts as one, a sequence as its parts."""
    layers = list(layer) if isinstance(layer, nn.Sequential) else [layer]
    for module in (part for outer in layers for part in outer.modules()):
        setattr(module, PART, True)
    for outer in layers:
        delattr(outer, PART)
        setattr(outer, _MARK, True)
    return layer


def count_norms(model: nn.Module) -> dict[str, int]:
    """Count the normalization layers of a network by class, with the number of groups if they have one.

    Example:
        >>> count_norms(nn.Sequential(nn.BatchNorm2d(8), nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)))
        {'BatchNorm2d': 1, 'GroupNorm(4)': 2}
    """
    return dict(Counter(_label(module) for module in _norm_layers(model).values()))


def check_norms(model: nn.Module, name: str, norm: NormConfig) -> None:
    """Reject a network without a layer of the run's norm: its record would name a norm that it does not use.

    Layers created by ``norm(channels)`` count, and so do copies of them and layers of the same kind. A network may have
    other norms too, such as layer norms in attention.

    Args:
        model: The network.
        name: Name of the network in the settings.
        norm: Settings of the run's norm.

    Raises:
        UserError: If no layer is of the run's norm.
    """
    layers = _norm_layers(model)
    spec, groups = find_run_norm(norm)
    expected = groups or norm.groups
    for layer in layers.values():
        kind = detect_norm(layer)
        is_same = isinstance(kind, DetectedNorm) and kind.norm == spec.name
        if is_same and spec.grouped and expected != "auto":
            is_same = kind.options.get("num_groups") == expected  # type: ignore[union-attr]
        if is_same or hasattr(layer, _MARK) or type(layer) in spec.layers.values():
            return
    if spec.name == "none" and not layers:
        return
    label = numbered_name(spec, expected) if spec.grouped and expected != "auto" else spec.name
    others = ", ".join(f"{path or 'the network'} ({_label(layer)})" for path, layer in layers.items())
    raise UserError(
        f"model {name!r}: none of its normalization layers is the run's norm {label!r}; it has {others or 'none'}. "
        f"Create them with the norm(channels) that make(input_shape, num_outputs, norm) receives, or use --norm none."
    )


def _norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    layers = {}
    for path, module in model.named_modules():
        name, is_leaf = type(module).__name__, next(module.children(), None) is None
        named_norm = is_leaf and _OTHER.search(name) is not None and _WEIGHTS.search(name) is None
        is_norm = hasattr(module, _MARK) or detect_norm(module) is not None or named_norm
        if is_norm and not hasattr(module, PART):  # marked: also the identity for norm "none"
            layers[path] = module
    return layers


def _label(module: nn.Module) -> str:
    kind = detect_norm(module)
    groups = kind.options.get("num_groups") if isinstance(kind, DetectedNorm) else None
    return type(module).__name__ + (f"({groups})" if groups is not None else "")
