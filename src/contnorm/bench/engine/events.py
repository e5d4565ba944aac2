"""Events of a run: what the training loop yields, and progress bars, loggers and the scheduler read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.metrics.task_scores import TaskScores

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

__all__ = ["Diverged", "Event", "Failed", "Finished", "Started", "Steps", "Stopped", "TaskDone", "peak_memory"]


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
class Steps:
    """Steps of a run: steps done and total, the current task, and the loss of the last step."""

    done: int
    steps: int
    task: int
    loss: float


@dataclass(frozen=True)
class TaskDone:
    """A task was learned, and the run was evaluated on all tasks so far.

    Attributes:
        task: Index of the task.
        ends: Steps done when each task ends; ``ends[task]`` steps are done now.
        scores: Scores on each task, and on all tasks learned so far.
        seconds: Seconds of training (``train``) and of evaluation (``evaluate``) so far.
        memory: Peak memory in bytes: allocated on the GPU, or of the whole process on a CPU.
        config: Settings of the run.
        seed: Seed of the run.
        seeds: All seeds with these settings that the same call runs.
        recorded: Whether the run was recorded before the call. ``seconds`` is empty then, and ``memory`` is None.

    Example:
        >>> scores = TaskScores({"accuracy": [60.0, 80.0, None]}, {"accuracy": 70.0})
        >>> event = TaskDone(1, [10, 20, 30], scores, {}, None, RunConfig(), seed=0)
        >>> event.accuracy, event.average, event.done, event.steps, event.last
        ([60.0, 80.0], 70.0, 20, 30, False)
    """

    task: int
    ends: Sequence[int]
    scores: TaskScores
    seconds: Mapping[str, float]
    memory: int | None
    config: RunConfig
    seed: int
    seeds: tuple[int, ...] = ()
    recorded: bool = False

    @property
    def hash(self) -> str:
        """Hash of the settings."""
        return self.config.hash

    @property
    def done(self) -> int:
        """Steps done."""
        return self.ends[self.task]

    @property
    def steps(self) -> int:
        """Steps in total."""
        return self.ends[-1]

    @property
    def last(self) -> bool:
        """Whether it was the last task."""
        return self.task + 1 == len(self.ends)

    @property
    def accuracy(self) -> list[float | None]:
        """Accuracy in percent on each task learned so far; empty for multi-label data, which `scores` has others of."""
        return list(self.scores.by_task.get("accuracy", ())[: self.task + 1])

    @property
    def average(self) -> float:
        """Mean accuracy on the tasks learned so far; for multi-label data the first score, on these tasks' classes."""
        return next(iter(self.scores.so_far.values()))


@dataclass(frozen=True)
class Finished:
    """The run is complete.

    Attributes:
        results: The content of its record.
        weights: Its final weights as a safetensors file, if they are kept in memory.
    """

    results: dict[str, Any]
    weights: bytes | None = None


@dataclass(frozen=True)
class Stopped:
    """The run stopped on request.

    Attributes:
        done: Steps done.
        steps: Steps in total.
        saved: Steps in its last checkpoint; None if all steps done are saved.
    """

    done: int
    steps: int
    saved: int | None = None


@dataclass(frozen=True)
class Failed:
    """The run can't continue. Other runs of the group do."""

    why: str


@dataclass(frozen=True)
class Diverged(Failed):
    """The run diverged: its loss, a parameter or a moment is not finite. It would diverge again if repeated."""


Event = Started | Steps | TaskDone | Finished | Stopped | Failed


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: allocated on a GPU, or of this process on a CPU; None if it is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
