"""TBBN: task-balanced batch normalization (Cha et al., CVPR 2023).

A training batch with S stream samples and M memory samples is normalized in r parts, each with S/r of the stream
samples and all memory samples, so that the memory has a larger share of the moments: stream sample i belongs to part
i mod r, all memory samples to every part. With the mean μ_j and biased variance σ_j² of part j over its samples,

    a stream sample of part j:  y = γ (x - μ_j) / √(σ_j² + eps) + β
    a memory sample:            y = γ · mean over j of (x - μ_j) / √(σ_j² + eps) + β

The running moments follow the means over the parts of μ_j and of the unbiased variances. The paper's code repeats the
memory samples r times; here, both lines are computed without copies of them. r is the largest common divisor of S and M
up to (S / M) times the number of past tasks. In the first task, in batches without memory samples, and wherever r is 1,
this is batch norm. In evaluation it is batch norm, too.

Written from the formulas and compared with the code that the authors released; docs/concepts/rivals.md says where the
two differ.
"""

from __future__ import annotations

import math
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from contnorm.checks import statistics_dtype
from contnorm.kernels.pivot import per_channel
from contnorm.norms.base import MomentNorm, check_arguments, unbiased, update_moments
from contnorm.norms.batch import batch_norm
from contnorm.tags import current_tags


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

    Example:
        >>> x = torch.tensor([[0.0], [4.0], [2.0]])  # parts {0, 2} and {4, 2}
        >>> task_balanced_batch_norm(x, training=True, eps=1e-12, stream_size=2, parts=2)
        tensor([[-1.],
                [ 1.],
                [ 0.]])
    """
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if parts == 1 or stream_size is None or x.numel() == 0 or not by_batch:
        return batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if not 0 < stream_size < x.shape[0] or parts < 1 or stream_size % parts:
        raise ValueError(
            f"stream_size={stream_size} and parts={parts} do not fit {x.shape[0]} samples. There must be memory "
            f"samples too, and the stream samples must be a multiple of parts."
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


# The value of the buffer `past_tasks` of each layer, with the buffer and its version: shapes depend on it, and a
# captured step can't read it. It is not an attribute of the layer, because it is not state, only a copy of state.
_past_tasks: WeakKeyDictionary[nn.Module, tuple[Tensor, int, int]] = WeakKeyDictionary()


class TaskBalancedNormBase(MomentNorm):
    """TBBN: batch norm of parts of the stream samples, each together with all memory samples.

    It reads which samples are replayed from `contnorm.current_tags`; without tags it is batch norm. It has no settings
    of its own. It is not defined if stream and memory samples have a forward pass each.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance.
        momentum: Weight of a batch in the running moments; None for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
    """

    needs_tags: ClassVar[bool] = True
    needs_joint_forward: ClassVar[bool] = True
    own_tensors: ClassVar[tuple[str, ...]] = ("past_tasks",)
    past_tasks: Tensor

    def _add_tensors(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.register_buffer("past_tasks", torch.zeros((), dtype=torch.int64, device=device))

    def on_task_start(self, task: int) -> None:
        """Set the number of past tasks, from which the number of parts follows."""
        self.past_tasks.fill_(task)

    def parts(self, stream: int, memory: int) -> int:
        """Return the number of parts r of a batch with these numbers of samples, in the current task.

        Example:
            >>> layer = TaskBalancedNorm2d(8)
            >>> layer.on_task_start(2)
            >>> layer.parts(48, 16), layer.parts(10, 10), layer.parts(7, 10)
            (4, 2, 1)
        """
        known = _past_tasks.get(self)
        if known is None or known[0] is not self.past_tasks or known[1] != self.past_tasks._version:
            known = self.past_tasks, self.past_tasks._version, int(self.past_tasks)
            _past_tasks[self] = known
        return feasible_parts(stream, memory, known[2])

    def forward(self, input: Tensor) -> Tensor:
        tags = current_tags(len(input)) if self.training and not self.use_running else None
        stream_size, parts, order = None, 1, None
        if tags is not None:
            stream_size = int((~tags.replayed).sum()) if tags.stream_size is None else tags.stream_size
            parts = self.parts(stream_size, len(input) - stream_size)
            if tags.stream_size is None and parts > 1:
                order = torch.sort(tags.replayed.to(torch.uint8), stable=True).indices  # stream samples first
        x = input if order is None else input[order]
        output = self._normalize_with(task_balanced_batch_norm, x, stream_size=stream_size, parts=parts)
        return output if order is None else output[order.argsort()]


class TaskBalancedNorm1d(TaskBalancedNormBase, dim=1):
    """TBBN of (N, C) or (N, C, L) input.

    Example:
        >>> from contnorm import BatchTags, batch_tags
        >>> layer = TaskBalancedNorm1d(1, eps=1e-12)
        >>> layer.on_task_start(2)  # two past tasks
        >>> x, replayed = torch.tensor([[1.0], [3.0], [2.0], [4.0]]), torch.tensor([False, False, True, True])
        >>> with batch_tags(BatchTags(replayed, task=torch.tensor([2, 2, 0, 1]))):
        ...     y = layer(x)  # two parts: 1, 2, 4 and 3, 2, 4
        >>> layer.running_mean  # 0.1 times the mean of 7/3 and 3; that of the batch is 2.5
        tensor([0.2667])
    """


class TaskBalancedNorm2d(TaskBalancedNormBase, dim=2):
    """TBBN of (N, C, H, W) input.

    Example:
        >>> TaskBalancedNorm2d(8)
        TaskBalancedNorm2d(8, eps=1e-05, momentum=0.1)
    """


class TaskBalancedNorm3d(TaskBalancedNormBase, dim=3):
    """TBBN of (N, C, D, H, W) input.

    Example:
        >>> TaskBalancedNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """
