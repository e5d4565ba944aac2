"""Execution of training steps: one trainer after the other on a CPU, or all trainers in one CUDA graph on a GPU.

The graph contains one step of every trainer, from the gather of its samples to the update, with one CUDA stream for
each. The index of the current step is a tensor on the device that the graph itself increments, so a replay needs
nothing from the host. A graph serves a stretch: consecutive steps of the same shape. A smaller last batch, or a memory
that is not full yet, ends a stretch. Short stretches run without a graph. The number of trainers that run together does
not change the result of any of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from contnorm.bench.engine.evaluate import evaluation_batch
from contnorm.bench.engine.step_tensors import StepTable, stretch_end
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.models.build import MODELS
from contnorm.bench.streams.image_store import ImageFeed
from contnorm.kernels.side_stream import SideStream
from contnorm.kernels.triton.launcher import can_compile_ahead, compiling_ahead
from contnorm.layers.base import NormLayer

__all__ = ["Stepper", "compile_kernels", "stepper_for"]

WARM_UP = 3  # eager steps before a capture, so that libraries are initialized
ASK_EVERY = 0.5  # seconds between two calls of ``stop``
SHORT = 24  # stretches of fewer steps are not worth a capture


class Stepper(Protocol):
    """Executes training steps of several trainers, all at the same step."""

    def advance(self, steps: int, stop: Callable[[], bool] = lambda: False) -> list[float]:
        """Do ``steps`` steps, or fewer if ``stop()`` returns True meanwhile; returns the last loss of each trainer."""
        ...


def stepper_for(trainers: Sequence[Trainer]) -> Stepper:
    """Return the stepper for the device of the trainers: a CUDA graph on a GPU, a plain loop on a CPU."""
    return _GraphStepper(trainers) if trainers[0].device.type == "cuda" else _EagerStepper(trainers)


class _EagerStepper:
    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers = trainers

    def advance(self, steps: int, stop: Callable[[], bool] = lambda: False) -> list[float]:
        last_check = time.monotonic()
        for _ in range(steps):
            losses = [trainer.step() for trainer in self.trainers]
            if time.monotonic() - last_check > ASK_EVERY:  # for slow steps only: the caller checks after fast ones
                last_check = time.monotonic()
                if stop():
                    break
        return [float(loss) for loss in losses]


class _GraphStepper:
    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers = list(trainers)
        compile_kernels(self.trainers)
        self.streams = [torch.cuda.Stream(trainer.device) for trainer in trainers]  # type: ignore[no-untyped-call]
        if len(self.trainers) == 1:  # several trainers fill a GPU already, and were slower with it
            trainers[0].side_stream = SideStream(torch.cuda.Stream(trainers[0].device))  # type: ignore[no-untyped-call]
        self.cursor = torch.zeros(1, dtype=torch.int64, device=trainers[0].device)
        self.losses = torch.zeros(len(trainers), device=trainers[0].device)
        self.rows: list[StepTable] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.in_python = False  # whether every step must run in Python, without a graph
        self.start = self.end = -1  # first and end step of the stretch that the graph is for
        self.first = self.last = -1  # first and end step whose rows are on the device

    def advance(self, steps: int, stop: Callable[[], bool] = lambda: False) -> list[float]:
        """Do all steps without calling ``stop``: they are queued long before the device executes them."""
        remaining = steps
        while remaining:
            done = self.trainers[0].done
            if not self.start <= done < self.end:
                self._begin_stretch(done)
            if not self.first <= done < self.last:
                self._load_rows(done)
            count = min(remaining, self.last - done)
            self._run_steps(done, count)
            remaining -= count
        values: list[float] = self.losses.tolist()
        return values

    def _begin_stretch(self, done: int) -> None:
        plans = [trainer.plan.steps for trainer in self.trainers]
        self.start, self.end = done, min(stretch_end(steps, done) for steps in plans)
        self.graph, self.rows = None, []

    def _load_rows(self, done: int) -> None:
        self.first, self.last = done, min(trainer.feed.reach(done, self.end) for trainer in self.trainers)
        rows = self._new_rows()
        if not self.rows:
            self.rows = rows
        else:  # later rows of the same stretch, which is longer than the feed's window; the graph reads these tensors
            for current, new in zip(self.rows, rows, strict=True):
                current.overwrite(new)

    def _new_rows(self) -> list[StepTable]:
        """Return the rows of each trainer. Lanes with the same plan, and all images on the device, share their rows."""
        by_key: dict[tuple[object, ...], StepTable] = {}
        for trainer in self.trainers:
            key = self._key(trainer)
            if key not in by_key:
                by_key[key] = trainer.rows(self.first, self.last)
        return [by_key[self._key(trainer)] for trainer in self.trainers]

    def _key(self, trainer: Trainer) -> tuple[object, ...]:
        return (id(trainer.plan), len(trainer.logits)) if type(trainer.feed) is ImageFeed else (id(trainer),)

    def _run_steps(self, done: int, steps: int) -> None:
        self.cursor.fill_(done - self.first)
        for _ in range(steps):
            eager_steps = self.trainers[0].done - self.start
            is_long = self.end - self.start >= SHORT
            if self.graph is None and eager_steps >= WARM_UP and is_long and not self._needs_python():
                self.graph = self._capture()
            if self.graph is None:
                self._step_all_lanes()
            else:
                self.graph.replay()
            for trainer in self.trainers:
                trainer.done += 1

    def _needs_python(self) -> bool:
        """Whether user code changes Python state or draws random numbers in a step; a replay would do neither."""
        self.in_python = self.in_python or any(
            trainer.draws_random or trainer.code_changes() for trainer in self.trainers
        )
        return self.in_python

    def _step_all_lanes(self) -> None:
        """Do one step of every trainer, each on its own CUDA stream; synchronized before and after."""
        main = torch.cuda.current_stream()
        for number, (trainer, stream) in enumerate(zip(self.trainers, self.streams, strict=True)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                self.losses[number].copy_(trainer.learn(self.rows[number].at(self.cursor)))
        for stream in self.streams:
            main.wait_stream(stream)
        self.cursor.add_(1)

    def _capture(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        for trainer in self.trainers:
            trainer.optimizer.zero_grad()  # the graph allocates its own gradients
        graph = torch.cuda.CUDAGraph()
        # Other threads use the device during the capture: one copies images, one writes checkpoints.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step_all_lanes()
        return graph


def compile_kernels(trainers: Sequence[Trainer]) -> None:
    """Compile the kernels of every batch size, by passes over copies of the networks that launch no kernel.

    For networks of the package only: the values in such a pass are meaningless, and user code may depend on them.
    """
    if not can_compile_ahead():
        return
    distinct = {
        (trainer.config.model, trainer.config.norm, trainer.config.train.precision): trainer for trainer in trainers
    }
    with compiling_ahead():
        for trainer in distinct.values():
            builtin = trainer.config.model.name in MODELS
            if builtin and any(
                isinstance(module, NormLayer) and module.has_triton_kernels for module in trainer.model.modules()
            ):
                _run_passes(trainer)


def _run_passes(trainer: Trainer) -> None:
    model = copy.deepcopy(trainer.model)
    shape = trainer.data.sequence.source.train_images.shape[1:]

    def images(count: int) -> torch.Tensor:
        return torch.zeros((count, *shape), device=trainer.device).to(memory_format=torch.channels_last)

    with trainer.autocast():
        for count in sorted(_pass_sizes(trainer)):
            model.train()(images(count)).sum().backward()
        with torch.no_grad():
            model.eval()(images(evaluation_batch(trainer)))


def _pass_sizes(trainer: Trainer) -> set[int]:
    """Return the batch sizes of the forward passes in the plan."""
    return {size for step in trainer.plan.steps for size in step.passes(trainer.config.strategy.forward) if size > 1}
