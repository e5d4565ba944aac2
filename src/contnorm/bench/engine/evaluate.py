"""Evaluation of a model on the test samples of each task, with running moments or with others.

One evaluation gives one row of the accuracy matrix. Oracle moments are the exact ones of all training data so far.
Memory moments are the exact, possibly weighted ones of the samples in the replay memory. In both, images are as in
evaluation, without augmentation. Task moments are the running moments at the end of each task. The running moments are
restored after the evaluation, so that training is not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contnorm.bench.engine.memory_samples import sample_weights, stored_items
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.metrics.multilabel import LabelStats
from contnorm.bench.signals import check_stop
from contnorm.moments.reestimate import Reestimated, reestimate

__all__ = [
    "CorrectCounts",
    "LabelRow",
    "TaskBatches",
    "TrainBatches",
    "classes_of",
    "count_correct",
    "count_labels",
    "count_with_task_moments",
    "drift_of",
    "evaluation_batch",
    "interruptible",
    "memory_moments",
    "never",
    "oracle_moments",
]

TEST_BATCH = 1000
LARGE_TEST_BATCH = 4096  # if GPU memory allows: many small passes are limited by the host
ROOM = 32  # feature maps of 64 channels, of a whole batch, that must fit into GPU memory
TEST_VALUES = 1000 * 3 * 84 * 84  # most values in a batch: batches of larger images are smaller


def never() -> bool:
    """A ``stop`` function that always returns False."""
    return False


@contextmanager
def interruptible(model: nn.Module, stop: Callable[[], bool]) -> Iterator[None]:
    """Raise `StopRequested` before the next layer of a forward pass once ``stop()`` returns True.

    An evaluation batch can take a minute on a CPU; a layer takes a fraction of that. On a GPU the layers of a batch are
    queued in milliseconds, so it stops between batches. So does a compiled model: hooks would cause a recompilation.
    """
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    if stop is never or on_gpu or any(_is_compiled(module) for module in model.modules()):
        yield
        return
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(lambda *_: check_stop(stop)).remove)
        yield


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _batches(trainer: Trainer, items: Tensor, stop: Callable[[], bool]) -> Iterator[Tensor]:
    for part in torch.split(items, evaluation_batch(trainer)):
        check_stop(stop)
        yield part


class CorrectCounts(NamedTuple):
    """The number of correct predictions on each task.

    Attributes:
        all: Among the outputs that the scenario of the stream allows.
        within: Among the classes of the task alone (task known); None unless the stream is class-incremental.
    """

    all: list[int]
    within: list[int] | None


def count_correct(
    trainers: Sequence[Trainer], tasks: Sequence[int], stop: Callable[[], bool] = never
) -> list[CorrectCounts]:
    """Count the correct predictions of each trainer on each of its first tasks.

    The work of all trainers is queued before the first result is copied to the host.

    Args:
        trainers: The trainers.
        tasks: The number of tasks to evaluate, for each trainer.
        stop: Called before each batch and each layer.

    Raises:
        StopRequested: If ``stop()`` returns True.
    """
    with torch.no_grad():
        results = [_correct_by_task(trainer, count, stop) for trainer, count in zip(trainers, tasks, strict=True)]
    return [
        CorrectCounts(*(counts.tolist() for counts in by_head), *([None] * (2 - len(by_head)))) for by_head in results
    ]


def _correct_by_task(trainer: Trainer, tasks: int, stop: Callable[[], bool]) -> list[Tensor]:
    """Return counts by head, on the device. Test items are ordered by task, and a batch may contain several tasks."""
    sizes = _test_sizes(trainer)[:tasks]
    correct = _correct_items(trainer, torch.arange(sum(sizes), device=trainer.device), stop)
    return [torch.stack([part.sum() for part in torch.split(of_head, sizes)]) for of_head in correct]


def _test_sizes(trainer: Trainer) -> list[int]:
    """Return the number of test items of each task."""
    sizes: list[int] = np.bincount(trainer.data.sequence.test.task, minlength=trainer.data.sequence.tasks).tolist()
    return sizes


def _correct_items(trainer: Trainer, items: Tensor, stop: Callable[[], bool]) -> Tensor:
    """Return whether the prediction of each test item is correct, of shape (heads, items)."""
    trainer.model.eval()
    with interruptible(trainer.model, stop):
        return torch.cat([_is_correct(trainer, part) for part in _batches(trainer, items, stop)], dim=1)


def count_with_task_moments(
    trainer: Trainer, running: CorrectCounts, task: int, stop: Callable[[], bool] = never
) -> CorrectCounts:
    """Count the correct predictions on earlier tasks again, each with the running moments saved at its end.

    These moments assume that the task is known. In class-incremental streams it is known for ``within`` alone, so
    ``all`` stays as it is.

    Args:
        trainer: The trainer, with the saved moments of all earlier tasks.
        running: The counts with the present running moments, which are those of the last task.
        task: The task that was learned last.
        stop: As `count_correct`.
    """
    counts = list(running.all if running.within is None else running.within)
    sizes = _test_sizes(trainer)
    for earlier in range(task):
        items = torch.arange(sizes[earlier], device=trainer.device) + sum(sizes[:earlier])
        with torch.no_grad(), trainer.using_moments_of(earlier):
            counts[earlier] = int(_correct_items(trainer, items, stop)[-1].sum())
    return CorrectCounts(counts, None) if running.within is None else CorrectCounts(running.all, counts)


def evaluation_batch(trainer: Trainer) -> int:
    """Return the batch size for evaluation."""
    picture = trainer.data.pictures.test.pixels[0]
    most = TEST_BATCH
    if trainer.device.type == "cuda":
        memory = torch.cuda.get_device_properties(trainer.device).total_memory
        map_bytes = 64 * picture[0].numel() * 4
        most = min(LARGE_TEST_BATCH, max(TEST_BATCH, memory // (ROOM * map_bytes)))
    return max(1, min(most, TEST_VALUES // picture.numel()))


def _logits(trainer: Trainer, items: Tensor) -> Tensor:
    """Return the logits of test items. If the batch may be padded, its last item is repeated; those logits are dropped.

    The number of test items is another one after each task. For every new batch size, the libraries of a GPU choose
    and set up the kernels of all layers again, which takes longer than the evaluation.
    """
    padding = _padded_size(len(items), evaluation_batch(trainer)) - len(items) if _may_pad(trainer) else 0
    batch = torch.cat([items, items[-1:].expand(padding)]) if padding else items
    with trainer.autocast():
        logits: Tensor = trainer.model(trainer.data.test_x(batch))
    return logits[: len(items)].float()


def _padded_size(count: int, most: int) -> int:
    """Return the size of a padded batch: a power of two, or the most that a batch may have.

    Example:
        >>> [_padded_size(count, 3000) for count in (1, 500, 512, 513, 2100, 3000)]
        [1, 512, 512, 1024, 3000, 3000]
    """
    return min(most, 1 << (count - 1).bit_length())


def _may_pad(trainer: Trainer) -> bool:
    """Whether batches are padded: on a GPU, if the output of a sample does not depend on the others."""
    on_gpu = trainer.device.type != "cpu"
    return on_gpu and trainer.has_package_network and _normalizes_samples_alone(trainer.model)


def _normalizes_samples_alone(model: nn.Module) -> bool:
    """Whether all norms of the package in a network have running moments or need none; others use those of the batch.

    Example:
        >>> _normalizes_samples_alone(nn.BatchNorm1d(2)), _normalizes_samples_alone(nn.GroupNorm(1, 2))
        (True, True)
        >>> _normalizes_samples_alone(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)))
        False
    """
    return all(getattr(module, "running_mean", module) is not None for module in model.modules())


def _is_correct(trainer: Trainer, items: Tensor) -> Tensor:
    """Return whether each prediction is correct, of shape (heads, items)."""
    table = trainer.data.test
    logits = _logits(trainer, items)
    task, label = table.task[items], table.label[items]
    heads = [trainer.head] if trainer.task_mask is None else [trainer.head, trainer.task_mask]
    return torch.stack([head(logits, task).argmax(1) == label for head in heads])


class LabelRow(NamedTuple):
    """Label counts of a multi-label evaluation.

    Attributes:
        own: On the test images of each task.
        tally: On the test images of all tasks together.
    """

    own: list[LabelStats]
    tally: LabelStats


def count_labels(trainers: Sequence[Trainer], tasks: int, stop: Callable[[], bool] = never) -> list[LabelRow]:
    """Evaluate the label predictions of each trainer on the test images of the first tasks.

    The work of all trainers is queued before the first result is copied to the host.

    Raises:
        StopRequested: As `count_correct`.
    """
    with torch.no_grad():
        results = [_label_logits(trainer, tasks, stop) for trainer in trainers]
    return [_label_row(trainer, logits.cpu().numpy(), tasks) for trainer, logits in zip(trainers, results, strict=True)]


def _label_logits(trainer: Trainer, tasks: int, stop: Callable[[], bool]) -> Tensor:
    """Return logits of shape (items, outputs), on the device. Test items are ordered by task."""
    trainer.model.eval()
    items = torch.arange(int((trainer.data.sequence.test.task < tasks).sum()), device=trainer.device)
    with interruptible(trainer.model, stop):
        return torch.cat([_logits(trainer, part) for part in _batches(trainer, items, stop)])


def _label_row(trainer: Trainer, logits: NDArray[np.float32], tasks: int) -> LabelRow:
    test = trainer.data.sequence.test
    task, label = test.task[: len(logits)], test.label[: len(logits)]
    scores = np.nan_to_num(logits, nan=float(np.finfo(np.float32).min))  # NaN counts as a negative prediction
    by_task = [LabelStats.of(scores[task == t], label[task == t]) for t in range(tasks)]
    return LabelRow(by_task, LabelStats.of(scores, label))


class TrainBatches:
    """Batches of the training images of the first tasks, without augmentation; can be iterated repeatedly."""

    def __init__(self, trainer: Trainer, tasks: int, size: int | None = None, stop: Callable[[], bool] = never) -> None:
        self.trainer, self.size, self.stop = trainer, size or evaluation_batch(trainer), stop
        self.items = torch.nonzero(trainer.data.train.task < tasks).squeeze(1)

    def __len__(self) -> int:
        return max(1, -(-len(self.items) // self.size))  # torch.split of no items has one empty part

    def __iter__(self) -> Iterator[Tensor]:
        for part in torch.split(self.items, self.size):
            check_stop(self.stop)
            yield self.trainer.data.train_x(part)


class TaskBatches:
    """Batches of images and labels of one task, without augmentation; can be iterated repeatedly."""

    def __init__(self, trainer: Trainer, task: int, *, test: bool = False, size: int | None = None) -> None:
        self.size = size or evaluation_batch(trainer)
        data = trainer.data
        self.table, self.images = (data.test, data.test_x) if test else (data.train, data.train_x)
        self.items = torch.nonzero(self.table.task == task).squeeze(1)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in torch.split(self.items, self.size):
            yield self.images(part), self.table.label[part]


def classes_of(trainer: Trainer, x: Tensor, task: int) -> Tensor:
    """Return the predicted classes of images of one task, among the outputs that the scenario allows."""
    with trainer.autocast():
        logits = trainer.model(x)
    return trainer.head(logits.float(), torch.full((len(x),), task, device=trainer.device)).argmax(1)


def oracle_moments(trainer: Trainer, tasks: int, stop: Callable[[], bool] = never) -> Reestimated:
    """Replace running moments by the exact moments of the training data of the first tasks (BN*).

    Leaving the context of the returned object restores the running moments.

    Raises:
        StopRequested: As `count_correct`; the running moments are then unchanged.
    """
    with interruptible(trainer.model, stop):
        return reestimate(trainer.model, TrainBatches(trainer, tasks, stop=stop))


class MemoryBatches:
    """Batches of the images in the memory at the end of a task, with their weights; can be iterated repeatedly."""

    def __init__(self, trainer: Trainer, task: int, stop: Callable[[], bool] = never) -> None:
        self.trainer, self.size, self.stop = trainer, evaluation_batch(trainer), stop
        items = stored_items(trainer.plan, trainer.plan.ends[task])
        weights = sample_weights(trainer.config, trainer.plan, trainer.data.sequence.train.task[items], task)
        self.items, self.weights = torch.from_numpy(items).to(trainer.device), torch.from_numpy(weights)

    def __len__(self) -> int:
        return max(1, -(-len(self.items) // self.size))  # torch.split of no items has one empty part

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part, weights in zip(torch.split(self.items, self.size), torch.split(self.weights, self.size), strict=True):
            check_stop(self.stop)
            yield self.trainer.data.train_x(part), weights


def memory_moments(trainer: Trainer, task: int, stop: Callable[[], bool] = never) -> Reestimated:
    """Replace running moments by the exact moments of the samples in the memory at the end of a task.

    Leaving the context of the returned object restores the running moments.

    Raises:
        StopRequested: As `count_correct`; the running moments are then unchanged.
    """
    weights = None if trainer.config.evaluate.weights == "plain" else _weights_of
    with interruptible(trainer.model, stop):
        return reestimate(trainer.model, MemoryBatches(trainer, task, stop), weights=weights)


def _weights_of(batch: tuple[Tensor, Tensor]) -> Tensor:
    return batch[1]


def drift_of(done: Reestimated) -> dict[str, dict[str, float]]:
    """Return the L1 distance between running and oracle moments, by layer."""
    return {
        name: {
            "mean": float((m.old_mean - m.new_mean).abs().sum()),
            "var": float((m.old_var - m.new_var).abs().sum()),
        }
        for name, m in done.moments.items()
    }
