"""Deterministic inputs of the comparisons with timm, and the layers of timm if it is installed."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# Its layers compute moments in float32, also for float64 input.
TOLERANCE = 2e-6


def values(shape: tuple[int, ...], scale: float = 1.0, shift: float = 0.0) -> Tensor:
    i = torch.arange(prod(shape), dtype=torch.float64)
    return (torch.sin(i * 1.7 + 0.3) * scale + shift + (i % 5) / 7).reshape(shape)


def with_values(layer: Any, act_parameter: str) -> nn.Module:
    """Set the parameters of a layer of 4 channels."""
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(values((4,), 0.5, 1.0))
        layer.bias.copy_(values((4,), 0.3, -0.2))
        if getattr(layer, act_parameter) is not None:
            getattr(layer, act_parameter).copy_(values((4,), 0.4, 0.1))
    result: nn.Module = layer
    return result


def output(layer: nn.Module) -> Tensor:
    y: Tensor = layer(values((2, 4, 2, 3)))
    return y.detach()


def timm_layers() -> Any:
    return pytest.importorskip("timm.layers", reason="timm is not installed", exc_type=ImportError)
