"""Parallel compilation of the Triton kernels that trainers need, before their first step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from contnorm.bench.engine.evaluate import evaluation_batch
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.models.build import MODELS
from contnorm.kernels.triton.launcher import can_compile_ahead, compiling_ahead
from contnorm.layers.base import NormLayer

__all__ = ["compile_kernels"]


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
