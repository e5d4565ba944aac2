"""The weights of a finished run, kept beside its record where that was asked for: ``runs/<hash>/<seed>.safetensors``.

A record says what was measured; what is to be measured later (`contnorm diagnose`) needs the network itself.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from contnorm.bench.engine.trainer import Lane
from contnorm.bench.records import write_atomically
from contnorm.errors import UserError

__all__ = ["keep_weights", "load_kept_weights", "load_weights", "weights_beside"]


def weights_beside(record: Path) -> Path:
    """Where the weights of a run are, if they were kept.

    Example:
        >>> print(weights_beside(Path("runs/0123abcd/4.json")))
        runs/0123abcd/4.safetensors
    """
    return record.with_suffix(".safetensors")


def keep_weights(lane: Lane, record: Path) -> None:
    """Write a lane's parameters and buffers beside its record; at once or not at all."""
    copies = {name: t.detach().cpu().clone().contiguous() for name, t in lane.model.state_dict().items()}
    write_atomically(weights_beside(record), save(copies))


def load_kept_weights(lane: Lane, record: Path) -> None:
    """Give a lane the weights that were kept beside a record.

    Raises:
        UserError: Where there are none, or not of this run.
    """
    path = weights_beside(record)
    if not path.is_file():
        raise UserError(
            f"{path}: the weights of this run were not kept. Move {record} away, and run it again with "
            f"`contnorm run --keep-weights` and the settings it had."
        )
    load_weights(lane, path, f"Move it and {record} away, and run it again with `contnorm run --keep-weights`.")


def load_weights(lane: Lane, path: Path, mend: str) -> None:
    """Give a lane the weights in a safetensors file.

    Raises:
        UserError: Where they can't be read or belong to another network; ``mend`` says what to do about it.
    """
    try:
        lane.model.load_state_dict(load(path.read_bytes()))
    except (OSError, SafetensorError, RuntimeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"{path}: is no safetensors file of this network's weights ({said}). {mend}") from error
