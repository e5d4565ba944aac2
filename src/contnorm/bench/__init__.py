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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from contnorm.errors import UserError

if TYPE_CHECKING:
    from contnorm.bench import metrics as metrics
    from contnorm.bench.api.decide import decide
    from contnorm.bench.api.progress import RunInterrupted, StopRun
    from contnorm.bench.api.result import Result
    from contnorm.bench.api.run import DivergedError, resume, run, run_all
    from contnorm.bench.api.stream import Stream, evaluate, load_stream
    from contnorm.bench.api.sweep import SweepResult, sweep, tune
    from contnorm.bench.comparison import compare
    from contnorm.bench.data.registry import load_digits
    from contnorm.bench.engine.launch import RayLauncher
    from contnorm.bench.engine.run import Event, Launcher, RunOptions
    from contnorm.bench.loggers import Logger
    from contnorm.bench.memories import BalancedReservoir, Memory, PartitioningReservoir, Reservoir, Ring
    from contnorm.bench.records import Record, Runs, load_runs
    from contnorm.bench.registries import add_dataset, available, build_dataset, register
    from contnorm.bench.sequential import Verdict
    from contnorm.bench.strategies.base import Batch, Single, Strategy, forward, together
    from contnorm.bench.strategies.ewc import EWC
    from contnorm.bench.strategies.lwf import LwF
    from contnorm.bench.strategies.replay import ER, ERACE, DERpp

__all__ = [
    "ER",
    "ERACE",
    "EWC",
    "BalancedReservoir",
    "Batch",
    "DERpp",
    "DivergedError",
    "Event",
    "Launcher",
    "Logger",
    "LwF",
    "Memory",
    "PartitioningReservoir",
    "RayLauncher",
    "Record",
    "Reservoir",
    "Result",
    "Ring",
    "RunInterrupted",
    "RunOptions",
    "Runs",
    "Single",
    "StopRun",
    "Strategy",
    "Stream",
    "SweepResult",
    "UserError",
    "Verdict",
    "add_dataset",
    "available",
    "build_dataset",
    "compare",
    "decide",
    "evaluate",
    "forward",
    "load_digits",
    "load_runs",
    "load_stream",
    "register",
    "resume",
    "run",
    "run_all",
    "sweep",
    "together",
    "tune",
]

_MODULES = {  # below `contnorm.bench`, with their public names
    "api.decide": "decide",
    "api.progress": "RunInterrupted StopRun",
    "api.result": "Result",
    "api.run": "DivergedError resume run run_all",
    "api.stream": "Stream evaluate load_stream",
    "api.sweep": "SweepResult sweep tune",
    "comparison": "compare",
    "data.registry": "load_digits",
    "engine.launch": "RayLauncher",
    "engine.run": "Event Launcher RunOptions",
    "loggers": "Logger",
    "memories": "BalancedReservoir Memory PartitioningReservoir Reservoir Ring",
    "records": "Record Runs load_runs",
    "registries": "add_dataset available build_dataset register",
    "sequential": "Verdict",
    "strategies.base": "Batch Single Strategy forward together",
    "strategies.ewc": "EWC",
    "strategies.lwf": "LwF",
    "strategies.replay": "DERpp ER ERACE",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "metrics":
        return import_module("contnorm.bench.metrics")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(f"contnorm.bench.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        message = f'contnorm.bench.{name} needs {error.name}. Install it with: pip install "contnorm[bench]"'
        raise ImportError(message, name=error.name) from error
    return value


def __dir__() -> list[str]:
    return __all__
