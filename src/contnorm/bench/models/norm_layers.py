"""Norm layers of a network: creation from the settings of a run, and checks of user networks."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from contnorm.bench.components import is_user_code, load_component
from contnorm.bench.config.schema import NormConfig
from contnorm.bench.models.user_norms import find_run_norm
from contnorm.checks import MAX_AUTO_GROUPS, auto_groups
from contnorm.convert.detect import DetectedNorm, detect_norm
from contnorm.errors import UserError
from contnorm.kernels.reference import backward_would_crash, group_norm_in_layout
from contnorm.norms.switchable import SwitchNorm1d, SwitchNorm2d, SwitchNorm3d
from contnorm.registry import Dim, NormInfo, build_norm, find_norm, layer_parameters, norm_class, numbered_name

__all__ = [
    "PART",
    "NormMaker",
    "check_norms",
    "count_norms",
    "mark_layer",
    "mark_norms",
    "norm_maker",
    "norm_options",
    "record_norm_calls",
]

NormMaker = Callable[[int], nn.Module]


def norm_maker(config: NormConfig, dim: Dim, total_steps: int) -> NormMaker:
    """Function that creates the norm of a run for a number of channels."""
    spec, groups = find_run_norm(config)
    if config.layers == "stock":
        return mark_norms(_stock_maker(spec, groups, config, dim))  # stock CN consists of a GN and a BN
    options = _options(spec, config, total_steps)
    norm_class(spec, dim)  # a user's norm may not have layers for this dimension
    if not spec.grouped:
        return _marked_if_users(spec, lambda channels: build_norm(spec, channels, dim, options))

    def grouped(channels: int) -> nn.Module:
        requested = groups or config.groups
        num_groups = requested if isinstance(requested, int) else _auto_groups(channels, dim, config.auto_channels)
        return build_norm(spec, channels, dim, {**options, "num_groups": num_groups})

    return _marked_if_users(spec, grouped)


def _marked_if_users(spec: NormInfo, make: NormMaker) -> NormMaker:
    """Mark the layers of a user's norm, which can't be recognized by their class."""
    return mark_norms(make) if spec.layers else make


def _options(spec: NormInfo, config: NormConfig, total_steps: int) -> dict[str, object]:
    """Options of a norm that do not depend on the number of channels."""
    options: dict[str, object] = dict(config.options)
    momentum = {"momentum": None if config.momentum == "cumulative" else config.momentum}
    if spec.layers:
        if config.momentum is not None and "momentum" not in layer_parameters(norm_class(spec, min(spec.layers))):
            raise ValueError(f"norm.momentum={config.momentum!r}: norm {spec.name!r} has no argument momentum.")
        return options if config.momentum is None else {**options, **momentum}
    if config.momentum is not None and spec.keeps_moments:
        options |= momentum
    if spec.name == "brn" and config.schedule == "scaled":
        options["total_steps"] = total_steps
    return options


def norm_options(config: NormConfig, spec: NormInfo, total_steps: int) -> dict[str, Any]:
    """Options for `convert_norm` that give a network the norm of a run.

    Example:
        >>> norm_options(NormConfig("cn8"), find_norm("cn")[0], 100)
        {'num_groups': 8}
        >>> norm_options(NormConfig("bn", momentum=0.2), find_norm("bn")[0], 100)
        {'momentum': 0.2}
    """
    if config.layers == "stock":
        raise ValueError("norm.layers='stock' is for the networks of this package. Use norm.layers='ours'.")
    options = _options(spec, config, total_steps)
    if not spec.grouped:
        return options
    groups = None if is_user_code(config.name) else find_norm(config.name)[1]
    return {**options, "num_groups": groups or config.groups}


def _auto_groups(channels: int, dim: Dim, least_channels: int) -> int:
    """Number of groups for ``norm.groups="auto"``; settings of version 0.1 keep the rule of that version.

    Networks with 1d norms are fully connected here, so their input is (N, C), for which both rules are the same.
    """
    if dim == 1 or least_channels != 1:
        return auto_groups(channels, one_position=dim == 1)
    return next(groups for groups in range(min(channels, MAX_AUTO_GROUPS), 0, -1) if channels % groups == 0)


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
    if spec.name not in STOCK_NORMS:
        raise ValueError(
            f"norm.layers='stock': torch has no layers for norm {spec.name!r}. Use one of {', '.join(STOCK_NORMS)}."
        )
    if config.options:
        raise ValueError(f"norm.layers='stock': norm.{config.options[0][0]} can't be set. Use norm.layers='ours'.")
    num_groups = groups or config.groups
    if isinstance(num_groups, str) or config.momentum == "cumulative":
        raise ValueError(
            "norm.layers='stock': torch's layers do not support norm.groups='auto' or norm.momentum='cumulative'. Set "
            "numbers, or use norm.layers='ours'."
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
PART = "_contnorm_part_of_norm"  # of modules inside such a layer
_OTHER = re.compile(r"norm(?!al)|LRN", re.IGNORECASE)  # LayerNorm, RMSNorm, ...; not Normalize
_WEIGHTS = re.compile(r"weight_?norm|spectral_?norm", re.IGNORECASE)  # these normalize weights, not activations
SHOWN = 3  # layers named in a message


def mark_norms(make: NormMaker) -> NormMaker:
    """Wrap a norm maker so that the layers it creates are marked and can be identified later."""

    def make_marked(channels: int) -> nn.Module:
        return mark_layer(make(channels))

    return make_marked


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


@contextmanager
def record_norm_calls(model: nn.Module) -> Iterator[set[nn.Module]]:
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
    norm_label = _norm_label(norm)
    if not others and norm_label == "none":
        return
    if not others:
        raise UserError(
            f"model {name!r}: has no normalization layer, but the run's norm is {norm_label!r}. Create the layers with "
            f'the norm(channels) that make(input_shape, num_outputs, norm) receives, or use norm="none" (--norm none).'
        )
    rest = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
    raise UserError(
        f"model {name!r}: none of its normalization layers is the run's norm {norm_label!r}, but "
        f"{', '.join(others[:SHOWN])}{rest}. Create them with the norm(channels) that make(input_shape, "
        f"num_outputs, norm) receives."
    )


def _norm_label(norm: NormConfig) -> str:
    """Return the name of a norm with its number of groups, if it has one."""
    if is_user_code(norm.name):
        return norm.name
    spec, groups = find_norm(norm.name)
    requested = groups or norm.groups
    return numbered_name(spec, requested) if spec.grouped and requested != "auto" else spec.name


def _norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if _normalizes(module)}


def _normalizes(module: nn.Module) -> bool:
    if hasattr(module, PART):
        return False
    if detect_norm(module) is not None:
        return True
    if hasattr(module, _MARK):  # such as the identity for norm "none", or a layer of a user's norm
        return True
    name = type(module).__name__
    leaf = next(module.children(), None) is None
    return leaf and _OTHER.search(name) is not None and _WEIGHTS.search(name) is None


def _is_of_run(module: nn.Module, norm: NormConfig) -> bool:
    if hasattr(module, _MARK):
        return True
    if is_user_code(norm.name):
        return _is_defined_as(type(module), norm)
    kind = detect_norm(module)
    spec, groups = find_norm(norm.name)
    if not isinstance(kind, DetectedNorm) or kind.norm != spec.name:
        return False
    expected = groups or norm.groups
    return not spec.grouped or expected == "auto" or kind.options.get("num_groups") == expected


def _is_defined_as(cls: type, norm: NormConfig) -> bool:
    """Whether a class is the one that the name of user code refers to, also if its file was imported as a module."""
    if load_component("norm", norm.name, norm.code) is cls:
        return True
    path, _, attribute = norm.name.rpartition(":")
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and cls.__qualname__ == attribute and Path(file).resolve() == Path(path).resolve()


def _label(module: nn.Module) -> str:
    kind = detect_norm(module)
    groups = kind.options.get("num_groups") if isinstance(kind, DetectedNorm) else None
    return type(module).__name__ + (f"({groups})" if groups is not None else "")
