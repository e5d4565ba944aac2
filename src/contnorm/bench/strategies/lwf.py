"""Learning without forgetting (Li & Hoiem, 2016): distillation from the network before the task, without replay.

The old outputs of the network are trained to stay those of a copy from before the task, on the samples of the stream.
Old outputs are, in class-incremental learning, those of the classes of earlier tasks; in domain-incremental learning
all; in task-incremental learning those of each earlier task, with a softmax for each and the sum of the losses.

As in the paper, the old network is in evaluation mode: it uses its running moments and does not update them. They are
of earlier tasks, and the new samples do not have them. With Teacher Adaptation (Szatkowski et al., Adapt Your Teacher,
WACV 2024), it normalizes with the moments of the batch and follows the new data: ``teacher_moments="batch"``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch, Model, OutputMask, Strategy, TaskData, TaskInfo, forward
from contnorm.moments.freeze import stats_mode


class LwF(Strategy):
    """CE(stream) + strength * CE(softmax of old outputs, softmax of old outputs before the task), at a temperature.

    Args:
        **settings: The fields of ``Settings``.

    Example:
        >>> LwF(temperature=3.0).overrides
        {'strategy.name': 'lwf', 'strategy.temperature': 3.0}
    """

    name = "lwf"
    all_groups: Tensor

    @dataclass(frozen=True)
    class Settings:
        """Own settings of LwF.

        Attributes:
            temperature: Temperature of both softmax functions.
            strength: Weight of the distillation.
            teacher_moments: Moments that the old network normalizes with: its running ones, or those of the batch
                (Teacher Adaptation).
        """

        temperature: float = 2.0
        strength: float = 1.0
        teacher_moments: Literal["running", "batch"] = field(default="running", metadata={"added": "0.3"})

        def __post_init__(self) -> None:
            if self.temperature <= 0 or self.strength < 0:
                raise ValueError("temperature must be above 0, and strength 0 or more")

    def setup(self) -> None:
        self.old = copy.deepcopy(self.model).eval().requires_grad_(False)
        if self.settings.teacher_moments == "batch":
            stats_mode(self.old, "batch")
        self.register_buffer("all_groups", torch.zeros_like(self.head.competing))
        self.group_count = 0  # none in the first task

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.group_count)

    def set_extra_state(self, state: Tensor) -> None:
        self.group_count = int(state)

    @property
    def groups(self) -> Tensor:
        """(groups, outputs) bool: the old outputs of each softmax."""
        return self.all_groups[: self.group_count]

    def loss(self, model: Model, head: OutputMask, stream: Batch) -> tuple[Tensor, Tensor | None]:
        logits = forward(model, stream)
        loss = head.cross_entropy(logits, stream).mean()
        if self.group_count:  # changes at the end of a task only, so that steps can be captured
            with torch.no_grad():
                target = self._log_probabilities(forward(self.old, stream)).exp()
            log_probabilities = self._log_probabilities(logits).masked_fill(~self.groups, 0.0)
            distillation = -(target * log_probabilities).sum((1, 2)).mean()
            loss = loss + self.settings.strength * distillation
        return loss, None

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """(B, groups, outputs) logarithms of the softmax over each group."""
        scaled = (logits.float() / self.settings.temperature)[:, None].masked_fill(~self.groups, float("-inf"))
        return torch.log_softmax(scaled, 2)

    def on_task_end(self, task: TaskInfo, data: TaskData) -> None:
        self.old.load_state_dict(self.model.state_dict())
        if self.head.all_compete:
            self.all_groups[0, list(task.classes)] = True
            self.group_count = 1
        else:
            self.all_groups[task.number] = self.head.competing[task.number]
            self.group_count = task.number + 1
