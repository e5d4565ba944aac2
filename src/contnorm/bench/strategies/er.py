"""Experience replay: the batch of the stream and a batch from the memory, each scored over its own task's outputs.

How the two share a forward pass differs between code bases, and norm layers see it: ``joint`` concatenates them
(batch moments mix stream and memory), ``separate`` runs one after the other (two updates of running moments a step).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, Head, Model, Strategy
from contnorm.bench.strategies.concat import together

__all__ = ["ER"]


class ER(Strategy):
    """Cross-entropy of stream and memory: the mean over all samples, or the sum of the two means."""

    draws: ClassVar[int] = 1

    def loss(self, model: Model, head: Head, stream: Batch, replay: tuple[Batch, ...]) -> tuple[Tensor, Tensor | None]:
        (memory,) = replay
        if len(memory) == 0:
            return head.cross_entropy(model(stream.x), stream).mean(), None
        if self.config.forward == "joint":
            both = together(stream, memory)
            each = head.cross_entropy(model(both.x), both)
        else:
            each = torch.cat([head.cross_entropy(model(batch.x), batch) for batch in (stream, memory)])
        if self.config.loss == "sum":
            new, old = torch.split(each, [len(stream), len(memory)])
            return new.mean() + old.mean(), None
        return each.mean(), None
