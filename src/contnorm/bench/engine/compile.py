"""Parallel compilation of the Triton kernels that lanes need, before their first step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from contnorm.bench.engine.evaluate import evaluation_batch
from contnorm.bench.engine.trainer import Lane
from contnorm.bench.models.build import MODELS
from contnorm.kernels.triton.launcher import can_compile_ahead, compiling_ahead
from contnorm.layers.base import NormLayer

__all__ = ["compile_kernels"]


def compile_kernels(lanes: Sequence[Lane]) -> None:
    """Compile the kernels of every batch size, by passes over copies of the networks that launch no kernel.

    For networks of the package only: the values in such a pass are meaningless, and user code may depend on them.
    """
    if not can_compile_ahead():
        return
    distinct = {(lane.config.model, lane.config.norm, lane.config.train.precision): lane for lane in lanes}
    with compiling_ahead():
        for lane in distinct.values():
            builtin = lane.config.model.name in MODELS
            if builtin and any(
                isinstance(module, NormLayer) and module.has_triton_kernels for module in lane.model.modules()
            ):
                _run_passes(lane)


def _run_passes(lane: Lane) -> None:
    model = copy.deepcopy(lane.model)
    shape = lane.data.stream.source.train_images.shape[1:]

    def images(count: int) -> torch.Tensor:
        return torch.zeros((count, *shape), device=lane.device).to(memory_format=torch.channels_last)

    with lane.autocast():
        for count in sorted(_pass_sizes(lane)):
            model.train()(images(count)).sum().backward()
        with torch.no_grad():
            model.eval()(images(evaluation_batch(lane)))


def _pass_sizes(lane: Lane) -> set[int]:
    """Return the batch sizes of the forward passes in the plan."""
    return {size for step in lane.plan.steps for size in step.passes(lane.config.strategy.forward) if size > 1}
