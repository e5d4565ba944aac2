"""A run (settings and a seed), how and where runs are executed, and what happens in them."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from contnorm.bench.components import Component, create_launcher, find_component
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import Source, find_stored
from contnorm.bench.data.formats import cores
from contnorm.bench.data.registry import load_source
from contnorm.bench.metrics import TaskScores
from contnorm.bench.records import Store
from contnorm.errors import UserError, check_count

if TYPE_CHECKING:
    from contnorm.bench.engine.execute import Work

GPU_LANES = 8


@dataclass(frozen=True)
class Run:
    """A run: settings and a seed.

    Attributes:
        config: The resolved settings.
        seed: The seed.
        objects: The Python objects that the settings name, such as a network, which are kept by this.

    Example:
        >>> Run(RunConfig(), 0) == Run(RunConfig(), 0)
        True
    """

    config: RunConfig
    seed: int
    objects: Sequence[Component] = field(default=(), compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "objects": ()}  # a worker gets them with its `Work`

    @property
    def source(self) -> str:
        """Name of the data set."""
        assert self.config.stream.source is not None  # filled in by `resolve`
        return self.config.stream.source


class Launcher(ABC):
    """Executes groups of runs on workers: in this process, in others, or on other machines.

    Attributes:
        remote: Whether workers may be on other machines, which have devices that this one may not have.

    Example:
        >>> from contnorm import bench
        >>> class OneAfterTheOther(bench.Launcher):
        ...     "Executes all groups in this process."
        ...     remote = False
        ...     def launch(self, work, groups, stop):
        ...         for group in groups:
        ...             yield from work(group, stop)
        >>> stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=50)
        >>> bench.run(stream, norm="bn", seeds=2, launcher=OneAfterTheOther()).accuracy.shape
        (2, 2, 2)
    """

    remote: ClassVar[bool] = True

    def workers(self) -> int | None:
        """Return the number of groups that are executed at a time, of which there are then enough; None if unknown."""
        return None

    @abstractmethod
    def launch(self, work: Work, groups: Sequence[Sequence[Run]], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute groups of runs; yields their events as they arrive.

        Args:
            work: ``work(group, stop)`` executes one group and yields its events. Send it to another process with
                `pickle_all`; ``work.options`` has the device, the CPU threads per run and the folder of runs.
            groups: The groups, longest first.
            stop: Called often; once it returns True, no group is started, and the running ones are asked to stop: the
                ``stop`` that their ``work`` was called with returns True.
        """


