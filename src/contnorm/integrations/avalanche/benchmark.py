"""Streams of the bench as benchmarks of Avalanche."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from avalanche.benchmarks import CLScenario, benchmark_from_datasets, with_classes_timeline, with_task_labels
from avalanche.benchmarks.utils import (
    DataAttribute,
    TaskAwareSupervisedClassificationDataset,
    TaskLabels,
    TransformGroups,
)
from avalanche.benchmarks.utils.flat_data import ConstantSequence
from torch import Tensor

from contnorm.bench.api.stream import Stream, TaskDataset, list_seeds
from contnorm.bench.streams.transforms import DeviceStream

__all__ = ["RandomCropAndFlip", "to_avalanche"]


def to_avalanche(stream: Stream, seed: int = 0) -> CLScenario:
    """Return a stream as an Avalanche benchmark, with one training and one test experience for each task.

    Samples, labels and their order are those of `bench.run` with the same seed. Inputs are tensors as the networks of
    the bench receive them (scaled to [0, 1], permuted and normalized as the stream defines it). If the stream has
    augmentation, the training transforms are its random crops and flips, drawn from torch's global generator; replay
    buffers draw new ones each time. Labels are output indices: classes are numbered in the order of the tasks.

    Task labels are the numbers of the tasks for scenario ``"task"``, and 0 for ``"class"`` and ``"domain"``. Avalanche
    has no rule by which only the outputs of a task compete: use a multi-head model for scenario ``"task"``.

    Args:
        stream: Stream with one label per sample.
        seed: Seed of the stream: of the class order, the permutations and the order of samples, where these are random.

    Returns:
        A benchmark with the streams ``train_stream`` and ``test_stream``.

    Raises:
        TypeError: If ``stream`` is not a `Stream`.
        ValueError: For multi-label and for task-free streams, which Avalanche's benchmarks can't represent.

    Example:
        >>> import numpy as np
        >>> x, y = np.random.default_rng(0).normal(size=(80, 8)), np.arange(80) % 4
        >>> benchmark = to_avalanche(Stream.from_arrays(x, y, x, y, tasks=2))
        >>> [experience.classes_in_this_experience for experience in benchmark.train_stream]
        [[0, 1], [2, 3]]
    """
    if not isinstance(stream, Stream):
        raise TypeError(f"to_avalanche: stream is a {type(stream).__name__}. Use a Stream, as of bench.load_stream.")
    (seed,) = list_seeds([seed])
    sequence = stream.sequence(seed)
    if sequence.multi_label:
        raise ValueError(f"to_avalanche: {stream.name} has several labels per sample. Use a stream with one label.")
    if sequence.task_free:
        raise ValueError(
            f"to_avalanche: {stream.name} is task-free, and experiences have boundaries. Use scenario='class', and "
            f"avalanche.benchmarks.split_online_stream for small experiences."
        )
    data = DeviceStream(sequence, torch.device("cpu"))
    is_task_aware = not sequence.competing.all()
    experiences = {
        name: [_experience(data, task, name == "test", task if is_task_aware else 0) for task in range(sequence.tasks)]
        for name in ("train", "test")
    }
    benchmark = with_classes_timeline(with_task_labels(benchmark_from_datasets(**experiences)))
    for experience in chain(benchmark.train_stream, benchmark.test_stream):
        # A list, because Avalanche's MultiHeadClassifier uses the classes as an index.
        experience.classes_in_this_experience = sorted(experience.classes_in_this_experience)
        experience.benchmark = benchmark
    # ICaRL reads the classes from the benchmark, as those of nc_benchmark have them.
    classes = [experience.classes_in_this_experience for experience in benchmark.train_stream]
    benchmark.n_classes_per_exp = [len(each) for each in classes]
    benchmark.classes_order = list(chain.from_iterable(classes))
    return benchmark


def _experience(data: DeviceStream, task: int, test: bool, task_label: int) -> Any:
    items = data.sequence.test if test else data.sequence.train
    labels = items.label[items.task == task].tolist()
    padding = None if test else data.sequence.padding
    augment = None if padding is None else RandomCropAndFlip(padding, _normalized_zero(data))
    return TaskAwareSupervisedClassificationDataset(
        [TaskDataset(data, task, test)],
        # A ConstantSequence, as in Avalanche's own benchmarks: its ICaRL can't join another sequence with its memory.
        data_attributes=[DataAttribute(labels, "targets"), TaskLabels(ConstantSequence(task_label, len(labels)))],
        transform_groups=TransformGroups({"train": augment, "eval": None}, current_group="eval" if test else "train"),
    )


def _normalized_zero(data: DeviceStream) -> Tensor:
    """Return the input value of a black pixel in each channel, (C, 1, 1)."""
    mean, std = data.sequence.mean, data.sequence.std
    if mean is None or std is None:
        return torch.zeros(1, 1, 1)
    return ((0 - torch.tensor(mean)) / torch.tensor(std)).view(-1, 1, 1)


class RandomCropAndFlip:
    """Transform of a stream's augmentation: pad with black pixels, crop to the old size, and flip half of the images.

    Args:
        padding: Pixels on each side.
        black: Value of a black pixel in each channel, (C, 1, 1).

    Example:
        >>> RandomCropAndFlip(1, torch.zeros(1, 1, 1))(torch.ones(3, 8, 8)).shape
        torch.Size([3, 8, 8])
    """

    def __init__(self, padding: int, black: Tensor) -> None:
        self.padding, self.black = padding, black

    def __call__(self, x: Tensor) -> Tensor:
        channels, height, width = x.shape
        padded = self.black.expand(channels, height + 2 * self.padding, width + 2 * self.padding).clone()
        padded[:, self.padding : self.padding + height, self.padding : self.padding + width] = x
        down, right = torch.randint(0, 2 * self.padding + 1, (2,)).tolist()
        view = padded[:, down : down + height, right : right + width]
        return view.flip(-1) if torch.rand(()) < 0.5 else view
