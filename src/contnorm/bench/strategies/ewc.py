"""Online elastic weight consolidation (Kirkpatrick et al., 2017; online: Schwarz et al., 2018), without replay.

After each task, the diagonal of the Fisher information is estimated and added to a running sum that decays by
``gamma``. From then on, a quadratic penalty with these weights holds the parameters near their values after the task.

The Fisher information is the mean of the squared gradients of single samples, of the training loss with the observed
labels ("empirical Fisher"). It is computed in evaluation mode, with running moments, in the precision of float32
weights. The outputs that compete for a sample are those of training: in task-incremental learning those of its task,
in class- and domain-incremental learning all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, Model, OutputMask, Strategy, forward
from contnorm.bench.strategies.tasks import TaskData, TaskInfo

__all__ = ["EWC"]


class EWC(Strategy):
    """CE(stream) + strength / 2 * sum of fisher * (weight - weight after the last task)**2.

    Args:
        config: Settings of a run, which the engine passes; for `bench.run`, use the keywords instead.
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
        self.fisher = {name: torch.zeros_like(p) for name, p in self._trained()}
        self.anchor = {name: p.detach().clone() for name, p in self._trained()}
        self.has_anchor = False

    def _trained(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def loss(
        self, model: Model, head: OutputMask, stream: Batch, replay: tuple[Batch, ...]
    ) -> tuple[Tensor, Tensor | None]:
        loss = head.cross_entropy(forward(model, stream), stream).mean()
        if self.has_anchor:  # a Python value may change in a hook: steps are captured again after it
            loss = loss + self.settings.strength / 2 * self._penalty()
        return loss, None

    def _penalty(self) -> Tensor:
        parts = [(self.fisher[name] * (p - self.anchor[name]).square()).sum() for name, p in self._trained()]
        return torch.stack(parts).sum()

    def on_task_end(self, task: TaskInfo, data: TaskData) -> None:
        new = self._estimate_fisher(data)
        for name, parameter in self._trained():
            self.fisher[name].mul_(self.settings.gamma).add_(new[name])
            self.anchor[name].copy_(parameter.detach())
        self.has_anchor = True

    def _estimate_fisher(self, data: TaskData) -> dict[str, Tensor]:
        names, parameters = zip(*self._trained(), strict=True)
        squares = [torch.zeros_like(parameter) for parameter in parameters]
        count = min(self.settings.fisher_samples, len(data))
        chosen = {number * len(data) // count for number in range(count)}
        self.model.eval()
        for number, sample in enumerate(data.batches(1)):
            if number in chosen:
                loss = self.head.cross_entropy(forward(self.model, sample), sample).sum()
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                for square, grad in zip(squares, grads, strict=True):
                    if grad is not None:
                        square.addcmul_(grad, grad, value=1 / count)
        self.model.train()
        return dict(zip(names, squares, strict=True))
