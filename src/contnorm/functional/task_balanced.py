"""Task-balanced batch normalization, TBBN (Cha et al., CVPR 2023).

The S stream samples of a batch are dealt into r parts: sample i belongs to part i mod r. All M memory samples belong to
every part. With the mean μ_j and biased variance σ_j² of part j over its S/r + M samples,

    a stream sample of part j:  y = γ (x - μ_j) / √(σ_j² + eps) + β
    a memory sample:            y = γ · mean over j of (x - μ_j) / √(σ_j² + eps) + β

The running moments follow the means over the parts of μ_j and of the unbiased variances. The paper's code repeats the
memory samples r times; here, both lines are computed without copies of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from contnorm.checks import check_batch, statistics_dtype
from contnorm.functional.batch import batch_norm, check_arguments, unbiased, update_moments, uses_batch_moments
from contnorm.kernels.pivot import per_channel

__all__ = ["feasible_parts", "task_balanced_batch_norm"]


def feasible_parts(stream: int, memory: int, past_tasks: int) -> int:
    """Return the number of parts r: the largest common divisor of both counts up to (stream / memory) * past tasks.

    Args:
        stream: Number of stream samples in the batch.
        memory: Number of memory samples in the batch.
        past_tasks: Number of tasks before the current one.

    Example:
        >>> [feasible_parts(48, 16, task) for task in range(10)]
        [1, 2, 4, 8, 8, 8, 16, 16, 16, 16]
        >>> [feasible_parts(10, 10, task) for task in range(10)]
        [1, 1, 2, 2, 2, 5, 5, 5, 5, 5]
    """
    if stream == 0 or memory == 0:
        return 1
    common = math.gcd(stream, memory)
    return max(r for r in range(1, common + 1) if common % r == 0 and (r == 1 or r * memory <= stream * past_tasks))


def task_balanced_batch_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    stream_size: int | None = None,
    parts: int = 1,
    caller: str = "task_balanced_batch_norm",
) -> Tensor:
    """Task-balanced batch normalization of a batch with the stream samples first and the memory samples after them.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the unbiased variance.
        weight: (C,) or None.
        bias: (C,) or None.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variance.
        stream_size: Number of stream samples; None for all, which is batch norm.
        parts: Number of parts r, a divisor of ``stream_size``; see `feasible_parts`. With 1, it is batch norm.
        caller: The function or layer that error messages name.

    Example:
        >>> x = torch.tensor([[0.0], [4.0], [2.0]])  # parts {0, 2} and {4, 2}
        >>> task_balanced_batch_norm(x, training=True, eps=1e-12, stream_size=2, parts=2)
        tensor([[-1.],
                [ 1.],
                [ 0.]])
    """
    if parts == 1 or stream_size is None or x.numel() == 0 or not uses_batch_moments(training, running_mean):
        return batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps, caller=caller)
    momentum, eps = check_arguments(x, running_mean, running_var, weight, bias, momentum, eps, caller)
    check_batch(x, eps, caller)
    if not 0 < stream_size < x.shape[0] or parts < 1 or stream_size % parts:
        raise ValueError(
            f"{caller}: stream_size={stream_size} and parts={parts} do not fit {x.shape[0]} samples. There must be "
            f"memory samples too, and the stream samples must be a multiple of parts."
        )
    y, mean, var = _balanced_step(x, weight, bias, eps, stream_size, parts)
    update_moments(running_mean, running_var, mean, var, momentum)
    return y


def _balanced_step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, stream: int, parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the means over the parts of the mean and of the unbiased variance, (C,) each."""
    dtype, rank = statistics_dtype(x), x.dim()
    wide = x.to(dtype)
    current = wide[:stream].reshape(stream // parts, parts, *x.shape[1:])  # (S/r, r, C, *): sample i in part i mod r
    memory = wide[stream:]
    positions = tuple(range(2, rank))
    current_var, current_mean = torch.var_mean(current, dim=(0, *(d + 1 for d in positions)), correction=0)  # (r, C)
    memory_var, memory_mean = torch.var_mean(memory, dim=(0, *positions), correction=0)  # (C,)

    # Moments of the union of two sets, which have `share` and `1 - share` of the samples of a part.
    samples = stream // parts + len(memory)
    share = stream / parts / samples
    difference = current_mean - memory_mean
    mean = memory_mean + share * difference
    var = share * current_var + (1 - share) * memory_var + share * (1 - share) * difference.square()

    scale = torch.rsqrt(var + eps)  # (r, C)
    middle, mean_scale = mean.mean(0), scale.mean(0)
    offset = ((mean - middle) * scale).mean(0)  # of memory samples, after the middle of the means is subtracted
    if weight is not None:
        gain = weight.to(dtype)
        scale, mean_scale, offset = scale * gain, mean_scale * gain, offset * gain
    shift = torch.zeros_like(middle) if bias is None else bias.to(dtype)
    y_current = torch.addcmul(
        per_channel(shift, rank), current - per_channel(mean, rank), per_channel(scale, rank)
    ).flatten(0, 1)
    y_memory = torch.addcmul(
        per_channel(shift - offset, rank), memory - per_channel(middle, rank), per_channel(mean_scale, rank)
    )
    y = torch.cat([y_current, y_memory])
    return y.to(x.dtype), middle, unbiased(var.mean(0), samples * (x.numel() // (x.shape[0] * x.shape[1])))
