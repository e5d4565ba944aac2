"""The launcher of this machine: one process on a GPU, a process per GPU on several, a pool of processes on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import torch

from contnorm.bench.engine.job import RunEnvironment
from contnorm.bench.engine.job_events import Event
from contnorm.bench.engine.process_pool import run_in_processes
from contnorm.bench.engine.units import Unit
from contnorm.bench.engine.work import UnitWork
from contnorm.bench.launchers.base import Launcher
from contnorm.errors import UserError

__all__ = ["LocalLauncher", "list_devices"]


class LocalLauncher(Launcher):
    """Executes units in processes of this machine. Units of a single GPU, and single ones, run in this process.

    Args:
        devices: Indices of GPUs, as a list or as text (``"0,1"``, or ``"all"``). There is one worker process for each
            of them. None for one GPU.

    Example:
        >>> from pathlib import Path
        >>> environment = RunEnvironment(None, Path("data"), torch.device("cpu"), lanes=4)
        >>> LocalLauncher().processes(3, environment)
        3
    """

    remote: ClassVar[bool] = False

    def __init__(self, devices: Sequence[int] | str | int | None = None) -> None:
        self.devices = () if devices is None else list_devices(devices)

    def workers(self) -> int | None:
        """Return the number of GPUs; None on a CPU, where a unit is one run."""
        return len(self.devices) or None

    def processes(self, jobs: int, environment: RunEnvironment) -> int:
        """Return the number of worker processes for some jobs; 1 if this process executes them itself."""
        if environment.device.type != "cpu":
            return max(1, len(self.devices))
        return min(environment.lanes, jobs)

    def launch(self, work: UnitWork, units: Sequence[Unit], stop: Callable[[], bool]) -> Iterator[Event]:
        """Execute units in a pool of worker processes; a process of a GPU sees no other one."""
        processes = self.processes(len(units), work.environment)
        variables = [{"CUDA_VISIBLE_DEVICES": _visible_name(index)} for index in self.devices]
        on_gpus = work.environment.device.type != "cpu" and variables
        yield from run_in_processes(work, units, processes, stop, variables if on_gpus else ())


def list_devices(devices: Sequence[int] | str | int) -> tuple[int, ...]:
    """Return the indices of GPUs of this machine.

    Args:
        devices: The indices, as a list or as text: ``"0,1"``, or ``"all"``.

    Raises:
        UserError: If it is no list of different indices, or torch does not see these GPUs.

    Example:
        >>> list_devices("0,x")
        Traceback (most recent call last):
        contnorm.errors.UserError: devices='0,x': use different indices of GPUs, such as 0,1, or all.
    """
    there = torch.cuda.device_count()
    if devices == "all":
        indices: list[int | str] = list(range(there))
    else:
        parts = (
            devices.split(",") if isinstance(devices, str) else devices if isinstance(devices, Iterable) else [devices]
        )
        indices = [int(part) if isinstance(part, str) and part.strip().isdecimal() else part for part in parts]
    valid = [index for index in indices if isinstance(index, int) and not isinstance(index, bool) and index >= 0]
    if len(valid) < len(indices) or len(set(valid)) < len(valid) or not (valid or devices == "all"):
        raise UserError(f"devices={devices!r}: use different indices of GPUs, such as 0,1, or all.")
    if not there:
        raise UserError(f"devices={devices!r}: torch sees no GPU here. Use the CPU, without devices.")
    if max(valid) >= there:
        raise UserError(f"devices={devices!r}: torch sees {there} GPUs here, 0 to {there - 1}.")
    return tuple(valid)


def _visible_name(index: int) -> str:
    """Return the name of a GPU in CUDA_VISIBLE_DEVICES; this process may itself see some of the GPUs only."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if visible is None else visible.split(",")[index].strip()