@dataclass(frozen=True)
class RunOptions:
    """How runs are executed. It is no part of their identity.

    Attributes:
        device: ``"cpu"``, ``"cuda"`` or a GPU by its index, such as ``"cuda:1"``.
        lanes: Number of runs at a time: in one CUDA graph on a GPU, in one process each on a CPU. None for 8 on a GPU
            and as many as the cores allow on a CPU.
        threads: CPU threads per run. The order of sums depends on it, so it is recorded.
        keep_weights: Whether a finished run saves its weights next to its record.
        allow_missing: Whether published data sets may have other image counts than published.
        launcher: Where runs are executed: the name of a launcher, or a launcher; None for this machine.
        devices: GPUs of this machine that are used in parallel, as a list of indices or as text (``"0,1"``, ``"all"``).
            Each has a process that executes up to ``lanes`` runs at a time.
        memory_moments: Whether to evaluate with the moments of the replay memory too, beside those of the settings.
        runs: Folder of records and checkpoints; None to keep results in memory only.
        data_root: Folder of data sets.
        sources: Data sets in memory, by name.
        log_every: Steps between the losses that loggers get; None for the interval of progress reports.
        checkpoint_every: Steps between checkpoints. One is also written at the end of each task. On a GPU they are at
            least 10 seconds apart.
        whole: Whether all images are copied to the GPU at the start; None to do so if they fit.

    Example:
        >>> RunOptions(lanes=2, threads=1).lane_count
        2
        >>> RunOptions(device="gpu")
        Traceback (most recent call last):
        contnorm.errors.UserError: device='gpu': use cpu, cuda, or a GPU by its index, such as cuda:1.
    """

    device: str = "cpu"
    lanes: int | None = None
    threads: int = 1
    keep_weights: bool = False
    allow_missing: bool = False
    launcher: str | Launcher | None = None
    devices: Sequence[int] | str | int | None = None
    memory_moments: bool = False
    runs: Path | None = None
    data_root: Path = Path("data")
    sources: Mapping[str, Source] = field(default_factory=dict)
    log_every: int | None = None
    checkpoint_every: int = 500
    whole: bool | None = None

    def __post_init__(self) -> None:
        check_count(self.threads, "threads")
        for name in ("keep_weights", "allow_missing", "memory_moments"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name}={getattr(self, name)!r}: use True or False.")
        if self.lanes is not None:
            check_count(self.lanes, "lanes")
        launcher = create_launcher(self.launcher) if isinstance(self.launcher, str) else self.launcher
        if not isinstance(launcher, Launcher | None):
            raise UserError(f"launcher={launcher!r}: use a name, or an object of a subclass of bench.Launcher.")
        remote = launcher is not None and launcher.remote
        if self.devices is not None:
            devices = list_devices(self.devices)
            device = "cuda" if len(devices) > 1 else f"cuda:{devices[0]}"
            if launcher is not None or self.device not in ("cpu", "cuda", device):
                raise UserError(f"devices={self.devices!r}: are GPUs of this machine. Use no launcher, and no device.")
            object.__setattr__(self, "devices", devices)
            object.__setattr__(self, "device", device)
        if not isinstance(self.device, str) or not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise UserError(f"device={self.device!r}: use cpu, cuda, or a GPU by its index, such as cuda:1.")
        if self.on_gpu and not remote:
            if not torch.cuda.is_available():
                raise UserError(f"device={self.device!r}: torch sees no GPU here. Use cpu.")
            there = torch.cuda.device_count()
            if (self.torch_device.index or 0) >= there:
                raise UserError(f"device={self.device!r}: torch sees {there} GPUs here.")
        object.__setattr__(self, "launcher", launcher)

    @property
    def torch_device(self) -> torch.device:
        """The device as torch has it."""
        return torch.device(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether runs are executed on a GPU."""
        return self.device != "cpu"

    @property
    def lane_count(self) -> int:
        """Number of runs at a time."""
        return self.lanes or (GPU_LANES if self.on_gpu else max(1, cores() // self.threads))

    @property
    def store(self) -> Store:
        """The records in the folder of runs."""
        assert self.runs is not None
        return Store(self.runs)

    def load(self, name: str) -> Source:
        """Load a data set by name: one in memory, of the folder of data sets, or of a plugin."""
        if name in self.sources:
            return self.sources[name]
        if "@" in name and find_stored(name, self.data_root) is None:
            component = find_component("dataset", name.partition("@")[0])
            stream = None if component is None else component.load()
            if stream is None or stream(self.data_root).source.name != name:
                raise UserError(
                    f"data set {name!r}: is not under {self.data_root}. Add it again with `contnorm data add`, set "
                    f"--data-root, or run the Python program that passed it."
                )
            source: Source = stream(self.data_root).source
            return source
        return load_source(name, self.data_root, allow_missing=self.allow_missing)


def list_devices(devices: Sequence[int] | str | int) -> tuple[int, ...]:
    """Return the indices of GPUs of this machine.

    Args:
        devices: The indices, as a list or as text: ``"0,1"``, or ``"all"``.

    Example:
        >>> list_devices("0,0")
        Traceback (most recent call last):
        contnorm.errors.UserError: devices='0,0': use different indices of GPUs, of which torch sees ..., or all.
    """
    there = torch.cuda.device_count()
    if devices == "all":
        indices = list(range(there))
    elif isinstance(devices, str):
        indices = [int(part) if part.strip().isdecimal() else -1 for part in devices.split(",")]
    else:
        indices = [devices] if isinstance(devices, int) else list(devices)
    if not indices or len(set(indices)) < len(indices) or not all(0 <= index < there for index in indices):
        raise UserError(
            f"devices={devices!r}: use different indices of GPUs, of which torch sees {there} here, or all."
        )
    return tuple(indices)


EventKind = Literal["recorded", "waiting", "started", "steps", "task", "finished", "stopped", "failed", "diverged"]


@dataclass(frozen=True)
class Event:
    """What has happened in a run. Progress bars, loggers and callbacks read it.

    Attributes:
        kind: ``"started"`` (or resumed), ``"steps"`` (some steps are done), ``"task"`` (a task was learned and
            evaluated), and at the end ``"finished"``, ``"stopped"`` on request, ``"diverged"`` (a loss, a parameter or
            a moment is not finite), ``"failed"``, or ``"recorded"`` if the run has a record already. ``"waiting"``:
            another process executes it.
        run: The run.
        done: Steps done.
        steps: Steps in total.
        task: Index of the task.
        loss: Loss of the last step.
        scores: Scores on each task, and on all tasks learned so far.
        last: Whether it was the last task.
        seconds: Seconds of training (``train``) and of evaluation (``evaluate``) so far.
        peak_memory: Peak memory in bytes: allocated on the GPU, or of the whole process on a CPU.
        seeds: All seeds with these settings that the same call runs.
        recorded: Whether a task was learned before the call. ``seconds`` is empty then, and ``peak_memory`` is None.
        why: Why a run failed or diverged, or who executes it.
        saved: Steps in the last checkpoint of a stopped run.
        provenance: Versions, device, data and commit of a run that starts, as in the record.
        results: Content of the record of a finished run.
        weights: Final weights as a safetensors file, if they are kept in memory.
        path: Path of the record; None without a folder of records.

    Example:
        >>> scores = TaskScores({"accuracy": [60.0, 80.0, None]}, {"accuracy": 70.0})
        >>> event = Event("task", Run(RunConfig(), seed=0), done=20, steps=30, task=1, scores=scores)
        >>> event.accuracy, event.average, event.seed, event.last
        ([60.0, 80.0], 70.0, 0, False)
    """

    kind: EventKind
    run: Run
    done: int = 0
    steps: int = 0
    task: int = 0
    loss: float = float("nan")
    scores: TaskScores = field(default_factory=lambda: TaskScores({}, {}))
    last: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory: int | None = None
    seeds: tuple[int, ...] = ()
    recorded: bool = False
    why: str = ""
    saved: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)
    weights: bytes | None = None
    path: Path | None = None

    @property
    def config(self) -> RunConfig:
        """Settings of the run."""
        return self.run.config

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.run.seed

    @property
    def hash(self) -> str:
        """Hash of the settings."""
        return self.config.hash

    @property
    def is_end(self) -> bool:
        """Whether nothing more happens in the run."""
        return self.kind not in ("waiting", "started", "steps", "task")

    @property
    def accuracy(self) -> list[float | None]:
        """Accuracy in percent on each task learned so far; empty for multi-label data, which `scores` has others of."""
        return list(self.scores.by_task.get("accuracy", ())[: self.task + 1])

    @property
    def average(self) -> float:
        """Mean accuracy on the tasks learned so far; for multi-label data the first score; NaN without scores."""
        return next(iter(self.scores.so_far.values()), nan)
