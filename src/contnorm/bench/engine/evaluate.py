"""A row of the accuracy matrix: the model on the test samples of every task, with running or with oracle moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contnorm.bench.engine.trainer import Lane
from contnorm.bench.metrics.label_stats import LabelStats
from contnorm.bench.signals import check_stop
from contnorm.moments.reestimate import Reestimated, reestimate

__all__ = [
    "LabelRow",
    "Right",
    "TaskBatches",
    "TrainBatches",
    "classes_of",
    "count_labels",
    "count_right",
    "drift_of",
    "evaluation_batch",
    "interruptible",
    "never",
    "oracle_moments",
]

TEST_BATCH = 1000
LARGE_TEST_BATCH = 4096  # where a GPU has room: it has time for more, and a host little for many small passes
ROOM = 32  # maps of 64 channels of a large batch that a GPU's memory should hold
TEST_VALUES = 1000 * 3 * 84 * 84  # of larger pictures so many fewer go at a time


def never() -> bool:
    """A ``stop`` that never asks to."""
    return False


@contextmanager
def interruptible(model: nn.Module, stop: Callable[[], bool]) -> Iterator[None]:
    """Raise `StopRequested` from a forward pass before the next layer once ``stop()`` is true.

    A batch of an evaluation can take a minute on a CPU, a layer takes a fraction of that. A compiled model is left as
    it is, since a hook would have it compiled again; it stops between batches.
    """
    if stop is never or any(_is_compiled(module) for module in model.modules()):
        yield
        return
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(lambda *_: check_stop(stop)).remove)
        yield


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _batches(lane: Lane, items: Tensor, stop: Callable[[], bool]) -> Iterator[Tensor]:
    for part in torch.split(items, evaluation_batch(lane)):
        check_stop(stop)
        yield part


class Right(NamedTuple):
    """Right answers on each task."""

    all: list[int]  # outputs competing as the stream says
    within: list[int] | None  # only those of the task's own classes competing; None where that is no other question


def count_right(lanes: Sequence[Lane], tasks: Sequence[int], stop: Callable[[], bool] = never) -> list[Right]:
    """For each lane the right answers on each of its first tasks.

    All lanes are sent on their way before the first answer is waited for.

    Raises:
        StopRequested: Where ``stop()`` becomes true, which is asked before each batch and each layer.
    """
    with torch.no_grad():
        found = [_right_by_task(lane, first, stop) for lane, first in zip(lanes, tasks, strict=True)]
    return [Right(*(counts.tolist() for counts in by_head), *([None] * (2 - len(by_head)))) for by_head in found]


def _right_by_task(lane: Lane, tasks: int, stop: Callable[[], bool]) -> list[Tensor]:
    """Counts by head, still on the device. Test items lie task after task, and a batch may hold several tasks."""
    lane.model.eval()
    sizes = np.bincount(lane.data.stream.test.task, minlength=lane.data.stream.tasks)[:tasks].tolist()
    items = torch.arange(sum(sizes), device=lane.device)
    with interruptible(lane.model, stop):
        right = torch.cat([_right(lane, part) for part in _batches(lane, items, stop)], dim=1)
    return [torch.stack([part.sum() for part in torch.split(one, sizes)]) for one in right]


def evaluation_batch(lane: Lane) -> int:
    """How many pictures go at a time in evaluation."""
    picture = lane.data.pictures.test.pixels[0]
    most = TEST_BATCH
    if lane.device.type == "cuda":
        memory = torch.cuda.get_device_properties(lane.device).total_memory
        map_bytes = 64 * picture[0].numel() * 4
        most = min(LARGE_TEST_BATCH, max(TEST_BATCH, memory // (ROOM * map_bytes)))
    return max(1, min(most, TEST_VALUES // picture.numel()))


def _logits(lane: Lane, items: Tensor) -> Tensor:
    with lane.autocast():
        logits: Tensor = lane.model(lane.data.test_x(items))
    return logits.float()


def _right(lane: Lane, items: Tensor) -> Tensor:
    """(heads, items) whether the answer is right."""
    table = lane.data.test
    logits = _logits(lane, items)
    task, label = table.task[items], table.label[items]
    heads = [lane.head] if lane.own_head is None else [lane.head, lane.own_head]
    return torch.stack([head(logits, task).argmax(1) == label for head in heads])


class LabelRow(NamedTuple):
    """What was counted where images have several labels: on each task's own, and on those of all tasks together."""

    own: list[LabelStats]
    tally: LabelStats


def count_labels(lanes: Sequence[Lane], tasks: int, stop: Callable[[], bool] = never) -> list[LabelRow]:
    """For each lane what its network says of the labels of the first tasks' test images.

    All lanes are sent on their way before the first answer is waited for.

    Raises:
        StopRequested: As `count_right`.
    """
    with torch.no_grad():
        found = [_label_logits(lane, tasks, stop) for lane in lanes]
    return [_label_row(lane, logits.cpu().numpy(), tasks) for lane, logits in zip(lanes, found, strict=True)]


def _label_logits(lane: Lane, tasks: int, stop: Callable[[], bool]) -> Tensor:
    """(items, outputs), still on the device; test items lie task after task."""
    lane.model.eval()
    items = torch.arange(int((lane.data.stream.test.task < tasks).sum()), device=lane.device)
    with interruptible(lane.model, stop):
        return torch.cat([_logits(lane, part) for part in _batches(lane, items, stop)])


def _label_row(lane: Lane, logits: NDArray[np.float32], tasks: int) -> LabelRow:
    test = lane.data.stream.test
    task, label = test.task[: len(logits)], test.label[: len(logits)]
    said = np.nan_to_num(logits, nan=float(np.finfo(np.float32).min))  # what is no number is no yes
    own = [LabelStats.of(said[task == t], label[task == t]) for t in range(tasks)]
    return LabelRow(own, LabelStats.of(said, label))


class TrainBatches:
    """The training data of the first tasks, plainly, batch by batch; can be gone over again."""

    def __init__(self, lane: Lane, tasks: int, size: int | None = None, stop: Callable[[], bool] = never) -> None:
        self.lane, self.size, self.stop = lane, size or evaluation_batch(lane), stop
        self.items = torch.nonzero(lane.data.train.task < tasks).squeeze(1)

    def __iter__(self) -> Iterator[Tensor]:
        for part in torch.split(self.items, self.size):
            check_stop(self.stop)
            yield self.lane.data.train_x(part)


class TaskBatches:
    """The training or test data of one task, plainly, as batches of images and labels; can be gone over again."""

    def __init__(self, lane: Lane, task: int, *, test: bool = False, size: int | None = None) -> None:
        self.size = size or evaluation_batch(lane)
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


def oracle_moments(lane: Lane, tasks: int, stop: Callable[[], bool] = never) -> Reestimated:
    """Put the exact moments of the training data of the first tasks in place (BN*); undone by its context.

    Raises:
        StopRequested: As `count_right`; the moments then are those from before.
    """
    with interruptible(lane.model, stop):
        return reestimate(lane.model, TrainBatches(lane, tasks, stop=stop))


def drift_of(done: Reestimated) -> dict[str, dict[str, float]]:
    """How far the running moments were from the oracle's: the L1 distance, by layer."""
    return {
        name: {
            "mean": float((m.old_mean - m.new_mean).abs().sum()),
            "var": float((m.old_var - m.new_var).abs().sum()),
        }
        for name, m in done.moments.items()
    }
