"""Batch normalization, by torch's own operator, and the update of running moments that all moment norms share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.checks import (
    check_batch,
    check_eps,
    check_input,
    check_moments,
    check_parameters,
    check_weight_of_batch,
    moves_moments,
    statistics_dtype,
)
from contnorm.kernels.pivot import per_channel
from contnorm.kernels.reference import batch_step, in_statistics_dtype

__all__ = [
    "ANY_RANK",
    "apply_affine",
    "batch_norm",
    "channel_moments",
    "channels_of",
    "empty_like_input",
    "unbiased",
    "update_moments",
    "uses_batch_moments",
]

ANY_RANK = (2, 3, 4, 5)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    caller: str = "batch_norm",
) -> Tensor:
    """Batch normalization: ``F.batch_norm``, bit for bit, with our checks.

    Args:
        x: (N, C) or (N, C, *).
        running_mean: (C,), updated in place when ``training``.
        running_var: (C,), likewise, with the unbiased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch; without running moments it always is.
        momentum: The weight of this batch in the running moments; a 0-dim tensor keeps it on the device.
        eps: Added to the variance.
        caller: Whom an error message names.

    Example:
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> batch_norm(x, training=True, eps=1e-12)
        tensor([[-1.],
                [ 1.]])
    """
    check_input(x, ANY_RANK, channels_of(running_mean, weight), caller)
    eps = check_eps(eps, caller)
    momentum = check_weight_of_batch(momentum, caller)
    check_moments(running_mean, running_var, caller)
    check_parameters(x, weight, bias, caller)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    if not uses_batch_moments(training, running_mean):
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    check_batch(x, eps, caller)
    if isinstance(momentum, Tensor) and running_mean is not None and running_var is not None:
        signal = x
        if weight is not None and weight.dtype != statistics_dtype(x):  # a layer wholly in half precision
            signal, weight, bias = in_statistics_dtype(x, weight, bias)
        y, found = batch_step(signal, weight, bias, eps, moments=True)
        assert found is not None
        update_moments(running_mean, running_var, found.mean, found.var, momentum)
        return y.to(x.dtype)
    share = 0.0 if isinstance(momentum, Tensor) else momentum  # a tensor comes here only without running moments
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, share, eps)


def uses_batch_moments(training: bool, running_mean: Tensor | None) -> bool:
    """Torch's rule: in training, and in evaluation where nothing else was kept."""
    return training or running_mean is None


def update_moments(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, momentum: float | Tensor
) -> None:
    """Move the running moments towards a batch's, in place; a momentum of 0 leaves them, whatever the batch holds."""
    if running_mean is None or running_var is None or not moves_moments(running_mean, momentum):
        return
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, var)):
            weight = momentum.to(new.dtype) if isinstance(momentum, Tensor) else momentum
            running.copy_(torch.lerp(running.to(new.dtype), new.detach(), weight))


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """(C,) each: mean and biased variance of every channel."""
    var, mean = torch.var_mean(x, dim=[i for i in range(x.dim()) if i != 1], correction=0)
    return mean, var


def unbiased(var: Tensor, count: int) -> Tensor:
    """The unbiased variance of so many values, as batch norm stores it; of a single value there is none to correct."""
    return var * (count / (count - 1)) if count > 1 else var


def apply_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scale and shift each channel, where there is a weight and a bias."""
    if weight is not None:
        x = x * per_channel(weight.to(x.dtype), x.dim())
    return x if bias is None else x + per_channel(bias.to(x.dtype), x.dim())


def empty_like_input(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """The output for an empty batch: empty, and still joined to the parameters, so that their gradients are zeros."""
    y = x.clone()
    for parameter in parameters:
        if parameter is not None:
            y = y + parameter.sum().to(x.dtype)
    return y


def channels_of(running_mean: Tensor | None, weight: Tensor | None) -> int | None:
    """The number of channels that the moments, or else the weight, are for; None where nothing tells."""
    known = running_mean if running_mean is not None else weight
    return None if known is None or known.dim() == 0 else known.shape[0]
