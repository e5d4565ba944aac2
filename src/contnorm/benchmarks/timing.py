"""Measures the time of a function on a device; on CUDA inside a graph, so that host overhead is excluded.

The graph contains the function many times and is replayed many times; CUDA events time each replay. Results are the
20th, 50th and 80th percentile of the time of one call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Spread", "copy_bandwidth", "timed"]

WARM_UP = 3
ENOUGH = 2e-3  # minimum seconds of a replay, so that its launch overhead is negligible
REPLAYS = 30


@dataclass(frozen=True)
class Spread:
    """Percentiles of the time of one call, in seconds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """Percentiles of single measurements.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).p50
            3.5
        """
        return cls(*(float(value) for value in np.percentile(seconds, [20, 50, 80])))


def timed(work: Callable[[], object], device: torch.device, replays: int = REPLAYS) -> Spread:
    """Measure the time of a function.

    Args:
        work: Function without arguments. On CUDA it is captured in a graph, so it must not synchronize with the host.
        device: Device that it runs on.
        replays: Number of measurements.
    """
    return _in_graph(work, replays) if device.type == "cuda" else _wall_clock(work, replays)


def _wall_clock(work: Callable[[], object], replays: int) -> Spread:
    for _ in range(WARM_UP):
        work()
    seconds = []
    for _ in range(replays):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return Spread.of(seconds)


def _in_graph(work: Callable[[], object], replays: int) -> Spread:
    once = _captured(work, 1)
    several = max(1, min(200, round(ENOUGH / max(1e-6, min(_replayed(once, 5))))))
    graph = _captured(work, several) if several > 1 else once
    return Spread.of([seconds / several for seconds in _replayed(graph, replays)])


def _captured(work: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
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


def _replayed(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
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
    return 2 * size / timed(lambda: target.copy_(source), device).p50
