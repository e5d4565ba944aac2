"""Helpers of the conformance tests: norms with random parameters, inputs, and float64 references."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.registry import NormSpec, create_norm
from tests.float64_norms import FLOAT64_NORMS, Setting

CHANNELS = 8
GROUPS = 2  # groups of four: on (N, C) input a group of two would always be plus and minus one
# One shape a rank, no two sizes equal where that could hide a transposition.
SHAPES = {2: (6, CHANNELS), 3: (5, CHANNELS, 7), 4: (4, CHANNELS, 5, 3), 5: (3, CHANNELS, 2, 3, 4)}
DIM_OF_RANK = {2: 1, 3: 1, 4: 2, 5: 3}


def make(spec: NormSpec, rank: int = 4, **options: Any) -> nn.Module:
    """The norm with random affine (and mixture) parameters, so that each of them has an effect."""
    if spec.grouped:
        options.setdefault("num_groups", GROUPS)
    options = {**spec.preset, **options}
    layer = create_norm(spec.name, CHANNELS, dim=DIM_OF_RANK[rank], **options)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 1)
    return layer


def data(rank: int = 4, seed: int = 0, mean: float = 0.3, spread: float = 1.7, size: int | None = None) -> Tensor:
    """Input whose channels differ in mean and variance."""
    shape = SHAPES[rank] if size is None else (size, *SHAPES[rank][1:])
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    channel = torch.arange(CHANNELS, dtype=torch.float64).reshape(1, -1, *[1] * (rank - 2))
    return (x * (1 + channel / CHANNELS) + channel / 4) * spread + mean


def f64(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().double().cpu().numpy().copy()


def setting(layer: nn.Module, spec: NormSpec) -> Setting:
    extra = {name: f64(getattr(layer, name)) for name in ("mean_weight", "var_weight") if hasattr(layer, name)}
    return Setting(
        weight=f64(getattr(layer, "weight", None)),
        bias=f64(getattr(layer, "bias", None)),
        eps=float(getattr(layer, "eps", 0.0)),
        groups=GROUPS,
        extra=extra,
    )


def reference_train(spec: NormSpec, layer: nn.Module, x: Tensor) -> tuple[Tensor, Any, Any]:
    y, mean, var = FLOAT64_NORMS[spec.name].train(f64(x), setting(layer, spec))
    return torch.from_numpy(np.asarray(y)), mean, var


def reference_eval(spec: NormSpec, layer: nn.Module, x: Tensor) -> Tensor:
    reference: Any = FLOAT64_NORMS[spec.name]
    if not spec.keeps_moments or layer.running_mean is None:
        return reference_train(spec, layer, x)[0]
    return torch.from_numpy(
        reference.evaluate(f64(x), f64(layer.running_mean), f64(layer.running_var), setting(layer, spec))
    )


def close(actual: Tensor, expected: Tensor | Any, tolerance: float) -> None:
    """Within a tolerance of the larger of 1 and the value: outputs of a norm are of the order of 1."""
    wanted = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    torch.testing.assert_close(actual.detach().double().cpu(), wanted, atol=tolerance, rtol=tolerance)
