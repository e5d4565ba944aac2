"""Batch normalization with torch's operator, and the update of running moments that all norms use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.checks import (
    check_batch,
    check_batch_weight,
    check_eps,
    check_input,
    check_moments,
    check_parameters,
    statistics_dtype,
    updates_moments,
)
from contnorm.kernels.pivot import per_channel
from contnorm.kernels.reference import batch_step, in_statistics_dtype

__all__ = [
    "ANY_RANK",
    "apply_affine",
    "batch_norm",
    "channel_moments",
    "channels_of",
    "check_arguments",
    "empty_like_input",
    "keep_values",
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
    """Batch normalization: bit-exact with ``F.batch_norm``, with argument checks.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the unbiased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variance.
        caller: The function or layer that error messages name.

    Example:
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> batch_norm(x, training=True, eps=1e-12)
        tensor([[-1.],
                [ 1.]])
    """
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps, caller)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    if not uses_batch_moments(training, running_mean):
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    check_batch(x, eps, caller)
    if isinstance(momentum, Tensor) and running_mean is not None and running_var is not None:
        signal = x
        if weight is not None and weight.dtype != statistics_dtype(x):  # all parameters are in half precision
            signal, weight, bias = in_statistics_dtype(x, weight, bias)
        y, moments = batch_step(signal, weight, bias, eps, moments=True)
        assert moments is not None
        update_moments(running_mean, running_var, moments.mean, moments.var, momentum)
        return y.to(x.dtype)
    factor = 0.0 if isinstance(momentum, Tensor) else momentum  # it is a tensor here only without running moments
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, factor, eps)


def uses_batch_moments(training: bool, running_mean: Tensor | None) -> bool:
    """Whether to normalize with the batch, as in torch: in training, and in evaluation without running moments."""
    return training or running_mean is None


def update_moments(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, momentum: float | Tensor
) -> None:
    """Update the running moments in place; with a momentum of 0 they do not change, even if the batch has NaNs."""
    if running_mean is None or running_var is None or not updates_moments(running_mean, momentum):
        return
    with torch.no_grad():
        for running, new in ((running_mean, mean), (running_var, var)):
            weight = momentum.to(new.dtype) if isinstance(momentum, Tensor) else momentum
            running.copy_(torch.lerp(running.to(new.dtype), new.detach(), weight))


def keep_values(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return copies of tensors of one shape that a compiled backward pass does not compute again.

    It may recompute values of the forward pass from buffers of a layer, such as the running moments and the counter of
    batches, which have changed by then. It does not recompute a concatenation.
    """
    return torch.stack(tensors).unbind()


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel, (C,) each."""
    var, mean = torch.var_mean(x, dim=[i for i in range(x.dim()) if i != 1], correction=0)
    return mean, var


def unbiased(var: Tensor, count: float) -> Tensor:
    """Convert a biased variance of ``count`` values to the unbiased one; for a single value, return it unchanged."""
    return var * (count / (count - 1)) if count > 1 else var


def apply_affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Multiply each channel by the weight and add the bias, if they are not None."""
    if weight is not None:
        x = x * per_channel(weight.to(x.dtype), x.dim())
    return x if bias is None else x + per_channel(bias.to(x.dtype), x.dim())


def empty_like_input(x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Return the output for an empty batch, connected to the parameters so that their gradients are zeros."""
    y = x.clone()
    for parameter in parameters:
        if parameter is not None:
            y = y + parameter.sum().to(x.dtype)
    return y


def check_arguments(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | Tensor,
    eps: float,
    caller: str,
) -> tuple[float | Tensor, float]:
    """Check the arguments that all norms with running moments have; return momentum and eps."""
    check_input(x, ANY_RANK, channels_of(running_mean, weight), caller)
    eps = check_eps(eps, caller)
    momentum = check_batch_weight(momentum, caller)
    check_moments(running_mean, running_var, caller)
    check_parameters(x, weight, bias, caller)
    return momentum, eps


def channels_of(running_mean: Tensor | None, weight: Tensor | None) -> int | None:
    """Return the number of channels of the running moments, or else of the weight; None if both are None."""
    vector = running_mean if running_mean is not None else weight
    return None if vector is None or vector.dim() == 0 else vector.shape[0]
