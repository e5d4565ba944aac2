"""Base class of strategies, their inputs, the concatenation of batches, and fine-tuning without replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from contnorm.bench.config.schema import StrategyConfig

__all__ = ["Batch", "Model", "OutputMask", "Single", "Strategy", "joined", "together"]

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Inputs of the network with their labels and tasks; ``y`` is another name of the labels."""

    x: Tensor
    label: Tensor  # (B,) class indices; (B, outputs) of 0 and 1 for multi-label data
    task: Tensor  # (B,)
    logits: Tensor | None = None  # (B, outputs) stored with the sample in the memory; replayed samples only

    @property
    def y(self) -> Tensor:
        """The labels."""
        return self.label

    def __len__(self) -> int:
        return len(self.label)


class OutputMask:
    """Mask of the outputs that compete for a sample, by its task.

    Example:
        >>> head = OutputMask(torch.tensor([[True, True, False], [False, False, True]]))
        >>> head(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0]))
        tensor([[1., 2., -inf]])
    """

    def __init__(self, competing: Tensor) -> None:
        self.competing = competing
        self.resting = ~competing
        self.all_compete = bool(competing.all())

    def __call__(self, logits: Tensor, task: Tensor) -> Tensor:
        """Logits, with minus infinity for outputs that do not compete."""
        if self.all_compete:
            return logits
        return logits.masked_fill(self.resting[task], float("-inf"))

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """(B,) loss of each sample; for multi-label data, binary cross-entropy averaged over the outputs."""
        if batch.label.ndim == 2:
            labels = batch.label.to(torch.float32)
            return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)
        return F.cross_entropy(self(logits.float(), batch.task), batch.label, reduction="none")

    def squared_error(self, logits: Tensor, target: Tensor, task: Tensor) -> Tensor:
        """(B,) mean squared error to stored logits over the competing outputs."""
        error = (logits.float() - target).square()
        if self.all_compete:
            return error.mean(1)
        mask = self.competing[task]
        return (error * mask).sum(1) / mask.sum(1)


class Strategy:
    """Base class of all strategies.

    Attributes:
        name: Name of a strategy of this package; empty for others.
        draws: Number of independent replay draws per step.
        stores_logits: Whether the logits of a sample are stored with it in the memory.
        config: Settings of the strategy.
        overrides: The settings of a run that were given to this object, by dotted key.

    Example:
        >>> class HalfLoss(Strategy):
        ...     def loss(self, model, head, stream, replay):
        ...         return head.cross_entropy(model(stream.x), stream).mean() / 2, None
        >>> HalfLoss.draws  # without replay
        0
    """

    name: ClassVar[str] = ""
    draws: ClassVar[int] = 0
    stores_logits: ClassVar[bool] = False

    def __init__(self, config: StrategyConfig | None = None, **settings: Any) -> None:
        self.config = config or StrategyConfig()
        values = {"strategy.name": self.name or None, **settings}
        self.overrides = {key: value for key, value in values.items() if value is not None}

    def loss(
        self, model: Any, head: OutputMask, stream: Batch, replay: tuple[Batch, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Loss of a step, and the logits of the stream batch if ``stores_logits`` is True, else None.

        Args:
            model: The network: a function from inputs to logits.
            head: Mask of the outputs that compete, with the losses that respect it.
            stream: The batch of the stream.
            replay: One batch of the memory for each of ``draws``; a batch is empty while the memory is.
        """
        raise TypeError(f"{type(self).__name__} must define loss(self, model, head, stream, replay).")


class Single(Strategy):
    """Fine-tuning on the stream without replay."""

    name = "single"

    def loss(
        self, model: Model, head: OutputMask, stream: Batch, replay: tuple[Batch, ...]
    ) -> tuple[Tensor, Tensor | None]:
        return head.cross_entropy(model(stream.x), stream).mean(), None


def together(*batches: Batch) -> Batch:
    """Concatenate batches in order, for one forward pass; stored logits are dropped.

    The engine gathers all images of a step into one tensor and passes slices of it to the strategy. Concatenating
    these slices copies nothing: the result is a view of the original tensor.

    Example:
        >>> x, label = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
        >>> parts = [Batch(x[:1], label[:1], label[:1]), Batch(x[1:], label[1:], label[1:])]
        >>> together(*parts).x.data_ptr() == x.data_ptr()
        True
    """
    return Batch(*(joined([getattr(b, part) for b in batches]) for part in ("x", "label", "task")))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along their first dimension."""
    first = parts[0]
    if not _adjacent(parts):
        return torch.cat(list(parts))
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def _adjacent(parts: Sequence[Tensor]) -> bool:
    """Whether the parts are consecutive slices of one tensor: same storage, strides and shape, and no gap."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        if (
            part.requires_grad
            or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or (part.stride(), part.shape[1:], part.dtype) != (first.stride(), first.shape[1:], first.dtype)
            or part.storage_offset() != offset
        ):
            return False
        offset += len(part) * part.stride(0)
    return True
