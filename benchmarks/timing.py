"""Measures the time of a function on a device, and writes measurements to CSV files.

On CUDA the function is captured in a graph, so that host overhead is excluded: the graph contains the function many
times and is replayed many times, and CUDA events time each replay. Results are the 20th, 50th and 80th percentile of
the time of one call. Every row of a CSV file has the device and the software versions.
"""

from __future__ import annotations

import csv
import dataclasses
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import contnorm

WARM_UP = 3
MIN_REPLAY_SECONDS = 2e-3  # minimum seconds of a replay, so that its launch overhead is negligible
REPLAYS = 30


@dataclass(frozen=True)
class Percentiles:
    """Percentiles of the time of one call, in seconds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Percentiles:
        """Percentiles of single measurements.

        Example:
            >>> Percentiles.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).p50
            3.5
        """
        return cls(*(float(value) for value in np.percentile(seconds, [20, 50, 80])))


def measure_time(work: Callable[[], object], device: torch.device, replays: int = REPLAYS) -> Percentiles:
    """Measure the time of a function.

    Args:
        work: Function without arguments. On CUDA it is captured in a graph, so it must not synchronize with the host.
        device: Device that it runs on.
        replays: Number of measurements.
    """
    return _in_graph(work, replays) if device.type == "cuda" else _wall_clock(work, replays)


def _wall_clock(work: Callable[[], object], replays: int) -> Percentiles:
    for _ in range(WARM_UP):
        work()
    seconds = []
    for _ in range(replays):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return Percentiles.of(seconds)


def _in_graph(work: Callable[[], object], replays: int) -> Percentiles:
    once = captured(work, 1)
    several = max(1, min(200, round(MIN_REPLAY_SECONDS / max(1e-6, min(replayed(once, 5))))))
    graph = captured(work, several) if several > 1 else once
    return Percentiles.of([seconds / several for seconds in replayed(graph, replays)])


def captured(work: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """Capture a function that many times in one graph."""
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    """Return the seconds of each of so many replays."""
    graph.replay()
    seconds = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return seconds


def copy_bandwidth(device: torch.device, size: int = 2**28) -> float:
    """Bytes per second that a plain copy reads and writes: the upper bound for a memory-bound kernel."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / measure_time(lambda: target.copy_(source), device).p50


def flatten_row(row: Any) -> dict[str, Any]:
    """Flatten a row with its nested dataclasses into one dict; spreads of seconds become microseconds.

    Example:
        >>> from benchmarks.step import StepCase, StepRow
        >>> flatten_row(StepRow(StepCase("cn", "pool", "tf32", 8), Percentiles(1e-3, 2e-3, 3e-3)))["p50_us"]
        2000.0
    """
    line: dict[str, Any] = {}
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if field.name == "seconds" and dataclasses.is_dataclass(value):
            line |= {f"{name}_us": round(1e6 * v, 3) for name, v in vars(value).items()}
        elif dataclasses.is_dataclass(value):
            line |= flatten_row(value)
        elif isinstance(value, tuple):
            line[field.name] = "x".join(map(str, value))
        else:
            line[field.name] = round(value, 4) if isinstance(value, float) else value
    return line


def environment_of(device: torch.device) -> dict[str, str]:
    """Device and software versions that a measurement depends on."""
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "contnorm": contnorm.__version__,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows with the same fields to a CSV file."""
    lines = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
