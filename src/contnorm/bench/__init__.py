"""The benchmark: experiments in continual learning that compare normalization layers.

>>> import logging; logging.getLogger("contnorm").setLevel("ERROR")
>>> from contnorm import bench
>>> stream = bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=100)
>>> bn, cn = (bench.run(stream, norm=norm, strategy=bench.ER(replay=10), seeds=2, lanes=1) for norm in ("bn", "cn"))
>>> sorted(bench.compare(cn, bn).differences)
[0, 1]

Public names are imported on first use, so reading and comparing records does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contnorm.lazy_names import lazy_names

if TYPE_CHECKING:
    from contnorm.bench import metrics
    from contnorm.bench.api.datasets import add_dataset, build_dataset, fetch_dataset
    from contnorm.bench.api.decide import decide
    from contnorm.bench.api.evaluate import accuracy_matrix, evaluate
    from contnorm.bench.api.execution import ResumeError, RunInterrupted, RunOptions, resume
    from contnorm.bench.api.result import Result
    from contnorm.bench.api.run import DivergedError, run, run_all
    from contnorm.bench.api.stream import Stream, Task, TaskDataset, load_stream
    from contnorm.bench.api.sweep import SweepInterrupted, sweep
    from contnorm.bench.api.sweep_result import SweepResult, Trial
    from contnorm.bench.api.task_callback import StopRun
    from contnorm.bench.api.tune import tune
    from contnorm.bench.comparison import compare
    from contnorm.bench.engine.events import TaskDone
    from contnorm.bench.launchers.base import Launcher
    from contnorm.bench.launchers.ray_launcher import RayLauncher
    from contnorm.bench.loggers import LoggedRun, Logger
    from contnorm.bench.memories import BalancedReservoir, Memory, PartitioningReservoir, Reservoir, Ring, StreamInfo
    from contnorm.bench.metrics.task_scores import TaskScores
    from contnorm.bench.plan import Plan, Step
    from contnorm.bench.records import Record, Runs, load_runs
    from contnorm.bench.registries import (
        Listing,
        available,
        register,
    )
    from contnorm.bench.sequential import Verdict, decide_family
    from contnorm.bench.signals import StopSignals
    from contnorm.bench.strategies.base import (
        Batch,
        OutputMask,
        Single,
        Strategy,
        TaskData,
        TaskInfo,
        forward,
        together,
    )
    from contnorm.bench.strategies.derpp import DERpp
    from contnorm.bench.strategies.er import ER
    from contnorm.bench.strategies.er_ace import ERACE
    from contnorm.bench.strategies.ewc import EWC
    from contnorm.bench.strategies.lwf import LwF
    from contnorm.errors import UserCodeError, UserError

__all__ = [
    "ER",
    "ERACE",
    "EWC",
    "BalancedReservoir",
    "Batch",
    "DERpp",
    "DivergedError",
    "Launcher",
    "Listing",
    "LoggedRun",
    "Logger",
    "LwF",
    "Memory",
    "OutputMask",
    "PartitioningReservoir",
    "Plan",
    "RayLauncher",
    "Record",
    "Reservoir",
    "Result",
    "ResumeError",
    "Ring",
    "RunInterrupted",
    "RunOptions",
    "Runs",
    "Single",
    "Step",
    "StopRun",
    "StopSignals",
    "Strategy",
    "Stream",
    "StreamInfo",
    "SweepInterrupted",
    "SweepResult",
    "Task",
    "TaskData",
    "TaskDataset",
    "TaskDone",
    "TaskInfo",
    "TaskScores",
    "Trial",
    "UserCodeError",
    "UserError",
    "Verdict",
    "accuracy_matrix",
    "add_dataset",
    "available",
    "build_dataset",
    "compare",
    "decide",
    "decide_family",
    "evaluate",
    "fetch_dataset",
    "forward",
    "load_runs",
    "load_stream",
    "metrics",
    "register",
    "resume",
    "run",
    "run_all",
    "sweep",
    "together",
    "tune",
]

_NAMES_BY_MODULE = {
    "contnorm.bench.api.datasets": ("add_dataset", "build_dataset", "fetch_dataset"),
    "contnorm.bench.api.decide": ("decide",),
    "contnorm.bench.api.evaluate": ("accuracy_matrix", "evaluate"),
    "contnorm.bench.api.execution": ("ResumeError", "RunInterrupted", "RunOptions", "resume"),
    "contnorm.bench.api.result": ("Result",),
    "contnorm.bench.api.run": ("DivergedError", "run", "run_all"),
    "contnorm.bench.api.stream": ("Stream", "Task", "TaskDataset", "load_stream"),
    "contnorm.bench.api.sweep": ("SweepInterrupted", "sweep"),
    "contnorm.bench.api.sweep_result": ("SweepResult", "Trial"),
    "contnorm.bench.api.task_callback": ("StopRun",),
    "contnorm.bench.api.tune": ("tune",),
    "contnorm.bench.comparison": ("compare",),
    "contnorm.bench.launchers.base": ("Launcher",),
    "contnorm.bench.launchers.ray_launcher": ("RayLauncher",),
    "contnorm.bench.engine.events": ("TaskDone",),
    "contnorm.bench.loggers": ("LoggedRun", "Logger"),
    "contnorm.bench.memories": (
        "BalancedReservoir",
        "Memory",
        "PartitioningReservoir",
        "Reservoir",
        "Ring",
        "StreamInfo",
    ),
    "contnorm.bench.metrics.task_scores": ("TaskScores",),
    "contnorm.bench.plan": ("Plan", "Step"),
    "contnorm.bench.records": ("Record", "Runs", "load_runs"),
    "contnorm.bench.registries": (
        "Listing",
        "available",
        "register",
    ),
    "contnorm.bench.sequential": ("Verdict", "decide_family"),
    "contnorm.bench.signals": ("StopSignals",),
    "contnorm.bench.strategies.base": (
        "Batch",
        "OutputMask",
        "Single",
        "Strategy",
        "TaskData",
        "TaskInfo",
        "forward",
        "together",
    ),
    "contnorm.bench.strategies.derpp": ("DERpp",),
    "contnorm.bench.strategies.er": ("ER",),
    "contnorm.bench.strategies.er_ace": ("ERACE",),
    "contnorm.bench.strategies.ewc": ("EWC",),
    "contnorm.bench.strategies.lwf": ("LwF",),
    "contnorm.errors": ("UserCodeError", "UserError"),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE, ("metrics",), extra="bench")
