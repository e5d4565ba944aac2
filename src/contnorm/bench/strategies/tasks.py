"""What the task hooks of a strategy receive: facts about a task, and its training samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from contnorm.bench.strategies.base import Batch
from contnorm.bench.streams.transforms import DeviceStream

__all__ = ["TaskData", "TaskInfo"]


@dataclass(frozen=True)
class TaskInfo:
    """A task of the stream.

    Attributes:
        number: Number of the task, from 0.
        classes: The outputs of the network that are labels in the task.
        tasks: Number of tasks in the run.

    Example:
        >>> task = TaskInfo(number=4, classes=(8, 9), tasks=5)
        >>> task.number == task.tasks - 1  # the last one
        True
    """

    number: int
    classes: tuple[int, ...]
    tasks: int


class TaskData:
    """The training samples of a task that was learned, in the order of the steps, each once and without augmentation.

    Args:
        stream: The stream on its device.
        items: Indices of the training items.

    Example:
        >>> from contnorm.bench.strategies.base import Strategy
        >>> class Counting(Strategy):
        ...     def on_task_end(self, task, data):
        ...         self.samples = sum(len(batch) for batch in data.batches(64))  # equal to len(data)
    """

    def __init__(self, stream: DeviceStream, items: Tensor) -> None:
        self._stream, self._items = stream, items

    def __len__(self) -> int:
        return len(self._items)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield batches on the device; the last one may be smaller.

        Args:
            size: Samples per batch.
        """
        if size < 1:
            raise ValueError(f"batches(size={size}): size must be 1 or more.")
        table = self._stream.train
        for items in torch.split(self._items, size):
            replayed = torch.zeros(len(items), dtype=torch.bool, device=items.device)
            yield Batch(self._stream.train_x(items), table.label[items], table.task[items], replayed=replayed)
