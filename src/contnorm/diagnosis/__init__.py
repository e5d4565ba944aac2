"""The cross-task normalization effect of a model: measurement, result, figure and comparison of two models.

Public names are imported on first use: to diagnose a recorded run needs the bench, and to diagnose a model does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.diagnosis.measure import Diagnosis, diagnose
    from contnorm.diagnosis.run import RunDiagnosis, diagnose_run

__all__ = ["Diagnosis", "RunDiagnosis", "diagnose", "diagnose_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "run" if name in ("RunDiagnosis", "diagnose_run") else "measure"
    return getattr(import_module(f"contnorm.diagnosis.{module}"), name)


def __dir__() -> list[str]:
    return __all__
