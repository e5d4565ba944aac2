"""Experience replay: the batch of the stream and a batch from the memory, each scored over its own task's outputs.

How the two share a forward pass differs between code bases, and norm layers see it: ``joint`` concatenates them
(batch moments mix stream and memory), ``separate`` runs one after the other (two updates of running moments a step).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from contnorm.strategies.base import Batch, Head, Model, Strategy

__all__ = ["ER"]


class ER(Strategy):
    """Cross-entropy of stream and memory: the mean over all samples, or the sum of the two means."""

    draws: ClassVar[int] = 1

    def loss(self, model: Model, head: Head, stream: Batch, replay: tuple[Batch, ...]) -> tuple[Tensor, Tensor | None]:
        (memory,) = replay
        if len(memory) == 0:
            return head.cross_entropy(model(stream.x), stream).mean(), None
        if self.config.forward == "joint":
            on_stream, on_memory = torch.split(model(torch.cat([stream.x, memory.x])), [len(stream), len(memory)])
        else:
            on_stream, on_memory = model(stream.x), model(memory.x)
        new, old = head.cross_entropy(on_stream, stream), head.cross_entropy(on_memory, memory)
        if self.config.loss == "sum":
            return new.mean() + old.mean(), None
        return torch.cat([new, old]).mean(), None
