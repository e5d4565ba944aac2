"""Tags of a batch for norm layers that need them: which samples are replayed, and of which task each is.

Tags are a side channel: code that knows them opens the context `batch_tags` around a forward pass, and a layer that
needs them calls `current_tags` in its ``forward``. All other layers are unaffected. The bench tags every forward pass
of a training step that a strategy makes with ``contnorm.bench.forward(model, batch)``. There are no tags in evaluation.
``torch.compile`` takes the tags as inputs; with ``fullgraph=True``, give their ``stream_size`` where it is known: a
graph can't read from a tensor how many samples are replayed.

A norm layer may define the following, which the bench looks up by name. `contnorm.testing.check_norm` checks them:

- ``needs_tags = True``: it calls `current_tags` in training. The bench tags passes only if a layer needs tags;
- ``needs_joint_forward = True``: it is defined only for batches with stream and memory samples together. The bench
  refuses a run with ``strategy.forward=separate``;
- ``num_tasks``: a number, if it supports no more tasks. The bench refuses streams with more before training;
- ``on_task_start(task)`` and ``on_task_end(task)``: called between training steps, with the number of the task. What
  they change must be in ``state_dict()``;
- ``auxiliary_loss()``: called once after the forward passes of a step; its scalar tensor is added to the loss. A layer
  that computes it in ``forward`` drops its reference to the tensor here, since a network that holds tensors with a
  graph can't be copied;
- ``replay_request``: a `ReplayRequest`, an extra batch from the replay memory at every step. The network processes it
  in a pass of its own, without gradients, for which ``current_tags().is_extra`` is True.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchTags:
    """Tags of the batch of a forward pass.

    Attributes:
        replayed: (B,) bool; whether each sample comes from the replay memory.
        task: (B,) int64; the task of each sample.
        is_extra: Whether this is the pass over the extra batch that a norm requested with ``replay_request``.
        extra_size: Samples of the extra batch of this training step; 0 if there is none.
        stream_size: Number of samples that are not replayed, if all of them come first; None if that is not known. As a
            Python number, it needs no copy from the device, so that a captured step can split the batch.

    Example:
        >>> tags = BatchTags(replayed=torch.tensor([False, True]), task=torch.tensor([1, 0]))
        >>> tags.task[tags.replayed]
        tensor([0])
    """

    replayed: Tensor
    task: Tensor
    is_extra: bool = False
    extra_size: int = 0
    stream_size: int | None = None


@dataclass(frozen=True)
class ReplayRequest:
    """An extra batch from the replay memory at every step, which a norm requests as ``replay_request``.

    Attributes:
        size: Number of samples; None for as many as the strategy replays per draw.
        balance: Draw uniformly over the stored samples, or with the same number of samples (plus or minus one) of each
            class or task in the memory.

    Example:
        >>> class BalancedMomentsNorm(torch.nn.BatchNorm2d):
        ...     replay_request = ReplayRequest(size=20, balance="class")
    """

    size: int | None = None
    balance: Literal["none", "class", "task"] = "none"


class _Current(threading.local):  # torch.compile reads its attributes, but not a ContextVar
    def __init__(self) -> None:  # once in each thread; torch 2.7 would read a default of the class instead of the value
        self.tags: BatchTags | None = None


_current = _Current()


@contextmanager
def batch_tags(tags: BatchTags | None) -> Iterator[None]:
    """Set the tags of the forward passes within the context; None removes them.

    Args:
        tags: The tags of one batch.

    Raises:
        ValueError: If the tags do not describe the same number of samples.

    Example:
        >>> tags = BatchTags(replayed=torch.tensor([False, True]), task=torch.tensor([1, 0]))
        >>> with batch_tags(tags):
        ...     current_tags(2).task
        tensor([1, 0])
        >>> current_tags(2) is None
        True
    """
    if tags is not None and not (tags.replayed.shape == tags.task.shape and tags.task.ndim == 1):
        raise ValueError(
            f"batch_tags: replayed has shape {tuple(tags.replayed.shape)} and task {tuple(tags.task.shape)}. Both "
            f"must be (B,)."
        )
    if tags is not None and tags.replayed.dtype != torch.bool:
        raise ValueError(f"batch_tags: replayed has dtype {tags.replayed.dtype}. Use torch.bool.")
    before, _current.tags = _current.tags, tags
    try:
        yield
    finally:
        _current.tags = before


def current_tags(samples: int) -> BatchTags | None:
    """Return the tags of the current forward pass; None outside of `batch_tags`.

    Args:
        samples: The number of samples in the input of the calling layer.

    Raises:
        ValueError: If the tags are of another number of samples, such as in a layer whose input was reshaped.

    Example:
        >>> class StreamMeanNorm(torch.nn.Module):  # subtracts the mean of the samples that are not replayed
        ...     def forward(self, x):
        ...         tags = current_tags(len(x))
        ...         return x - (x if tags is None else x[~tags.replayed]).mean(0)
        >>> with batch_tags(BatchTags(torch.tensor([False, True]), torch.tensor([1, 0]))):
        ...     StreamMeanNorm()(torch.tensor([[1.0], [5.0]])).tolist()
        [[0.0], [4.0]]
    """
    tags = _current.tags
    if tags is not None and len(tags.task) != samples:
        raise ValueError(
            f"current_tags: the input has {samples} samples, but the tags are of {len(tags.task)}. Open batch_tags "
            f"with the tags of the samples that the network processes."
        )
    return tags
