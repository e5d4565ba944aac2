"""The norm of a network, from the settings of a run, and with the ReLU that follows it."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.catalog import find_norm
from contnorm.config import NormConfig
from contnorm.factory import Dim, create_norm
from contnorm.layers.continual import ContinualNormBase

__all__ = ["NormMaker", "norm_maker", "normed_relu"]

NormMaker = Callable[[int], nn.Module]


def norm_maker(config: NormConfig, dim: Dim, total_steps: int) -> NormMaker:
    """How to make a norm for so many channels, from the settings of a run."""
    spec, groups = find_norm(config.name, "norm.name")
    options: dict[str, object] = {}
    if spec.grouped:
        options["num_groups"] = groups or config.groups
    if config.momentum is not None and spec.keeps_moments:
        options["momentum"] = None if config.momentum == "cumulative" else config.momentum
    if spec.name == "brn" and config.schedule == "scaled":
        options["total_steps"] = total_steps
    return lambda channels: create_norm(spec.name, channels, dim=dim, **options)


def normed_relu(norm: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """``relu(norm(x) + residual)``; continual norm does it in its own kernel, where it has one."""
    if isinstance(norm, ContinualNormBase):
        y: Tensor = norm(x, residual, relu=True)
        return y
    y = norm(x)
    return F.relu(y if residual is None else y + residual)
