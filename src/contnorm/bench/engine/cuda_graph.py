"""How lanes move on: one after the other, or, on CUDA, side by side in one graph with a stream a lane.

A graph holds one step of every lane, from the gather of its samples to its update. Where a lane is in its plan is a
number on the device that the graph itself counts up, so a replay needs nothing from the host. Steps of another shape (a
smaller last batch, a memory not filled yet) end a stretch; a stretch that is short runs without a graph. How many lanes
move together changes nothing in any of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from contnorm.bench.engine.compile import compile_kernels
from contnorm.bench.engine.step_tensors import Rows, stretch_end
from contnorm.bench.engine.trainer import Lane
from contnorm.bench.streams.image_store import Feed
from contnorm.kernels.side_stream import Beside

__all__ = ["Mover", "mover_for"]

WARM_UP = 3  # steps run as they are before a capture, so that libraries have set themselves up
ASK_EVERY = 0.5  # seconds between questions whether to stop
SHORT = 24  # steps for which a capture would not pay


class Mover(Protocol):
    """Moves all its lanes on, in step."""

    def advance(self, steps: int, stop: Callable[[], bool] = lambda: False) -> list[float]:
        """Take so many steps, or fewer if ``stop()`` becomes true on the way; returns each lane's last loss."""
        ...


def mover_for(lanes: Sequence[Lane]) -> Mover:
    """The way lanes move on their device."""
    return _Graphed(lanes) if lanes[0].device.type == "cuda" else _OneByOne(lanes)


class _OneByOne:
    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes

    def advance(self, steps: int, stop: Callable[[], bool] = lambda: False) -> list[float]:
        asked = time.monotonic()
        for _ in range(steps):
            losses = [lane.step() for lane in self.lanes]
            if time.monotonic() - asked > ASK_EVERY:  # only where steps are slow: else the caller asks soon enough
                asked = time.monotonic()
                if stop():
                    break
        return [float(loss) for loss in losses]


class _Graphed:
    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = list(lanes)
        compile_kernels(self.lanes)
        self.streams = [torch.cuda.Stream(lane.device) for lane in lanes]  # type: ignore[no-untyped-call]
        if len(self.lanes) == 1:  # several fill a GPU by themselves, and were slower so
            lanes[0].beside = Beside(torch.cuda.Stream(lanes[0].device))  # type: ignore[no-untyped-call]
        self.cursor = torch.zeros(1, dtype=torch.int64, device=lanes[0].device)
        self.losses = torch.zeros(len(lanes), device=lanes[0].device)
        self.rows: list[Rows] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.in_python = False  # whether no graph may be made, since every step has to be run by Python
        self.start = self.end = -1  # of the stretch of steps that the graph is for
        self.first = self.last = -1  # of those whose rows are on the device

    def advance(self, steps: int, stop: Callable[[], bool] = lambda: False) -> list[float]:
        """All steps: they are sent to the device long before they are done there."""
        left = steps
        while left:
            done = self.lanes[0].done
            if not self.start <= done < self.end:
                self._begin_stretch(done)
            if not self.first <= done < self.last:
                self._bring_rows(done)
            here = min(left, self.last - done)
            self._move(done, here)
            left -= here
        values: list[float] = self.losses.tolist()
        return values

    def _begin_stretch(self, done: int) -> None:
        plans = [lane.plan.steps for lane in self.lanes]
        self.start, self.end = done, min(stretch_end(steps, done) for steps in plans)
        self.graph, self.rows = None, []

    def _bring_rows(self, done: int) -> None:
        self.first, self.last = done, min(lane.feed.reach(done, self.end) for lane in self.lanes)
        rows = self._new_rows()
        if not self.rows:
            self.rows = rows
        else:  # later rows of the same stretch, which is longer than a feed can reach
            for own, new in zip(self.rows, rows, strict=True):
                own.overwrite(new)

    def _new_rows(self) -> list[Rows]:
        """Of each lane; lanes that are shown the same, from images that are all there, read the same rows."""
        made: dict[tuple[object, ...], Rows] = {}
        for lane in self.lanes:
            key = self._key(lane)
            if key not in made:
                made[key] = lane.rows(self.first, self.last)
        return [made[self._key(lane)] for lane in self.lanes]

    def _key(self, lane: Lane) -> tuple[object, ...]:
        return (id(lane.plan), len(lane.logits)) if type(lane.feed) is Feed else (id(lane),)

    def _move(self, done: int, steps: int) -> None:
        self.cursor.fill_(done - self.first)
        for _ in range(steps):
            moved = self.lanes[0].done - self.start
            if self.graph is None and moved >= WARM_UP and self.end - self.start >= SHORT and not self._needs_python():
                self.graph = self._captured()
            if self.graph is None:
                self._all_lanes()
            else:
                self.graph.replay()
            for lane in self.lanes:
                lane.done += 1

    def _needs_python(self) -> bool:
        """Whether user code keeps state in Python as it learns, or draws random numbers: a replay would not do so."""
        self.in_python = self.in_python or any(lane.draws_random or lane.code_changes() for lane in self.lanes)
        return self.in_python

    def _all_lanes(self) -> None:
        """One step of every lane, each on its own stream, joined before and after."""
        main = torch.cuda.current_stream()
        for number, (lane, stream) in enumerate(zip(self.lanes, self.streams, strict=True)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self.losses[number].copy_(lane.learn(self.rows[number].at(self.cursor)))
        for stream in self.streams:
            main.wait_stream(stream)
        self.cursor.add_(1)

    def _captured(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        for lane in self.lanes:
            lane.optimizer.zero_grad()  # the graph makes its own gradients, in its own memory
        graph = torch.cuda.CUDAGraph()
        # Other threads may talk to the device meanwhile: one brings images, one writes checkpoints.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._all_lanes()
        return graph
