"""Norm layers of a network from the settings of a run, and the fused norm and ReLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.bench.config.schema import NormConfig
from contnorm.checks import MAX_AUTO_GROUPS, auto_groups
from contnorm.layers.continual import ContinualNormBase
from contnorm.layers.stock import stock_norm
from contnorm.registry import Dim, NormSpec, create_norm, find_norm

__all__ = ["NormMaker", "norm_maker", "norm_options", "normed_relu"]

NormMaker = Callable[[int], nn.Module]


def norm_maker(config: NormConfig, dim: Dim, total_steps: int) -> NormMaker:
    """Function that creates the norm of a run for a number of channels."""
    spec, groups = find_norm(config.name, "norm.name")
    if config.layers == "stock":
        return _stock_maker(spec.name, groups, config, dim)
    options = _options(spec, config, total_steps)
    if not spec.grouped:
        return lambda channels: create_norm(spec.name, channels, dim=dim, **options)

    def grouped(channels: int) -> nn.Module:
        requested = groups or config.groups
        num_groups = requested if isinstance(requested, int) else _auto_groups(channels, dim, config.auto_channels)
        return create_norm(spec.name, channels, dim=dim, num_groups=num_groups, **options)

    return grouped


def _options(spec: NormSpec, config: NormConfig, total_steps: int) -> dict[str, object]:
    """Options of a norm that do not depend on the number of channels."""
    options: dict[str, object] = {}
    if config.momentum is not None and spec.keeps_moments:
        options["momentum"] = None if config.momentum == "cumulative" else config.momentum
    if spec.name == "brn" and config.schedule == "scaled":
        options["total_steps"] = total_steps
    return options


def norm_options(config: NormConfig, total_steps: int) -> dict[str, Any]:
    """Options for `convert_norm` that give a network the norm of a run.

    Example:
        >>> norm_options(NormConfig("cn8"), 100), norm_options(NormConfig("bn", momentum=0.2), 100)
        ({'num_groups': 8}, {'momentum': 0.2})
    """
    spec, groups = find_norm(config.name, "norm.name")
    if config.layers == "stock":
        raise ValueError("norm.layers='stock' is for the networks of this package. Use norm.layers='ours'.")
    options = _options(spec, config, total_steps)
    return {**options, "num_groups": groups or config.groups} if spec.grouped else options


def _auto_groups(channels: int, dim: Dim, least_channels: int) -> int:
    """Number of groups for ``norm.groups="auto"``; settings of version 0.1 keep the rule of that version.

    Networks with 1d norms are fully connected here, so their input is (N, C), for which both rules are the same.
    """
    if dim == 1 or least_channels != 1:
        return auto_groups(channels, one_position=dim == 1)
    return next(groups for groups in range(min(channels, MAX_AUTO_GROUPS), 0, -1) if channels % groups == 0)


def _stock_maker(name: str, groups: int | None, config: NormConfig, dim: Dim) -> NormMaker:
    num_groups = groups or config.groups
    if isinstance(num_groups, str) or config.momentum == "cumulative":
        raise ValueError(
            "norm.layers='stock': torch's layers take groups by number and momentum as one, so norm.groups='auto' and "
            "norm.momentum='cumulative' are for ours alone."
        )
    momentum = 0.1 if config.momentum is None else config.momentum
    return lambda channels: stock_norm(name, channels, dim, num_groups, momentum)


def normed_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(norm(x) + residual)``; continual norm computes it in a fused kernel if one is available."""
    if isinstance(norm, ContinualNormBase):
        y: Tensor = norm(x, residual, relu=True)
        return y
    y = norm(x)
    return F.relu(y if residual is None else y + residual)
