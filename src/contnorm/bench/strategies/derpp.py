"""Dark experience replay++ (Buzzega et al., 2020): replay of stored logits and of labels.

Each step has two independent draws: one is trained to match the logits stored with the sample, the other to match the
label. The stored logits are those of the augmented view, computed in training mode before the update. The published
code runs three forward passes; ``joint`` runs one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, Head, Model, Strategy

__all__ = ["DERpp"]


class DERpp(Strategy):
    """CE(stream) + alpha * MSE(first draw, its stored logits) + beta * CE(second draw)."""

    draws: ClassVar[int] = 2
    stores_logits: ClassVar[bool] = True

    def loss(self, model: Model, head: Head, stream: Batch, replay: tuple[Batch, ...]) -> tuple[Tensor, Tensor | None]:
        dark, labelled = replay
        if len(dark) == 0:
            on_stream = model(stream.x)
            return head.cross_entropy(on_stream, stream).mean(), on_stream.detach().float()
        if self.config.forward == "joint":
            sizes = [len(stream), len(dark), len(labelled)]
            on_stream, on_dark, on_labelled = torch.split(model(torch.cat([stream.x, dark.x, labelled.x])), sizes)
        else:
            on_stream, on_dark, on_labelled = model(stream.x), model(dark.x), model(labelled.x)
        assert dark.logits is not None
        loss = (
            head.cross_entropy(on_stream, stream).mean()
            + self.config.alpha * head.squared_error(on_dark, dark.logits, dark.task).mean()
            + self.config.beta * head.cross_entropy(on_labelled, labelled).mean()
        )
        return loss, on_stream.detach().float()
