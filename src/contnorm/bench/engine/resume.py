"""Resuming a run from its newest usable checkpoint."""

from __future__ import annotations

import logging

from contnorm.bench.engine.checkpoint import Checkpoint, Checkpoints
from contnorm.bench.engine.convolutions import stored_table
from contnorm.bench.engine.measurements import Measurements
from contnorm.bench.engine.trainer import Trainer

__all__ = ["resume_run"]


def resume_run(trainer: Trainer, checkpoints: Checkpoints | None) -> Measurements:
    """Load the newest usable checkpoint into a trainer and return the measurements saved with it."""
    if checkpoints is None:
        return Measurements()
    checkpoint = checkpoints.latest()
    _warn_of_broken(checkpoints, checkpoint)
    if checkpoint is None:
        return Measurements()
    stored_table(checkpoint.progress, trainer.device, f"{checkpoints.folder}: the checkpoint")  # may be refused
    trainer.load(checkpoint.tensors, checkpoint.progress)
    return Measurements(**checkpoint.progress["tally"])


def _warn_of_broken(checkpoints: Checkpoints, usable: Checkpoint | None) -> None:
    problems = checkpoints.problems()
    if problems:
        next_step = (
            "the run starts again from step 0" if usable is None else f"resuming after step {usable.progress['done']}"
        )
        logging.getLogger("contnorm").warning(
            f"{checkpoints.folder}: {next_step}, since a newer checkpoint can't be used ({'; '.join(problems)})."
        )
