"""Events of a run that loggers read: its start, and the end of each task."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from contnorm.bench.metrics.task_scores import TaskScores

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

__all__ = ["Started", "TaskDone", "peak_memory"]


@dataclass(frozen=True)
class Started:
    """The run starts, or resumes from a checkpoint.

    Attributes:
        done: Steps done before; 0 unless the run resumes.
        steps: Steps in total.
        provenance: Versions, device, data and commit, as in the record.
    """

    done: int
    steps: int
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskDone:
    """A task was learned, and the run was evaluated.

    Attributes:
        task: Index of the task.
        ends: Steps done when each task ends; ``ends[task]`` steps are done now.
        scores: Scores on each task, and on all tasks learned so far.
        seconds: Seconds of training (``train``) and of evaluation (``evaluate``) so far.
        memory: Peak memory in bytes: allocated on the GPU, or of the whole process on a CPU.
    """

    task: int
    ends: Sequence[int]
    scores: TaskScores
    seconds: Mapping[str, float]
    memory: int | None

    @property
    def done(self) -> int:
        """Steps done."""
        return self.ends[self.task]


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: allocated on a GPU, or of this process on a CPU; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
