"""The kernels of a lane, compiled side by side before its first step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from contnorm.bench.engine.evaluate import evaluation_batch
from contnorm.bench.engine.trainer import Lane
from contnorm.bench.models import MODELS
from contnorm.kernels.triton.launcher import can_compile_ahead, compiling_ahead
from contnorm.layers.base import NormLayer

__all__ = ["compile_kernels"]


def compile_kernels(lanes: Sequence[Lane]) -> None:
    """Go through every kind of forward and backward pass of the lanes, on copies of their networks, launching nothing.

    Only for our own networks: one of a user's may do anything with numbers that mean nothing.
    """
    if not can_compile_ahead():
        return
    different = {(lane.config.model, lane.config.norm, lane.config.train.precision): lane for lane in lanes}
    with compiling_ahead():
        for lane in different.values():
            ours = lane.config.model.name in MODELS
            if ours and any(isinstance(module, NormLayer) and module.own_kernels for module in lane.model.modules()):
                _go_through(lane)


def _go_through(lane: Lane) -> None:
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
    """How many samples a forward pass of the plan may have."""
    return {size for step in lane.plan.steps for size in step.passes(lane.config.strategy.forward) if size > 1}
