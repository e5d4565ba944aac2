"""Batch renormalization (Ioffe, 2017), in the form the continual normalization paper prints.

The paper's formula divides by ``sigma + eps``, not ``sqrt(sigma^2 + eps)``, and both factors stop their gradient.
The running spread is an average of *standard deviations*, biased; it is kept squared, under batch norm's own name.

On CUDA, Triton kernels compute it (`contnorm.kernels.triton.row_moments`); the code here is the definition, and what
runs elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contnorm.checks import (
    check_batch,
    check_eps,
    check_input,
    check_moments,
    check_number,
    check_parameters,
    check_weight_of_batch,
    moves_moments,
    statistics_dtype,
)
from contnorm.functional.batch import (
    ANY_RANK,
    apply_affine,
    channel_moments,
    channels_of,
    empty_like_input,
    update_moments,
    uses_batch_moments,
)
from contnorm.kernels import Kernel, chosen_kernel
from contnorm.kernels.pivot import channel_pivot, per_channel
from contnorm.kernels.triton import row_moments as rows

__all__ = ["batch_renorm"]


def batch_renorm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.01,
    eps: float = 1e-3,
    r_max: float | Tensor = 1.0,
    d_max: float | Tensor = 0.0,
    *,
    r: Tensor | None = None,
    d: Tensor | None = None,
    kernel: Kernel | None = None,
    caller: str = "batch_renorm",
) -> Tensor:
    r"""Batch renormalization.

    .. math::
        y = \gamma \left( r \, \frac{x - \mu_B}{\sigma_B + \epsilon} + d \right) + \beta, \quad
        r = \mathrm{clip}_{[1/r_{max}, r_{max}]} \frac{\sigma_B}{\sigma_r}, \quad
        d = \mathrm{clip}_{[-d_{max}, d_{max}]} \frac{\mu_B - \mu_r}{\sigma_r}

    Args:
        x: (N, C) or (N, C, *).
        running_mean: (C,), updated in place when ``training``.
        running_var: (C,), the square of the averaged standard deviation, likewise.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch; without running moments it always is.
        momentum: The weight of this batch in the running moments; a 0-dim tensor keeps it on the device.
        eps: Added to the standard deviation.
        r_max: The limit of r; 1 switches the correction of the spread off.
        d_max: The limit of d; 0 switches the correction of the mean off.
        r: (C,), used as it is in place of the clipped ratio.
        d: (C,), likewise.
        kernel: Which arithmetic to use; None reads ``CONTNORM_KERNEL``. See `contnorm.kernels`.
        caller: Whom an error message names.

    Example:
        >>> x, mean, var = torch.tensor([[0.0], [2.0]]), torch.tensor([0.0]), torch.tensor([4.0])
        >>> batch_renorm(x, mean, var, training=True, eps=1e-12, r_max=3.0, d_max=5.0)  # = (x - 0) / 2
        tensor([[0.],
                [1.]])
    """
    check_input(x, ANY_RANK, channels_of(running_mean, weight), caller)
    eps = check_eps(eps, caller)
    momentum = check_weight_of_batch(momentum, caller)
    check_moments(running_mean, running_var, caller)
    check_parameters(x, weight, bias, caller)
    limits = _checked_limits(r_max, d_max, caller)
    _check_factors(x, r, d, caller)
    kernel = chosen_kernel(kernel, caller)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    by_batch = uses_batch_moments(training, running_mean)
    if by_batch:
        check_batch(x, eps, caller)
    moments, parameters = (running_mean, running_var), (weight, bias)
    chosen = r is not None or d is not None
    if not chosen and rows.suits(x, parameters, moments, (momentum, *limits), kernel, caller):
        return rows.renorm(_again, x, *moments, parameters, by_batch, momentum, eps, *limits)
    return _in_torch(x, *moments, *parameters, by_batch, momentum, eps, *limits, r, d)


def _checked_limits(r_max: float | Tensor, d_max: float | Tensor, caller: str) -> tuple[float | Tensor, float | Tensor]:
    """Limits that are numbers lie in their range; tensors are not looked at, which would wait for the device."""
    return (
        r_max if isinstance(r_max, Tensor) else check_number(r_max, 1, "r_max", caller),
        d_max if isinstance(d_max, Tensor) else check_number(d_max, 0, "d_max", caller),
    )


def _check_factors(x: Tensor, r: Tensor | None, d: Tensor | None, caller: str) -> None:
    for name, factor in (("r", r), ("d", d)):
        if factor is not None and factor.shape != x.shape[1:2]:
            raise ValueError(
                f"{caller}: {name} has shape {tuple(factor.shape)}, and must have ({x.shape[1]},): one value for each "
                f"channel."
            )


def _again(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    std: Tensor,
    r: Tensor,
    d: Tensor,
    by_batch: bool,
    eps: float,
) -> Tensor:
    """What the kernels gave, for derivatives that they have not; no running moment is moved."""
    if by_batch:
        return _in_torch(x, None, None, weight, bias, True, 0.0, eps, 1.0, 0.0, r, d)
    return _in_torch(x, mean, std.square(), weight, bias, False, 0.0, eps, 1.0, 0.0, None, None)


def _in_torch(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    by_batch: bool,
    momentum: float | Tensor,
    eps: float,
    r_max: float | Tensor,
    d_max: float | Tensor,
    r: Tensor | None,
    d: Tensor | None,
) -> Tensor:
    dtype, rank = statistics_dtype(x), x.dim()
    if not by_batch:
        assert running_mean is not None and running_var is not None
        rstd = 1 / (running_var.to(dtype).sqrt() + eps)
        centred = x.to(dtype) - per_channel(running_mean.to(dtype), rank)
        return apply_affine(centred * per_channel(rstd, rank), weight, bias).to(x.dtype)

    at = channel_pivot(x)
    shifted = x.to(dtype) - per_channel(at, rank)
    mean, var = channel_moments(shifted)
    std = _deviation(var)
    if running_mean is not None and running_var is not None:
        ratio, offset = _clipped(mean, std, running_mean.to(dtype) - at, running_var.to(dtype), r_max, d_max)
        r, d = ratio if r is None else r, offset if d is None else d
    normalized = (shifted - per_channel(mean, rank)) * per_channel(1 / (std + eps), rank)
    if r is not None:
        normalized = normalized * per_channel(r.to(dtype), rank)
    if d is not None:
        normalized = normalized + per_channel(d.to(dtype), rank)
    _update(running_mean, running_var, mean + at, std, momentum)
    return apply_affine(normalized, weight, bias).to(x.dtype)


def _deviation(var: Tensor) -> Tensor:
    """The square root; where nothing varies, its slope is taken as zero and not as infinite.

    A channel whose inputs have all gone dead is such a one, and no-number from it would spoil the whole network.
    """
    varies = var != 0  # also where it is no number, which stays visible
    return torch.where(varies, var, 1.0).sqrt() * varies


def _clipped(
    mean: Tensor,
    std: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    r_max: float | Tensor,
    d_max: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """r and d, without gradient; a running spread of zero gives the limits, not a division by zero."""
    with torch.no_grad():
        running_std = running_var.sqrt().clamp_min(torch.finfo(running_var.dtype).tiny)
        top, reach = _limit(r_max, std), _limit(d_max, std)
        r = (std / running_std).clamp(1 / top, top)
        d = ((mean - running_mean) / running_std).clamp(-reach, reach)
    return r, d


def _limit(limit: float | Tensor, like: Tensor) -> Tensor:
    return torch.as_tensor(limit, dtype=like.dtype, device=like.device)


def _update(
    running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, std: Tensor, momentum: float | Tensor
) -> None:
    """Average the standard deviation, store its square."""
    if running_mean is None or running_var is None or not moves_moments(running_mean, momentum):
        return
    with torch.no_grad():
        running_std = running_var.to(std.dtype).sqrt()
        update_moments(running_mean, running_std, mean, std, momentum)
        running_var.copy_(running_std.square())
