"""Loggers: the metrics of runs in TensorBoard, Weights & Biases, MLflow or CSV files. No module here imports torch.

A logger gets the settings of a run, its losses, the scores after each task and the final scores. Records do not depend
on loggers.
"""

from contnorm.bench.loggers.base import LoggedRun, Logger
from contnorm.bench.loggers.registry import LOGGERS, create_logger, default_log_folder

__all__ = ["LOGGERS", "LoggedRun", "Logger", "create_logger", "default_log_folder"]
