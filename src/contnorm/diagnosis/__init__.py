"""The cross-task normalization effect of a model: measurement, result, figure and comparison of two models.

Public names are imported on first use: the result of a measurement needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.diagnosis.measure import diagnose
    from contnorm.diagnosis.result import Diagnosis
    from contnorm.diagnosis.run import RunDiagnosis, diagnose_run

__all__ = ["Diagnosis", "RunDiagnosis", "diagnose", "diagnose_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = {"Diagnosis": "result", "diagnose": "measure"}.get(name, "run")
    return getattr(import_module(f"contnorm.diagnosis.{module}"), name)


def __dir__() -> list[str]:
    return __all__
