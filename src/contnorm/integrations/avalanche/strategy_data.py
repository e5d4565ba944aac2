"""Data and models of Avalanche strategies: batches to measure moments on, and layers that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from avalanche.models import avalanche_forward
from avalanche.models.batch_renorm import BatchRenorm2D
from avalanche.models.utils import is_multi_task_module
from torch import nn
from torch.utils.data import DataLoader

__all__ = ["batches_of", "check_layers", "forward_on"]


def check_layers(model: nn.Module, caller: str) -> None:
    """Raise for layers of Avalanche whose moments can be neither replaced nor converted."""
    name = next((name for name, module in model.named_modules() if isinstance(module, BatchRenorm2D)), None)
    if name is not None:
        raise ValueError(
            f"{caller}: layer {name!r} is Avalanche's BatchRenorm2D, whose moments have another form. Use a model with "
            f"batch norm and NormPlugin('brn', total_steps=...)."
        )


def forward_on(device: torch.device) -> Callable[[nn.Module, Any], object]:
    """Return a function that runs a model on the inputs, and where it takes them the task labels, of a batch."""

    def forward(model: nn.Module, batch: Any) -> object:
        tasks = batch[2].to(device) if len(batch) > 2 else None
        return avalanche_forward(model, batch[0].to(device), tasks)

    return forward


def batches_of(strategy: Any, dataset: Any) -> DataLoader[Any]:
    """Return the samples of a data set in batches that can be read repeatedly, with the transforms of evaluation.

    A multi-task model calls its layers once for each task of a batch, so its batches have samples of one task.
    """
    data = dataset.eval() if hasattr(dataset, "eval") else dataset
    size = strategy.eval_mb_size
    indices = [np.arange(len(data))]
    if is_multi_task_module(strategy.model):
        tasks = np.asarray([int(task) for task in dataset.targets_task_labels])
        indices = [np.flatnonzero(tasks == task) for task in np.unique(tasks)]
    batches = [part[start : start + size].tolist() for part in indices for start in range(0, len(part), size)]
    # A generator of its own: reading the data must not advance the one that training draws from.
    return DataLoader(
        data, batch_sampler=batches, collate_fn=getattr(data, "collate_fn", None), generator=torch.Generator()
    )
