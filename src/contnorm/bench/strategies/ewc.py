"""Online elastic weight consolidation (Kirkpatrick et al., 2017; online: Schwarz et al., 2018), without replay.

After each task, the diagonal of the Fisher information is estimated and added to a running sum that decays by
``gamma``. From then on, a quadratic penalty with these weights holds the parameters near their values after the task.

The Fisher information is the mean of the squared gradients of single samples, of the training loss with the observed
labels ("empirical Fisher"). It is computed in evaluation mode, with running moments, in the precision of float32
weights. The outputs that compete for a sample are those of training: in task-incremental learning those of its task,
in class- and domain-incremental learning all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, Model, OutputMask, Strategy, TaskData, TaskInfo, forward


class EWC(Strategy):
    """CE(stream) + strength / 2 * sum of fisher * (weight - weight after the last task)**2.

    Args:
        **settings: The fields of ``Settings``.

    Example:
        >>> EWC(strength=100).overrides
        {'strategy.name': 'ewc', 'strategy.strength': 100}
    """

    name = "ewc"

    @dataclass(frozen=True)
    class Settings:
        """Own settings of EWC.

        Attributes:
            strength: Weight of the penalty.
            gamma: Decay of the Fisher information of earlier tasks; 1 adds up all tasks.
            fisher_samples: Samples of a task that estimate its Fisher information, evenly spaced in it; all if it has
                fewer.
        """

        strength: float = 10.0
        gamma: float = 1.0
        fisher_samples: int = 256

        def __post_init__(self) -> None:
            if self.strength < 0 or not 0 <= self.gamma <= 1 or self.fisher_samples < 1:
                raise ValueError("strength must be 0 or more, gamma 0 to 1, and fisher_samples 1 or more")

    def setup(self) -> None:
        for number, parameter in enumerate(self._trained()):
            self.register_buffer(f"fisher_{number}", torch.zeros_like(parameter))  # zero until the end of a task
            self.register_buffer(f"anchor_{number}", parameter.detach().clone())

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _weights(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each trained parameter with its Fisher information and its value after the last task."""
        for number, parameter in enumerate(self._trained()):
            yield parameter, self.get_buffer(f"fisher_{number}"), self.get_buffer(f"anchor_{number}")

    def loss(self, model: Model, head: OutputMask, stream: Batch) -> tuple[Tensor, Tensor | None]:
        loss = head.cross_entropy(forward(model, stream), stream).mean()
        penalty = torch.stack([(fisher * (p - anchor).square()).sum() for p, fisher, anchor in self._weights()]).sum()
        return loss + self.settings.strength / 2 * penalty, None

    def on_task_end(self, task: TaskInfo, data: TaskData) -> None:
        """Add the Fisher information of the task, estimated in evaluation mode from single samples."""
        weights = list(self._weights())
        parameters = [parameter for parameter, _, _ in weights]
        count = min(self.settings.fisher_samples, len(data))
        chosen = {number * len(data) // count for number in range(count)}
        squares = [torch.zeros_like(parameter) for parameter in parameters]
        self.model.eval()
        for number, sample in enumerate(data.batches(1)):
            if number in chosen:
                loss = self.head.cross_entropy(forward(self.model, sample), sample).sum()
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                for square, grad in zip(squares, grads, strict=True):
                    if grad is not None:
                        square.addcmul_(grad, grad, value=1 / count)
        self.model.train()
        for (parameter, fisher, anchor), square in zip(weights, squares, strict=True):
            fisher.mul_(self.settings.gamma).add_(square)
            anchor.copy_(parameter.detach())
