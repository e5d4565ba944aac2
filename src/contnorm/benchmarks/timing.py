"""Time of a piece of work on a device: on CUDA inside a graph, so that the host has no part in it.

A graph holds the work many times over, is replayed many times, and each replay is timed by the device itself. Given are
the 20th, 50th and 80th percentile of one piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Spread", "copy_bandwidth", "timed"]

WARM_UP = 3
ENOUGH = 2e-3  # seconds a replay should take at least, so that its own start does not count
REPLAYS = 30


@dataclass(frozen=True)
class Spread:
    """Percentiles of the seconds one piece of work takes."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """From single measurements.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).p50
            3.5
        """
        return cls(*(float(value) for value in np.percentile(seconds, [20, 50, 80])))


def timed(work: Callable[[], object], device: torch.device, replays: int = REPLAYS) -> Spread:
    """How long a piece of work takes.

    Args:
        work: Without arguments; what it needs is bound to it. On CUDA it is captured, so it must not ask the host.
        device: Where it runs.
        replays: How many measurements to take.
    """
    return _in_graph(work, replays) if device.type == "cuda" else _by_the_clock(work, replays)


def _by_the_clock(work: Callable[[], object], replays: int) -> Spread:
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
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)
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
    """Bytes a second that a plain copy moves, reading and writing counted: what any kernel can hope for."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device).p50
