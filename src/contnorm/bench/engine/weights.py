"""The weights of a finished run, saved next to its record on request: ``runs/<hash>/<seed>.safetensors``.

A record contains measurements only. Later measurements (`contnorm diagnose`) need the network itself.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.files import write_atomically
from contnorm.errors import UserError

__all__ = ["load_run_weights", "load_weights", "save_weights", "weights_path"]


def weights_path(record: Path) -> Path:
    """Return the path of the weights of a run, which exists if they were saved.

    Example:
        >>> print(weights_path(Path("runs/0123abcd/4.json")))
        runs/0123abcd/4.safetensors
    """
    return record.with_suffix(".safetensors")


def save_weights(trainer: Trainer, record: Path) -> None:
    """Write the parameters and buffers of a trainer next to its record, atomically."""
    copies = {name: t.detach().cpu().clone().contiguous() for name, t in trainer.model.state_dict().items()}
    write_atomically(weights_path(record), save(copies))


def load_run_weights(trainer: Trainer, record: Path) -> None:
    """Load the weights that were saved next to a record into a trainer.

    Raises:
        UserError: If there are none, or they are of another run.
    """
    path = weights_path(record)
    if not path.is_file():
        raise UserError(
            f"{path}: the weights of this run were not kept. Move {record} away, and run it again with "
            f"`contnorm run --keep-weights` and the settings it had."
        )
    load_weights(trainer, path, f"Move it and {record} away, and run it again with `contnorm run --keep-weights`.")


def load_weights(trainer: Trainer, path: Path, mend: str) -> None:
    """Load the weights in a safetensors file into a trainer.

    Args:
        trainer: The trainer.
        path: The file.
        mend: What to do about an error, for its message.

    Raises:
        UserError: If the file can't be read or belongs to another network.
    """
    try:
        trainer.model.load_state_dict(load(path.read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise UserError(f"{path}: is no safetensors file of this network's weights ({detail}). {mend}") from error
