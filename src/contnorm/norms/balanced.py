"""Batch norms that balance the tasks of a batch: AdaB2N and TBBN.

Both are written from the formulas and compared with the code that the authors released; docs/concepts/rivals.md says
where the two differ. The tags of a batch (`contnorm.tags`) say of which task each sample is.

**AdaB2N** is batch normalization with an adaptive balance of the tasks (Lyu et al., NeurIPS 2023). In training, the
samples of a batch are weighted by task. With n_t samples of task t in the batch and a learned φ_t per layer, which
starts at 0, a sample of task t has the weight (exp(φ_t) + n_t) / (n_t Σ_s (exp(φ_s) + n_s)), where the sum is over the
tasks that have started. The batch is normalized with the weighted mean and biased variance: with the weight w of a
sample, and the mean m and biased variance v of one channel of one sample over its positions, the moments of a channel
are μ = Σ w m and σ² = Σ w (v + (m - μ)²), sums over the samples. In the first task, and in batches without replayed
samples, this is batch norm.

The weight η of a batch in the running moments starts at m^κ, for a momentum of m, and follows η ← η / (η + (1 - m)^κ).
κ = 1 gives the moving average of batch norm, κ = 0 the cumulative average over all batches. The running variance has no
Bessel correction. A loss λ (MSE(batch mean, running mean) + MSE(batch variance, running variance)) is added for each
layer, from task ``ada_t0`` on. In evaluation it is batch norm.

**TBBN** is task-balanced batch normalization (Cha et al., CVPR 2023). A training batch with S stream samples and M
memory samples is normalized in r parts, each with S/r of the stream samples and all memory samples, so that the memory
has a larger share of the moments: stream sample i belongs to part i mod r, all memory samples to every part. With the
mean μ_j and biased variance σ_j² of part j over its samples,

    a stream sample of part j:  y = γ (x - μ_j) / √(σ_j² + eps) + β
    a memory sample:            y = γ · mean over j of (x - μ_j) / √(σ_j² + eps) + β

The running moments follow the means over the parts of μ_j and of the unbiased variances. The paper's code repeats the
memory samples r times; here, both lines are computed without copies of them. r is the largest common divisor of S and M
up to (S / M) times the number of past tasks. In the first task, in batches without memory samples, and wherever r is 1,
this is batch norm. In evaluation it is batch norm, too.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.checks import check_number, statistics_dtype, widest
from contnorm.kernels.pivot import per_channel
from contnorm.norms.base import (
    MomentNorm,
    channel_moments,
    check_arguments,
    empty_like_input,
    recomputes,
    unbiased,
    update_moments,
)
from contnorm.norms.batch import batch_norm
from contnorm.tags import BatchTags, current_tags

# --- AdaB2N ----------------------------------------------------------------------------------------------------------


def adaptive_balance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    sample_weight: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalization with weighted samples.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        running_mean: (C,), updated in place if ``training``.
        running_var: (C,), updated in place if ``training``, with the biased variance of the batch.
        weight: (C,) or None.
        bias: (C,) or None.
        sample_weight: (N,), used if ``training``; None for equal weights. They are not scaled to a sum of 1.
        training: Whether to normalize with the moments of the batch. Without running moments, they are always used.
        momentum: Weight of this batch in the running moments. A 0-dim tensor stays on the device.
        eps: Value added to the variance.

    Example:
        >>> x = torch.tensor([[0.0], [4.0]])
        >>> adaptive_balance_norm(x, sample_weight=torch.tensor([0.5, 0.5]), training=True, eps=1e-12)
        tensor([[-1.],
                [ 1.]])
        >>> adaptive_balance_norm(x, sample_weight=torch.tensor([0.8, 0.2]), training=True, eps=1e-12)
        tensor([[-0.5000],
                [ 2.0000]])
    """
    momentum, eps, by_batch = check_arguments(x, running_mean, running_var, weight, bias, training, momentum, eps)
    if x.numel() == 0:
        return empty_like_input(x, weight, bias)
    if not by_batch:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    if sample_weight is not None and sample_weight.shape != x.shape[:1]:
        raise ValueError(f"sample_weight has shape {tuple(sample_weight.shape)}, but there are {len(x)} samples.")
    y, mean, var = balance_step(x, weight, bias, sample_weight, eps)
    update_moments(running_mean, running_var, mean, var, momentum)
    return y


