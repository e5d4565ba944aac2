"""The norm of a network, from the settings of a run, and with the ReLU that follows it."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.bench.config.schema import NormConfig
from contnorm.checks import MAX_AUTO_GROUPS, auto_groups
from contnorm.factory import Dim, create_norm
from contnorm.layers.continual import ContinualNormBase
from contnorm.layers.stock import stock_norm
from contnorm.registry import find_norm

__all__ = ["NormMaker", "norm_maker", "normed_relu"]

NormMaker = Callable[[int], nn.Module]


def norm_maker(config: NormConfig, dim: Dim, total_steps: int) -> NormMaker:
    """How to make a norm for so many channels, from the settings of a run."""
    spec, groups = find_norm(config.name, "norm.name")
    if config.layers == "stock":
        return _stock_maker(spec.name, groups, config, dim)
    options: dict[str, object] = {}
    if config.momentum is not None and spec.keeps_moments:
        options["momentum"] = None if config.momentum == "cumulative" else config.momentum
    if spec.name == "brn" and config.schedule == "scaled":
        options["total_steps"] = total_steps
    if not spec.grouped:
        return lambda channels: create_norm(spec.name, channels, dim=dim, **options)

    def grouped(channels: int) -> nn.Module:
        of_groups = groups or config.groups
        number = of_groups if isinstance(of_groups, int) else _auto_groups(channels, dim, config.auto_channels)
        return create_norm(spec.name, channels, dim=dim, num_groups=number, **options)

    return grouped


def _auto_groups(channels: int, dim: Dim, least_channels: int) -> int:
    """The groups for ``norm.groups="auto"``, by the rule of the settings: runs of version 0.1 keep its rule.

    Networks with 1d norms are fully connected here, so that their input is (N, C), for which both rules are one.
    """
    if dim == 1 or least_channels != 1:
        return auto_groups(channels, one_position=dim == 1)
    return next(groups for groups in range(min(channels, MAX_AUTO_GROUPS), 0, -1) if channels % groups == 0)


def _stock_maker(name: str, groups: int | None, config: NormConfig, dim: Dim) -> NormMaker:
    of_groups = groups or config.groups
    if isinstance(of_groups, str) or config.momentum == "cumulative":
        raise ValueError(
            "norm.layers='stock': torch's layers take groups by number and momentum as one, so norm.groups='auto' and "
            "norm.momentum='cumulative' are for ours alone."
        )
    momentum = 0.1 if config.momentum is None else config.momentum
    return lambda channels: stock_norm(name, channels, dim, of_groups, momentum)


def normed_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(norm(x) + residual)``; continual norm does it in its own kernel, where it has one."""
    if isinstance(norm, ContinualNormBase):
        y: Tensor = norm(x, residual, relu=True)
        return y
    y = norm(x)
    return F.relu(y if residual is None else y + residual)
