"""Names and values of the metrics that loggers get."""

from __future__ import annotations

import math
from collections.abc import Mapping

from contnorm.bench.metrics.task_scores import TaskScores

__all__ = ["loss_metrics", "score_metrics", "system_metrics", "task_metrics"]


def loss_metrics(loss: float, task: int) -> dict[str, float]:
    """Return the loss of a step, and the task that the step belongs to."""
    return _finite({"loss": loss, "task": task})


def task_metrics(scores: TaskScores) -> dict[str, float]:
    """Return the scores on each task, and on all tasks learned so far.

    Example:
        >>> task_metrics(TaskScores({"accuracy": [60.0, 80.0, None]}, {"accuracy": 70.0}))
        {'accuracy/task_0': 60.0, 'accuracy/task_1': 80.0, 'accuracy/average': 70.0}
    """
    by_task = {
        f"{name}/task_{task}": value
        for name, values in scores.by_task.items()
        for task, value in enumerate(values)
        if value is not None
    }
    return _finite({**by_task, **{f"{name}/average": value for name, value in scores.so_far.items()}})


def system_metrics(seconds: Mapping[str, float], steps: int, batch: int, memory: int | None) -> dict[str, float]:
    """Return times so far, the mean throughput of training, and the peak memory in MiB.

    Args:
        seconds: Seconds of training (``train``) and of evaluation (``evaluate``).
        steps: Steps done.
        batch: Stream samples per step.
        memory: Peak memory in bytes; None if it is unknown.

    Example:
        >>> system_metrics({"train": 2.0, "evaluate": 0.5}, steps=100, batch=10, memory=2**21)["system/memory_mib"]
        2.0
    """
    values = {f"system/{name}_seconds": seconds[name] for name in ("train", "evaluate") if name in seconds}
    if train := seconds.get("train", 0.0):
        values["system/steps_per_second"] = steps / train
        values["system/samples_per_second"] = steps * batch / train
    if memory is not None:
        values["system/memory_mib"] = memory / 2**20
    return _finite(values)


def score_metrics(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a finished run.

    Example:
        >>> score_metrics({"acc": 70.0, "fwt": float("nan")})
        {'score/acc': 70.0}
    """
    return _finite({f"score/{name}": value for name, value in scores.items()})


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}
