"""Accuracies for a training loop of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from contnorm.bench.api.stream import Stream
from contnorm.bench.strategies.base import OutputMask
from contnorm.bench.streams.transforms import DeviceStream
from contnorm.errors import UserError

__all__ = ["accuracy_matrix", "evaluate"]


def evaluate(
    model: nn.Module, stream: Stream, *, tasks: int | None = None, seed: int = 0, batch_size: int = 1000
) -> NDArray[np.float64]:
    """Return the accuracy of a network on the test samples of each task, in percent.

    The network is evaluated as `bench.run` does it: in evaluation mode, and among the outputs that the scenario of the
    stream allows. Its mode is restored afterwards.

    Args:
        model: A network with one output per class of the stream (`Stream.num_outputs`).
        stream: The stream; not a multi-label one.
        tasks: Number of tasks to evaluate, from the first; None for all.
        seed: Seed of the run that the network was trained in.
        batch_size: Samples per forward pass.

    Example:
        >>> stream = Stream.from_arrays(np.eye(4), [0, 1, 2, 3], np.eye(4), [0, 1, 2, 3], tasks=2)
        >>> evaluate(nn.Identity(), stream)
        array([100., 100.])
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model={model!r}: use a torch.nn.Module.")
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size}: use 1 or more.")
    parameter = next(iter(model.parameters()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    data = DeviceStream(stream.sequence(seed), device)
    if data.sequence.multi_label:
        raise UserError("evaluate: a multi-label stream has no accuracies. Use bench.run, whose results have scores().")
    mask = OutputMask(data.competing)
    was_training = model.training
    model.eval()
    correct = np.zeros(data.sequence.tasks)
    total = np.bincount(data.sequence.test.task, minlength=data.sequence.tasks)
    try:
        with torch.no_grad():
            for items in torch.split(torch.arange(len(data.sequence.test), device=device), batch_size):
                task, label = data.test.task[items], data.test.label[items]
                logits = model(data.test_x(items))
                if logits.shape != (len(items), data.sequence.outputs):
                    raise UserError(
                        f"the network returns {tuple(logits.shape)} for {len(items)} samples. The stream has "
                        f"{data.sequence.outputs} outputs (Stream.num_outputs)."
                    )
                right = mask(logits.float(), task).argmax(1) == label
                np.add.at(correct, task.cpu().numpy(), right.cpu().numpy())
    finally:
        model.train(was_training)
    return (100 * correct / total)[:tasks]


def accuracy_matrix(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Stack the accuracies after each task to a matrix for `contnorm.bench.metrics`.

    Args:
        rows: Row i has the accuracies after task i, on at least the first i + 1 tasks, in percent.

    Returns:
        A square array; NaN where a row has no value.

    Example:
        >>> accuracy_matrix([[90.0], [70.0, 80.0]])
        array([[90., nan],
               [70., 80.]])
    """
    tasks = len(rows)
    matrix = np.full((tasks, tasks), np.nan)
    for i, row in enumerate(rows):
        values = np.asarray(row, dtype=np.float64)
        if values.ndim != 1 or not i < len(values) <= tasks:
            count = f"{i + 1} to {tasks}" if i + 1 < tasks else str(tasks)
            raise UserError(f"row {i} has shape {values.shape}. Give {count} accuracies after task {i}.")
        matrix[i, : len(values)] = values
    return matrix
