"""Experience replay: a stream batch and a memory batch, each sample with the loss over the outputs of its task.

Code bases differ in whether the two share a forward pass, which affects norm layers: ``joint`` concatenates them (batch
moments mix stream and memory), ``separate`` runs one after the other (two updates of running moments per step).
"""

from __future__ import annotations

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, Model, OutputMask, Strategy, forward, together


class ER(Strategy):
    """Cross-entropy of stream and memory: the mean over all samples, or the sum of the two means.

    Args:
        replay (int): Replayed samples per step.
        forward (str): One forward pass for stream and memory (``"joint"``), or one for each (``"separate"``).
        loss (str): Mean over all samples, or sum of the means of stream and memory.
        replay_from (str): Whether past tasks are replayed, or all including the current one.

    Example:
        >>> ER(replay=20).overrides
        {'strategy.name': 'er', 'train.replay': 20}
    """

    name = "er"

    def loss(self, model: Model, head: OutputMask, stream: Batch, memory: Batch) -> tuple[Tensor, Tensor | None]:
        if len(memory) == 0:
            return head.cross_entropy(forward(model, stream), stream).mean(), None
        if self.config.forward == "joint":
            both = together(stream, memory)
            losses = head.cross_entropy(forward(model, both), both)
        else:
            losses = torch.cat([head.cross_entropy(forward(model, batch), batch) for batch in (stream, memory)])
        if self.config.loss == "sum":
            stream_losses, memory_losses = torch.split(losses, [len(stream), len(memory)])
            return stream_losses.mean() + memory_losses.mean(), None
        return losses.mean(), None
