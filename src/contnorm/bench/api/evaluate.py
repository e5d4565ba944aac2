"""Accuracies for a training loop of the user's own."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from contnorm.bench.api.stream import Stream
from contnorm.bench.strategies.base import OutputMask
from contnorm.bench.streams.device import DeviceStream
from contnorm.errors import UserError

__all__ = ["evaluate"]


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
