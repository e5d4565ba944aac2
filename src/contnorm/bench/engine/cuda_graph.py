"""Execution of the training steps of several runs on a GPU: all in one CUDA graph.

The graph contains one step of every trainer, from the gather of its samples to the update, each on its own CUDA
stream. The index of the current step is a tensor on the device that the graph itself increments, so a replay needs
nothing from the host. A graph serves a stretch: consecutive steps of the same shape. A smaller last batch, or a memory
that is not full yet, ends a stretch, and so do hooks at task boundaries and frozen moments. Short stretches run without
a graph. If a later stretch has the shape of the last captured one, as after the smaller last batch of each task, its
graph is replayed again. The number of trainers that run together does not change the result of any of them.

A replay executes no Python. User code whose steps draw random numbers or copy values to the host is therefore refused;
with ``train.graph=off`` every step runs in Python.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from contnorm.bench.engine.evaluate import evaluation_batch
from contnorm.bench.engine.trainer import StepTable, Trainer, same_shape_end
from contnorm.errors import UserCodeError
from contnorm.kernels.convolution import using_table
from contnorm.kernels.triton.launcher import can_compile_ahead, compiling_ahead
from contnorm.norms.base import NormLayer

WARM_UP = 1  # eager steps before a capture: they initialize libraries, load kernels and create optimizer state
USER_WARM_UP = 3  # later steps of user code may do what the first does not
SHORT = 24  # stretches of fewer steps are not worth a capture


class _Captured(NamedTuple):
    """A captured step: its graph, the tables of rows that the graph reads, and the shape of the steps it serves."""

    graph: torch.cuda.CUDAGraph
    rows: list[StepTable]
    shape: Hashable


class GraphStepper:
    """Executes training steps of trainers that are at the same step, by replays of captured steps.

    Args:
        trainers: The trainers, of runs that can share a graph.
    """

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers = list(trainers)
        compile_kernels(self.trainers)
        self.streams = [torch.cuda.Stream(trainer.device) for trainer in trainers]  # type: ignore[no-untyped-call]
        self.cursor = torch.zeros(1, dtype=torch.int64, device=trainers[0].device)
        self.losses = torch.zeros(len(trainers), device=trainers[0].device)
        self.rows: list[StepTable] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.last_captured: _Captured | None = None
        self.has_user_code = any(trainer.user_code is not None for trainer in trainers)
        self.warm_up = USER_WARM_UP if self.has_user_code else WARM_UP
        self.start = self.end = -1  # first and end step of the stretch that the graph is for
        self.first = self.last = -1  # first and end step whose rows are on the device

    def advance(self, steps: int) -> list[float]:
        """Do some steps; returns the last loss of each trainer."""
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
        self.start, self.end = done, min(_captured_end(trainer, done) for trainer in self.trainers)
        self.graph, self.rows = None, []
        captured = self.last_captured
        if captured is not None and captured.shape == self._shape():
            self.graph, self.rows = captured.graph, captured.rows

    def _shape(self) -> Hashable:
        """Return what distinguishes the steps of this stretch from others that need a graph of their own."""
        return tuple((t.plan.steps[self.start].sizes, self.start >= t.freeze_step) for t in self.trainers)

    def reset(self) -> None:
        """Forget captured steps, after hooks that may have changed what a step does."""
        self.graph, self.rows, self.last_captured = None, [], None
        self.start = self.end = self.first = self.last = -1

    def _load_rows(self, done: int) -> None:
        end = self.end if not self.rows else min(self.end, done + len(self.rows[0].table))
        self.first, self.last = done, min(trainer.feed.reach(done, end) for trainer in self.trainers)
        rows = [trainer.rows(self.first, self.last) for trainer in self.trainers]
        if not self.rows:
            self.rows = rows
        else:  # later rows of the stretch, or of a later stretch with this graph, which reads these tensors
            for current, new in zip(self.rows, rows, strict=True):
                current.overwrite(new)

    def _run_steps(self, done: int, steps: int) -> None:
        self.cursor.fill_(done - self.first)
        for _ in range(steps):
            eager_steps = self.trainers[0].done - self.start
            if self.graph is None and eager_steps == min(self.warm_up, self.end - self.start - 1):
                self._check_steps()
            if self.graph is None and eager_steps >= self.warm_up and self.end - self.start >= SHORT:
                self.last_captured = None  # frees its memory before the capture
                self.graph = self._capture()
                if not self.has_user_code:  # steps of user code are checked again in every stretch
                    self.last_captured = _Captured(self.graph, self.rows, self._shape())
            if self.graph is None:
                self._step_all_lanes()
            else:
                self.graph.replay()
            for trainer in self.trainers:
                trainer.done += 1

    def _check_steps(self) -> None:
        """Refuse user code that drew random numbers in a step, which a replay would not do again.

        Checked in every stretch, also in a short one, so that it does not depend on the length of a stretch.
        """
        for trainer in self.trainers:
            if trainer.user_code is not None and trainer.user_code.draws_random:
                raise UserCodeError(
                    f"{trainer.user_code}: draws random numbers in a training step, such as for dropout, which a "
                    f"captured step would repeat. Set train.graph=off."
                )

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
        graph, main = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        random_state = torch.cuda.get_rng_state()
        try:
            # Other threads use the device during the capture: one copies images, one writes checkpoints.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._step_all_lanes()
        except RuntimeError as error:
            torch.cuda.set_stream(main)  # a failed capture leaves its own stream current
            _renew_generator(random_state)
            for trainer in self.trainers:
                if trainer.user_code is not None:
                    raise trainer.user_code.capture_error(error) from error
            raise
        return graph


def _renew_generator(state: torch.Tensor) -> None:
    """Let torch draw random numbers on the GPU again after a failed capture, from a state saved before it.

    The generator would otherwise stay in the capture, and refuse every later draw of the process, also by other code.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
    generator.set_state(state)


def _captured_end(trainer: Trainer, done: int) -> int:
    """Return the end of the steps that one graph serves: of the same shape, with moments frozen or not."""
    end = same_shape_end(trainer.plan.steps, done)
    return end if done >= trainer.freeze_step else min(end, trainer.freeze_step)


def compile_kernels(trainers: Sequence[Trainer]) -> None:
    """Compile the kernels of every batch size, by passes over copies of the networks that launch no kernel.

    For networks of the package only: the values in such a pass are meaningless, and user code may depend on them.
    """
    if not can_compile_ahead():
        return
    networks: dict[Hashable, Trainer] = {}
    for trainer in trainers:
        norms = [module for module in trainer.model.modules() if isinstance(module, NormLayer)]
        if trainer.has_package_network and (trainer.convolutions or any(norm.has_triton_kernels for norm in norms)):
            config = trainer.config
            networks[config.model, config.norm, config.train.precision, trainer.convolutions.digest] = trainer
    with compiling_ahead():
        for trainer in networks.values():
            _run_passes(trainer)


def _run_passes(trainer: Trainer) -> None:
    model, shape = copy.deepcopy(trainer.model), trainer.data.sequence.source.train_images.shape[1:]
    forward = trainer.config.strategy.forward
    sizes = {size for step in trainer.plan.steps for size in step.passes(forward) if size > 1}
    images = torch.zeros((max(sizes | {evaluation_batch(trainer)}), *shape), device=trainer.device)
    images = images.to(memory_format=torch.channels_last)
    with trainer.autocast():
        with using_table(trainer.convolutions):
            for size in sorted(sizes):
                model.train()(images[:size]).sum().backward()
        with torch.no_grad():
            model.eval()(images[: evaluation_batch(trainer)])
