"""The table of convolution kernels of a run: chosen at its start, stored in its checkpoints and obeyed on resume.

Results depend on the table in the last digits. A run therefore keeps its table to the end, also if the package has
another one by then. Checkpoints of older versions contain none: those runs go on with cuDNN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from contnorm.bench.config.schema import TrainConfig
from contnorm.errors import UserError
from contnorm.kernels.side_stream import Convolution
from contnorm.kernels.triton.availability import can_launch
from contnorm.kernels.triton.convolution.table import EMPTY, ConvolutionTable, table_for

__all__ = ["choose_table", "progress_of_table", "stored_table"]

KEY = "convolutions"  # in the progress of a checkpoint
DTYPES = {"tf32": "float32", "bf16": "bfloat16"}  # by precision; full float32 is computed by cuDNN


def choose_table(config: TrainConfig, model: nn.Module, device: torch.device) -> ConvolutionTable:
    """Return the table of a new run; empty if cuDNN computes all of its convolutions.

    Example:
        >>> bool(choose_table(TrainConfig(precision="tf32"), nn.Linear(2, 2), torch.device("cpu")))
        False
    """
    if config.convolutions != "auto" or not config.deterministic or config.precision not in DTYPES:
        return EMPTY
    if not any(isinstance(module, Convolution) for module in model.modules()):
        return EMPTY
    return table_for(device).only(DTYPES[config.precision])


def progress_of_table(table: ConvolutionTable) -> dict[str, Any]:
    """Return the entry of a checkpoint's progress; none for an empty table."""
    return {KEY: table.to_json()} if table else {}


def stored_table(progress: Mapping[str, Any], device: torch.device, where: str = "the checkpoint") -> ConvolutionTable:
    """Return the table in the progress of a checkpoint; empty in checkpoints without one.

    Args:
        progress: The progress.
        device: The device that the run is resumed on.
        where: The checkpoint, for error messages.

    Raises:
        UserError: If the kernels of the table can't be launched here.
    """
    try:
        table = ConvolutionTable.from_json(progress.get(KEY, []))
    except ValueError as error:
        raise UserError(f"{where} after step {progress['done']} {error}. Delete it to start again.") from error
    if table and not can_launch(device):
        raise UserError(
            f"{where} after step {progress['done']} needs Triton convolutions (table {table.digest}), which "
            f"can't be launched on {device}. Resume it on a GPU with Triton and a C compiler."
        )
    return table
