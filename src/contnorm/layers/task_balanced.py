"""TBBN: task-balanced batch normalization (Cha et al., CVPR 2023).

A training batch with S stream samples and M memory samples is normalized in r parts, each with S/r of the stream
samples and all memory samples, so that the memory has a larger share of the moments. The outputs of a memory sample in
the r parts are averaged; see `contnorm.functional.task_balanced`. r is the largest common divisor of S and M up to
(S / M) times the number of past tasks. In the first task, in batches without memory samples, and wherever r is 1, this
is batch norm. In evaluation it is batch norm, too.

Written from the formulas and compared with the code that the authors released; docs/concepts/rivals.md says where the
two differ.
"""

from __future__ import annotations

from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from contnorm.functional.task_balanced import feasible_parts, task_balanced_batch_norm
from contnorm.layers.base import MomentNorm, ReplacementGuard
from contnorm.tags import BatchTags, current_tags

__all__ = ["TaskBalancedNorm1d", "TaskBalancedNorm2d", "TaskBalancedNorm3d"]


# The value of the buffer `past_tasks` of each layer, with the buffer and its version: shapes depend on it, and a
# captured step can't read it. It is not an attribute of the layer, because it is not state, only a copy of state.
_past_tasks: WeakKeyDictionary[nn.Module, tuple[Tensor, int, int]] = WeakKeyDictionary()


class TaskBalancedNormBase(ReplacementGuard, MomentNorm):
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

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
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
        self._check(input)
        tags = current_tags(len(input)) if self.training and not self.use_running else None
        stream_size, parts, order = None, 1, None
        if tags is not None:
            stream_size = _stream_size(tags)
            parts = self.parts(stream_size, len(input) - stream_size)
            if tags.stream_size is None and parts > 1:
                order = torch.sort(tags.replayed.to(torch.uint8), stable=True).indices  # stream samples first
        output = task_balanced_batch_norm(
            input if order is None else input[order],
            *self._moments(),
            self.weight,
            self.bias,
            self._normalizes_with_batch(),
            self._weight_of_batch(),
            self.eps,
            stream_size=stream_size,
            parts=parts,
            caller=type(self).__name__,
        )
        self._count(input)
        return output if order is None else output[order.argsort()]


def _stream_size(tags: BatchTags) -> int:
    """Return the number of stream samples; if the caller did not count them, they are counted on the device."""
    return int((~tags.replayed).sum()) if tags.stream_size is None else tags.stream_size


class TaskBalancedNorm1d(TaskBalancedNormBase, nn.BatchNorm1d):
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

    ranks: ClassVar[tuple[int, ...]] = (2, 3)


class TaskBalancedNorm2d(TaskBalancedNormBase, nn.BatchNorm2d):
    """TBBN of (N, C, H, W) input.

    Example:
        >>> TaskBalancedNorm2d(8)
        TaskBalancedNorm2d(8, eps=1e-05, momentum=0.1)
    """

    ranks: ClassVar[tuple[int, ...]] = (4,)


class TaskBalancedNorm3d(TaskBalancedNormBase, nn.BatchNorm3d):
    """TBBN of (N, C, D, H, W) input.

    Example:
        >>> TaskBalancedNorm3d(8)(torch.randn(4, 8, 2, 5, 5)).shape
        torch.Size([4, 8, 2, 5, 5])
    """

    ranks: ClassVar[tuple[int, ...]] = (5,)
