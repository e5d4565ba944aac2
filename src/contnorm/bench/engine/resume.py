"""Resuming a run from its newest usable checkpoint."""

from __future__ import annotations

import logging

from contnorm.bench.engine.checkpoint import Checkpoint, Checkpoints
from contnorm.bench.engine.code_state import UNREADABLE
from contnorm.bench.engine.convolutions import stored_table
from contnorm.bench.engine.measurements import Measurements
from contnorm.bench.engine.trainer import Trainer
from contnorm.errors import UserError

__all__ = ["can_resume", "resume_run"]


def can_resume(trainer: Trainer, checkpoint: Checkpoint) -> bool:
    """Whether a new trainer can resume from a checkpoint.

    User code must have the same state as when the checkpoint was written. A checkpoint of user code without digests of
    that state, as written by older versions, is not used. The state of a user's strategy is restored to see that it can
    be; if it can't, the trainer gets a new strategy.
    """
    fresh = trainer.fresh_code_state
    if not fresh:
        return True
    if checkpoint.progress.get("code_state") != fresh or UNREADABLE in fresh.values():
        return False
    try:
        restored, reason = trainer.load_strategy(checkpoint.tensors, checkpoint.progress), "load_state_dict() does not"
    except UserError as error:
        restored, reason = False, f"{error}. That does not"
    if not restored:
        logging.getLogger("contnorm").warning(
            f"strategy {trainer.config.strategy.name!r}: {reason} restore what state_dict() returned. Create all "
            f"tensors and modules in setup()."
        )
        trainer.restart_strategy()
    return restored


def resume_run(trainer: Trainer, checkpoints: Checkpoints | None) -> Measurements:
    """Load the newest usable checkpoint into a trainer and return the measurements saved with it."""
    if checkpoints is None:
        return Measurements()
    checkpoint = checkpoints.latest()
    _warn_of_broken(checkpoints, checkpoint)
    if checkpoint is None or not can_resume(trainer, checkpoint):
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
