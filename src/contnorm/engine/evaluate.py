"""A row of the accuracy matrix: the model on the test samples of every task, with running or with oracle moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from contnorm.catalog import NORMS
from contnorm.engine.lane import Lane
from contnorm.oracle import Reestimated, reestimate
from contnorm.recognition import Recognized, recognize

__all__ = [
    "Right",
    "TaskBatches",
    "TrainBatches",
    "classes_of",
    "count_right",
    "drift_of",
    "keeps_moments",
    "oracle_moments",
]

TEST_BATCH = 1000


class Right(NamedTuple):
    """Right answers on each task."""

    all: list[int]  # outputs competing as the stream says
    within: list[int] | None  # only those of the task's own classes competing; None where that is no other question


def count_right(lanes: Sequence[Lane], tasks: Sequence[int]) -> list[Right]:
    """For each lane the right answers on each of its first tasks.

    All lanes are sent on their way before the first answer is waited for.
    """
    with torch.no_grad():
        found = [_right_by_task(lane, first) for lane, first in zip(lanes, tasks, strict=True)]
    return [Right(*(counts.tolist() for counts in by_head), *([None] * (2 - len(by_head)))) for by_head in found]


def _right_by_task(lane: Lane, tasks: int) -> list[Tensor]:
    """Counts by head, still on the device. Test items lie task after task, and a batch may hold several tasks."""
    lane.model.eval()
    sizes = np.bincount(lane.data.stream.test.task, minlength=lane.data.stream.tasks)[:tasks].tolist()
    items = torch.arange(sum(sizes), device=lane.device)
    right = torch.cat([_right(lane, part) for part in torch.split(items, TEST_BATCH)], dim=1)
    return [torch.stack([part.sum() for part in torch.split(one, sizes)]) for one in right]


def _right(lane: Lane, items: Tensor) -> Tensor:
    """(heads, items) whether the answer is right."""
    table = lane.data.test
    with lane.autocast():
        logits = lane.model(lane.data.test_x(items)).float()
    task, label = table.task[items], table.label[items]
    heads = [lane.head] if lane.own_head is None else [lane.head, lane.own_head]
    return torch.stack([head(logits, task).argmax(1) == label for head in heads])


class TrainBatches:
    """The training data of the first tasks, plainly, batch by batch; can be gone over again."""

    def __init__(self, lane: Lane, tasks: int, size: int = TEST_BATCH) -> None:
        self.lane, self.size = lane, size
        self.items = torch.nonzero(lane.data.train.task < tasks).squeeze(1)

    def __iter__(self) -> Iterator[Tensor]:
        for part in torch.split(self.items, self.size):
            yield self.lane.data.train_x(part)


class TaskBatches:
    """The training or test data of one task, plainly, as batches of images and labels; can be gone over again."""

    def __init__(self, lane: Lane, task: int, *, test: bool = False, size: int = TEST_BATCH) -> None:
        self.size = size
        data = lane.data
        self.table, self.images = (data.test, data.test_x) if test else (data.train, data.train_x)
        self.items = torch.nonzero(self.table.task == task).squeeze(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in torch.split(self.items, self.size):
            yield self.images(part), self.table.label[part]


def classes_of(lane: Lane, x: Tensor, task: int) -> Tensor:
    """The lane's answers for images of one task, outputs competing as the stream says."""
    with lane.autocast():
        logits = lane.model(x)
    return lane.head(logits.float(), torch.full((len(x),), task, device=lane.device)).argmax(1)


def keeps_moments(model: nn.Module) -> bool:
    """Whether any norm of the model keeps running moments."""
    found = (recognize(module) for module in model.modules())
    return any(isinstance(f, Recognized) and NORMS[f.norm].keeps_moments for f in found)


def oracle_moments(lane: Lane, tasks: int) -> Reestimated:
    """Put the exact moments of the training data of the first tasks in place (BN*); undone by its context."""
    return reestimate(lane.model, TrainBatches(lane, tasks))


def drift_of(done: Reestimated) -> dict[str, dict[str, float]]:
    """How far the running moments were from the oracle's: the L1 distance, by layer."""
    return {
        name: {
            "mean": float((m.old_mean - m.new_mean).abs().sum()),
            "var": float((m.old_var - m.new_var).abs().sum()),
        }
        for name, m in done.moments.items()
    }
