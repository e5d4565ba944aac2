"""The table of loggers by name. The module and the library of a logger are imported when it is created."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from contnorm.bench.loggers.base import Logger
from contnorm.errors import UserError, unknown

__all__ = ["LOGGERS", "LoggerSpec", "create_logger", "default_log_folder"]


@dataclass(frozen=True)
class LoggerSpec:
    """A row of the table.

    Attributes:
        module: Module of the logger's class.
        name: Name of the class.
        summary: One line that describes it.
    """

    module: str
    name: str
    summary: str


LOGGERS = {
    "csv": LoggerSpec("csv_logger", "CSVLogger", "One CSV file of metrics and one JSON file of settings per run."),
    "tensorboard": LoggerSpec("tensorboard_logger", "TensorBoardLogger", "TensorBoard event files."),
    "wandb": LoggerSpec("wandb_logger", "WandbLogger", "Runs of Weights & Biases, online or offline."),
    "mlflow": LoggerSpec("mlflow_logger", "MLflowLogger", "Runs of MLflow, on a server or in a folder."),
}


def create_logger(name: str, folder: Path) -> Logger:
    """Create a logger by name.

    Args:
        name: One of `LOGGERS`.
        folder: Folder of logs. Each logger writes to a subfolder with its name.

    Raises:
        UserError: If the name is unknown, or the library of the logger is not installed or can't be used.

    Example:
        >>> create_logger("tensorbord", Path("logs"))
        Traceback (most recent call last):
        contnorm.errors.UserError: unknown logger 'tensorbord'. Did you mean 'tensorboard'? There are: csv, ...
    """
    if name not in LOGGERS:
        raise unknown("logger", name, LOGGERS)
    spec = LOGGERS[name]
    module = importlib.import_module(f"contnorm.bench.loggers.{spec.module}")
    try:
        logger: Logger = getattr(module, spec.name)(folder)
    except UserError:
        raise
    except Exception as error:  # of the library
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"logger {name}: can't be used ({reason}).") from error
    return logger


def default_log_folder(runs: Path | None) -> Path:
    """Return the folder of logs next to a folder of runs.

    Example:
        >>> str(default_log_folder(Path("results/runs")))
        'results/runs-logs'
    """
    runs = Path("runs") if runs is None else runs
    return runs.with_name(f"{runs.resolve().name if runs.name in ('', '..') else runs.name}-logs")
