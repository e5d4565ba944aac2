"""Replay strategies: experience replay (ER), ER with asymmetric cross-entropy (ER-ACE), and dark experience replay++.

**ER** has a stream batch and a memory batch, each sample with the loss over the outputs of its task. Code bases differ
in whether the two share a forward pass, which affects norm layers: ``joint`` concatenates them (batch moments mix
stream and memory), ``separate`` runs one after the other (two updates of running moments per step).

**ER-ACE** is by Caccia et al. (2022). The loss of the stream is over the classes in the batch of the stream only, so
that learning new classes does not push down the outputs of old ones. The loss of the memory is over all classes seen so
far. This is the formula of the paper. The released code differs: in the first task the stream's loss is over all
outputs, later the outputs of classes not seen yet take part in it too, and the memory's loss is over all outputs.

As in the released code, stream and memory have a forward pass each by default, and all tasks are replayed. In
task-incremental learning, both losses are over those of the above classes that belong to the sample's task.

**DER++** (Buzzega et al., 2020) replays stored logits and labels. Each step has two independent draws: one is trained
to match the logits stored with the sample, the other to match the label. The stored logits are those of the augmented
view, computed in training mode before the update. The published code runs three forward passes and compares all
outputs, also if the task of a sample is known. Here the settings ``forward`` and ``distance`` choose.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
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


class ERACE(Strategy):
    """CE(stream; classes in the batch) + CE(memory; classes seen so far).

    Args:
        replay (int): Replayed samples per step.
        forward (str): One forward pass for stream and memory (``"joint"``), or one for each (``"separate"``, the
            default).
        replay_from (str): Whether past tasks are replayed, or all including the current one (the default).

    Example:
        >>> ERACE(replay=20).overrides
        {'strategy.name': 'er-ace', 'train.replay': 20}
    """

    name = "er-ace"
    seen: Tensor  # (outputs,) bool: the classes of the stream so far
    multi_label: ClassVar[bool] = False

    def setup(self) -> None:
        outputs = self.head.competing.shape[1]
        self.register_buffer("seen", torch.zeros(outputs, dtype=torch.bool))

    def loss(self, model: Model, head: OutputMask, stream: Batch, memory: Batch) -> tuple[Tensor, Tensor | None]:
        outputs = torch.arange(len(self.seen), device=stream.label.device)
        present = (stream.label[:, None] == outputs).any(0)
        self.seen.logical_or_(present)
        if len(memory) == 0:
            return _cross_entropy(head, forward(model, stream), stream, present), None
        if self.config.forward == "joint":
            logits = forward(model, together(stream, memory))
            on_stream, on_memory = torch.split(logits, [len(stream), len(memory)])
        else:
            on_stream, on_memory = forward(model, stream), forward(model, memory)
        new = _cross_entropy(head, on_stream, stream, present)
        return new + _cross_entropy(head, on_memory, memory, self.seen), None


def _cross_entropy(head: OutputMask, logits: Tensor, batch: Batch, classes: Tensor) -> Tensor:
    """Mean loss over some classes; their outputs must also compete for the sample."""
    masked = head(logits.float(), batch.task).masked_fill(~classes, float("-inf"))
    return F.cross_entropy(masked, batch.label)


class DERpp(Strategy):
    """CE(stream) + alpha * MSE(first draw, its stored logits) + beta * CE(second draw).

    Args:
        replay (int): Replayed samples per step and draw.
        forward (str): One forward pass for stream and memory (``"joint"``), or one for each (``"separate"``).
        alpha (float): Weight of the stored logits.
        beta (float): Weight of the stored labels.
        replay_from (str): Whether past tasks are replayed, or all including the current one.
        distance (str): Compare stored logits over the outputs of the sample's task (``"task"``), or over all outputs.

    Example:
        >>> DERpp(alpha=0.3).overrides
        {'strategy.name': 'derpp', 'strategy.alpha': 0.3}
    """

    name = "derpp"
    stores_logits: ClassVar[bool] = True

    def loss(
        self, model: Model, head: OutputMask, stream: Batch, dark: Batch, labelled: Batch
    ) -> tuple[Tensor, Tensor | None]:
        if len(dark) == 0:
            on_stream = forward(model, stream)
            return head.cross_entropy(on_stream, stream).mean(), on_stream.detach().float()
        if self.config.forward == "joint":
            sizes = [len(stream), len(dark), len(labelled)]
            on_stream, on_dark, on_labelled = torch.split(forward(model, together(stream, dark, labelled)), sizes)
        else:
            on_stream, on_dark, on_labelled = (forward(model, batch) for batch in (stream, dark, labelled))
        assert dark.logits is not None
        if self.config.distance == "all":
            distances = (on_dark.float() - dark.logits).square().mean(1)
        else:
            distances = head.squared_error(on_dark, dark.logits, dark.task)
        loss = (
            head.cross_entropy(on_stream, stream).mean()
            + self.config.alpha * distances.mean()
            + self.config.beta * head.cross_entropy(on_labelled, labelled).mean()
        )
        return loss, on_stream.detach().float()
