"""A job (settings and a seed), and the environment that jobs are executed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contnorm.bench.components import find_component
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source, load_source
from contnorm.bench.data.store import find_stored
from contnorm.bench.records import Store
from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench.launchers.base import Launcher

__all__ = ["Job", "RunEnvironment"]


@dataclass(frozen=True)
class RunEnvironment:
    """The environment of runs. It is not part of a run's identity.

    Attributes:
        runs: The folder of records and checkpoints; None to keep results in memory only.
        data_root: The folder of data sets.
        device: The device to train on.
        checkpoint_every: Steps between checkpoints. One is also written at the end of each task. On a GPU they are at
            least 10 seconds apart, and none is written after the last task.
        lanes: Number of runs at a time: in one CUDA graph on a GPU, in one process each on a CPU.
        threads: CPU threads per run. The order of sums depends on it, so it is fixed and recorded.
        whole: Whether all images are copied to the GPU at the start; None to do so if they fit.
        keep_weights: Whether to save the weights of a finished run next to its record.
        memory_moments: Whether to evaluate with the moments of the replay memory too, beside those of the settings.
        allow_missing: Whether data sets may have other image counts than published. Records contain the counts.
        log_every: Steps between the losses that loggers get; None for the interval of progress reports.
        sources: Data sets in memory, by name; all others are loaded from the folder of data sets.
        launcher: Where runs are executed; None for this machine.
    """

    runs: Path | None
    data_root: Path
    device: torch.device
    checkpoint_every: int = 500
    lanes: int = 1
    threads: int = 1
    whole: bool | None = None
    keep_weights: bool = False
    memory_moments: bool = False
    allow_missing: bool = False
    log_every: int | None = None
    sources: Mapping[str, Source] = field(default_factory=dict)
    launcher: Launcher | None = None

    @property
    def store(self) -> Store:
        """The records in the folder of runs."""
        if self.runs is None:
            raise ValueError("the results of these runs are kept in memory, and have no store.")
        return Store(self.runs)

    def load(self, name: str) -> Source:
        """Load a data set by name."""
        source = self.sources.get(name)
        if source is None and "@" in name and find_stored(name, self.data_root) is None:
            source = self._load_registered(name)
        if source is None and "@" in name and find_stored(name, self.data_root) is None:
            raise UserError(
                f"data set {name!r}: is not under {self.data_root}. Add it again with `contnorm data add`, set "
                f"--data-root, or run the Python program that passed it."
            )
        return source or load_source(name, self.data_root, allow_missing=self.allow_missing)

    def _load_registered(self, name: str) -> Source | None:
        """Load a data set that a plugin registered; None if there is none of this name and content."""
        component = find_component("dataset", name.partition("@")[0])
        if component is None:
            return None
        stream: Any = component.load()
        source: Source = stream(self.data_root).source
        return source if source.name == name else None


@dataclass(frozen=True)
class Job:
    """One run to execute: settings and a seed."""

    config: RunConfig
    seed: int

    @property
    def source(self) -> str:
        """Name of its data set."""
        assert self.config.stream.source is not None  # filled in by `resolve`
        return self.config.stream.source
