"""Dark experience replay++ (Buzzega et al., 2020): replay of stored logits and of labels.

Each step has two independent draws: one is trained to match the logits stored with the sample, the other to match the
label. The stored logits are those of the augmented view, computed in training mode before the update. The published
code runs three forward passes and compares all outputs, also if the task of a sample is known. Here the settings
``forward`` and ``distance`` choose.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, Model, OutputMask, Strategy, forward, together


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
