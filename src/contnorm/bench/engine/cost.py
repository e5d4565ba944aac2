"""Estimates of the time that runs take, for planning."""

from __future__ import annotations

import torch

from contnorm.bench.config.schema import RunConfig

__all__ = ["estimate_seconds"]

TASKS, SAMPLES = 10, 5000  # of a stream whose settings do not say


def estimate_seconds(config: RunConfig, device: torch.device) -> float:
    """Return an estimate of the seconds that one run keeps a device busy; its number of steps.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> short = from_dict({"stream": {"tasks": 2, "train_per_task": 100}, "train": {"batch": 10}})
        >>> estimate_seconds(short, torch.device("cpu"))
        20.0
    """
    stream, train = config.stream, config.train
    steps = (stream.tasks or TASKS) * (stream.train_per_task or SAMPLES) / (train.batch or 10)
    return steps if train.max_steps is None else min(steps, float(train.max_steps))