def balance_step(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, sample_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the weighted mean and biased variance of the batch. Arguments are not checked."""
    dtype, rank = statistics_dtype(x), x.dim()
    wide = x.to(dtype)
    if sample_weight is None:
        mean, var = channel_moments(wide)
    else:  # use moments of samples; products and sums, since autocast rounds matrix products
        share, positions = sample_weight.to(dtype).unsqueeze(1), tuple(range(2, rank))
        row_var, row_mean = torch.var_mean(wide, positions, correction=0) if positions else (0.0, wide)
        mean = (share * row_mean).sum(0)
        var = (share * (row_var + (row_mean - mean).square())).sum(0)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight.to(dtype)
    centred, scale = wide - per_channel(mean, rank), per_channel(scale, rank)
    y = centred * scale if bias is None else torch.addcmul(per_channel(bias.to(dtype), rank), centred, scale)
    return y.to(x.dtype), mean, var


def task_balanced_weights(task: Tensor, phi: Tensor, started: Tensor, renormalize: bool = False) -> Tensor:
    """Return the weight of each sample in AdaB2N: (exp(φ_t) + n_t) / (n_t Σ_s (exp(φ_s) + n_s)), t its task.

    n_t is the number of samples of task t in the batch; the sum is over the tasks that have started. A task without a
    sample in the batch takes its share exp(φ_s) of the sum, so that the weights of the samples then add up to less than
    1, as in the released code.

    Args:
        task: (N,) int64, the task of each sample.
        phi: (T,), learned.
        started: (T,), 1 for the tasks up to the current one, 0 for later ones.
        renormalize: Whether to divide the weights by their sum.

    Example:
        >>> started = torch.tensor([1, 1, 0])
        >>> task_balanced_weights(torch.tensor([1, 1, 1, 0]), torch.zeros(3), started)  # 4 / 18 and 2 / 6
        tensor([0.2222, 0.2222, 0.2222, 0.3333])
        >>> task_balanced_weights(torch.tensor([1, 1]), torch.zeros(3), started)  # task 0 has 1 / 4 of the weight
        tensor([0.3750, 0.3750])
    """
    member = task.unsqueeze(1) == torch.arange(len(phi), device=task.device)  # (N, T)
    count = member.sum(0)
    concentration = phi.exp() * started + count
    share = concentration / (concentration.sum() * count.clamp(min=1))
    sample_weight = (member * share).sum(1)
    return sample_weight / sample_weight.sum() if renormalize else sample_weight


_MOST_PASSES = 8  # passes whose losses are kept until `auxiliary_loss` is called, at every step in the bench


class AdaptiveBalanceNormBase(MomentNorm):
    """AdaB2N: weighted batch moments, a modified momentum, and a loss between batch and running moments.

    It reads the task of each sample from `contnorm.current_tags`; without tags, all samples have the same weight.

    Args:
        num_features: Number of channels.
        eps: Value added to the variance.
        momentum: The momentum m of the running moments; None for a cumulative average over all batches.
        affine: Whether the layer has weight and bias.
        track_running_stats: Whether to keep running moments. Without them there is no auxiliary loss.
        device: Device of parameters and buffers.
        dtype: Dtype of parameters and buffers.
        kappa: The exponent κ of the modified momentum, from 0 to 1. The authors try 0.1, 0.4, 0.7 and 1.
        lam: The weight λ of the auxiliary loss. The authors try 0.01 to 10, and 1e-5 to 1e-2 on mini-ImageNet.
        ada_t0: The first task, counted from 0, with the auxiliary loss. The authors try 0 and 1.
        num_tasks: Length of φ. More than the stream has does not change the results.
        renormalize: Whether to scale the weights of a batch to a sum of 1. Without it, as in the released code, tasks
            that have no sample in the batch take their share of the weight, and the moments are shrunk by it.
    """

    needs_tags: ClassVar[bool] = True
    own_tensors: ClassVar[tuple[str, ...]] = ("phi", "started")
    phi: nn.Parameter
    started: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kappa: float = 1.0,
        lam: float = 0.1,
        ada_t0: int = 0,
        num_tasks: int = 100,
        renormalize: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        check_number(kappa, 0, "kappa", 1)
        check_number(lam, 0, "lam")
        check_number(num_tasks, 1, "num_tasks")
        check_number(ada_t0, 0, "ada_t0", num_tasks - 1)
        self.kappa, self.lam, self.ada_t0 = kappa, lam, ada_t0
        self.num_tasks, self.renormalize = num_tasks, renormalize
        self.phi = nn.Parameter(torch.zeros(num_tasks, device=device, dtype=dtype))
        self.register_buffer("started", torch.zeros(num_tasks, dtype=torch.int64, device=device))
        self._distances: deque[Tensor] = deque(maxlen=_MOST_PASSES)  # one for each pass since `auxiliary_loss`

    def on_task_start(self, task: int) -> None:
        """Open the tasks up to this one: their shares are in the weights."""
        if task >= self.num_tasks:
            raise ValueError(f"{type(self).__name__}: task {task} needs num_tasks={task + 1} or more.")
        self.started.zero_()[: task + 1] = 1

    def auxiliary_loss(self) -> Tensor:
        """Return λ times the distance of batch and running moments, summed over the passes since the last call."""
        distances = list(self._distances)
        self._distances.clear()
        if not distances:
            return self.phi.new_zeros(())
        total = distances[0] if len(distances) == 1 else torch.stack(distances).sum()
        gate = self.started[self.ada_t0] if self.ada_t0 else 1.0
        return total * gate * self.lam

    def _weight_of_moving_batch(self) -> float | Tensor:
        """Return η as a function of the number of batches so far: 1/η is the sum of a geometric series."""
        if self.momentum is None or self.kappa == 1:
            return super()._weight_of_moving_batch()
        if self.num_batches_tracked is None:
            raise ValueError(f"{type(self).__name__}: kappa={self.kappa} needs the counter num_batches_tracked.")
        batches = widest(self.num_batches_tracked)
        if self.kappa == 0:
            return (batches + 1).reciprocal()
        if self.momentum in (0, 1):
            return float(self.momentum)
        log_ratio = self.kappa * math.log1p(-self.momentum)
        series = torch.expm1(batches * log_ratio) / math.expm1(log_ratio)
        first = float(self.momentum**-self.kappa)  # 1/η of the first batch
        return (series + torch.exp(batches * log_ratio) * first).reciprocal()

    def forward(self, input: Tensor) -> Tensor:
        if not self._normalizes_with_batch():
            return self._normalize_with(batch_norm, input)
        self._check(input)
        check_arguments(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        if input.numel() == 0:
            return empty_like_input(input, self.weight, self.bias, self.phi)
        updates = self._updates_moments()
        share = self._weight_of_moving_batch() if updates else 0.0
        tags = current_tags(input.shape[0]) if self.training else None
        y, mean, var = balance_step(input, self.weight, self.bias, self._sample_weight(tags, input), self.eps)
        running = self.running_mean, self.running_var
        update_moments(*running, mean, var, share)
        if self.training and self.lam and torch.is_grad_enabled() and running[0] is not None:
            # Copies, since the next pass changes the buffers before the backward pass of this one.
            of_mean, of_var = (
                (moment - cast(Tensor, buffer).to(moment.dtype, copy=True)).square().mean()
                for moment, buffer in zip((mean, var), running, strict=True)
            )
            if not recomputes():  # the loss of the first forward was taken
                self._distances.append(of_mean + of_var)  # distance between batch and running moments
        if updates:
            self._count(input)
        return y

    def _sample_weight(self, tags: BatchTags | None, x: Tensor) -> Tensor:
        """Return the weights of the samples: equal ones without tags, and without replayed samples."""
        phi = self.phi.to(statistics_dtype(x))
        samples = x.shape[0]  # `len` would fix the size of a batch that is exported
        if tags is None or tags.stream_size == samples:
            # φ takes part in every pass, as DistributedDataParallel requires of all parameters.
            return (0 * phi.sum() + 1 / samples).expand(samples)
        weights = task_balanced_weights(tags.task, phi, self.started, self.renormalize)
        if tags.stream_size is not None:
            return weights
        return torch.where(tags.replayed.any(), weights, 1 / samples)

    def stored_variance(self, var: Tensor, count: float) -> Tensor:
        return var

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without pending losses, whose graphs can't be copied."""
        return {**self.__dict__, "_distances": deque(maxlen=_MOST_PASSES)}


class AdaptiveBalanceNorm1d(AdaptiveBalanceNormBase, dim=1):
    """AdaB2N of (N, C) or (N, C, L) input.

    Example:
        >>> from contnorm import BatchTags, batch_tags
        >>> layer = AdaptiveBalanceNorm1d(1, eps=1e-12)
        >>> layer.on_task_start(1)
        >>> x, replayed = torch.tensor([[0.0], [0.0], [0.0], [3.0]]), torch.tensor([False, False, False, True])
        >>> with batch_tags(BatchTags(replayed, task=torch.tensor([1, 1, 1, 0]))):
        ...     y = layer(x)
        >>> layer.running_mean  # 0.1 times the weighted mean: the sample of task 0 has a weight of 1/3 in place of 1/4
        tensor([0.1000])
    """


class AdaptiveBalanceNorm2d(AdaptiveBalanceNormBase, dim=2):
    """AdaB2N of (N, C, H, W) input.

    Example:
        >>> AdaptiveBalanceNorm2d(8, kappa=0.4, lam=1.0)
        AdaptiveBalanceNorm2d(8, kappa=0.4, lam=1.0, eps=1e-05, momentum=0.1)
    """


class AdaptiveBalanceNorm3d(AdaptiveBalanceNormBase, dim=3):
    """AdaB2N of (N, C, D, H, W) input.

    Example:
        >>> AdaptiveBalanceNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """


# --- TBBN ------------------------------------------------------------------------------------------------------------


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
    most = max(1, min(stream, memory, stream * past_tasks // memory))
    return next(r for r in range(most, 0, -1) if stream % r == 0 and memory % r == 0)


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
    offset = ((mean - middle) * scale).mean(0)  # offset of memory samples, relative to the middle of the means
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
    task: int  # the value of the buffer: shapes depend on it, and a captured or compiled step can't read a tensor

    def _add_tensors(self, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.register_buffer("past_tasks", torch.zeros((), dtype=torch.int64, device=device))
        self.task = 0

    def on_task_start(self, task: int) -> None:
        """Set the number of past tasks, from which the number of parts follows."""
        self.past_tasks.fill_(task)
        self.task = task

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if not self.past_tasks.is_meta:
            self.task = int(self.past_tasks)

    def parts(self, stream: int, memory: int) -> int:
        """Return the number of parts r of a batch with these numbers of samples, in the current task.

        Example:
            >>> layer = TaskBalancedNorm2d(8)
            >>> layer.on_task_start(2)
            >>> layer.parts(48, 16), layer.parts(10, 10), layer.parts(7, 10)
            (4, 2, 1)
        """
        return feasible_parts(stream, memory, self.task)

    def forward(self, input: Tensor) -> Tensor:
        tags = current_tags(input.shape[0]) if self.training and not self.use_running else None
        stream_size, parts, order = None, 1, None
        if tags is not None:
            stream_size = int((~tags.replayed).sum()) if tags.stream_size is None else tags.stream_size
            parts = self.parts(stream_size, input.shape[0] - stream_size)
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
