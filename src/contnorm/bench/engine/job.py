"""What is to be run, and where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from contnorm.bench.config.schema import RunConfig

__all__ = ["Job", "Workplace"]


@dataclass(frozen=True)
class Workplace:
    """Where runs are made: none of it is part of a run's identity.

    Attributes:
        runs: The folder of records and checkpoints.
        data_root: Where data lies.
        device: Where networks learn.
        checkpoint_every: Steps between checkpoints; one is also written at each task's end, but on a GPU the last's.
        lanes: How many runs go side by side: in one graph on a GPU, in processes of their own on a CPU.
        threads: Of each run on a CPU; the order of sums depends on it, so it is fixed and recorded.
        whole: Whether the images go to the GPU whole; None for where they fit.
        keep_weights: Whether a finished run leaves its weights beside its record.
        allow_missing: Whether published data sets may have other counts than published; records say so.
    """

    runs: Path
    data_root: Path
    device: torch.device
    checkpoint_every: int = 500
    lanes: int = 1
    threads: int = 1
    whole: bool | None = None
    keep_weights: bool = False
    allow_missing: bool = False


@dataclass(frozen=True)
class Job:
    """One run that is wanted: settings and a seed."""

    config: RunConfig
    seed: int
