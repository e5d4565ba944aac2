"""The float64 formulas of `tests/float64_norms.py` as references of `contnorm.testing.check_norm`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.registry import NormInfo
from contnorm.testing import NormReference
from tests.float64_norms import FLOAT64_NORMS, Setting


def f64(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().double().cpu().numpy().copy()


def setting(layer: nn.Module) -> Setting:
    """Arguments of the formula of a layer."""
    extra = {
        name: f64(getattr(layer, name))
        for name in ("mean_weight", "var_weight", "phi", "v", "tau", "alpha", "distribution_factor")
        if hasattr(layer, name)
    }
    if hasattr(layer, "k"):
        extra["k"] = np.asarray(layer.k, dtype=np.float64)
    return Setting(
        weight=f64(getattr(layer, "weight", None)),
        bias=f64(getattr(layer, "bias", None)),
        eps=float(getattr(layer, "eps", 0.0)),
        groups=int(getattr(layer, "num_groups", 1)),
        extra=extra,
    )


def reference(spec: NormInfo) -> NormReference:
    """The expected output and running moments of a layer, by the formula of its norm."""
    formula: Any = FLOAT64_NORMS[spec.name]

    def expected(layer: Any, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        mean = getattr(layer, "running_mean", None)
        if mean is None:
            return torch.from_numpy(np.asarray(formula.train(f64(x), setting(layer))[0])), None
        old = f64(mean), f64(layer.running_var)
        if not layer.training:
            y = formula.evaluate(f64(x), *old, setting(layer))
            return torch.from_numpy(y), tuple(map(torch.from_numpy, old))  # type: ignore[return-value]
        share = 1 / (layer.num_batches_tracked.item() + 1) if layer.momentum is None else layer.momentum
        if hasattr(formula, "mixed"):  # the running moments are part of what normalizes the batch
            y, mixed = formula.mixed(f64(x), old, share, setting(layer))
            return torch.from_numpy(y), tuple(map(torch.from_numpy, mixed))  # type: ignore[return-value]
        y, *moments = formula.train(f64(x), setting(layer))
        moved = formula.moved(old, moments, share)
        return torch.from_numpy(y), tuple(map(torch.from_numpy, moved))  # type: ignore[return-value]

    return expected
