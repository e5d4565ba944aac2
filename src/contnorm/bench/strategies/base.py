"""What a strategy is given and gives, and the plainest one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.bench.config.schema import StrategyConfig

__all__ = ["Batch", "Head", "Model", "Single", "Strategy"]

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Samples as the network sees them, with what is known of each."""

    x: Tensor
    label: Tensor  # (B,) among the outputs; (B, outputs) of 0 and 1 where samples have several
    task: Tensor  # (B,)
    logits: Tensor | None = None  # (B, outputs) stored when the sample was written; replayed samples only

    def __len__(self) -> int:
        return len(self.label)


class Head:
    """Which outputs compete for a sample, by its task.

    Example:
        >>> head = Head(torch.tensor([[True, True, False], [False, False, True]]))
        >>> head(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0]))
        tensor([[1., 2., -inf]])
    """

    def __init__(self, competing: Tensor) -> None:
        self.competing = competing
        self.resting = ~competing
        self.all_compete = bool(competing.all())

    def __call__(self, logits: Tensor, task: Tensor) -> Tensor:
        """The logits, minus infinity where an output does not compete."""
        if self.all_compete:
            return logits
        return logits.masked_fill(self.resting[task], float("-inf"))

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """(B,) of each sample; where it has several labels, the mean over the outputs, each a yes or no of its own."""
        if batch.label.ndim == 2:
            labels = batch.label.to(torch.float32)
            return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)
        return F.cross_entropy(self(logits.float(), batch.task), batch.label, reduction="none")

    def squared_error(self, logits: Tensor, target: Tensor, task: Tensor) -> Tensor:
        """(B,) the mean over the competing outputs of the squared distance to stored logits."""
        far = (logits.float() - target).square()
        if self.all_compete:
            return far.mean(1)
        own = self.competing[task]
        return (far * own).sum(1) / own.sum(1)


class Strategy:
    """Base of all strategies.

    ``draws`` says how many independent replay draws a step has, ``stores_logits`` whether what the network says of a
    sample is stored with it. ``loss`` makes the loss of a step and, where logits are stored, gives those of the stream.
    """

    draws: ClassVar[int] = 0
    stores_logits: ClassVar[bool] = False

    def __init__(self, config: StrategyConfig) -> None:
        self.config = config

    def loss(self, model: Model, head: Head, stream: Batch, replay: tuple[Batch, ...]) -> tuple[Tensor, Tensor | None]:
        """The loss of a step, and the stream's logits where they are to be stored."""
        raise TypeError(f"{type(self).__name__} has no loss of its own: a strategy has to define one.")


class Single(Strategy):
    """Learn from the stream alone."""

    def loss(self, model: Model, head: Head, stream: Batch, replay: tuple[Batch, ...]) -> tuple[Tensor, Tensor | None]:
        return head.cross_entropy(model(stream.x), stream).mean(), None
