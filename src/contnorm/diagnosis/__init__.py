"""The cross-task normalization effect of a model: measurement, result, figure and comparison of two models.

Public names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contnorm.diagnosis.measure import diagnose
    from contnorm.diagnosis.result import Diagnosis
    from contnorm.diagnosis.run import RunDiagnosis, diagnose_run, diagnose_weights


__all__ = [
    "Diagnosis",
    "RunDiagnosis",
    "diagnose",
    "diagnose_run",
    "diagnose_weights",
]

_NAMES_BY_MODULE = {
    "contnorm.diagnosis.measure": ("diagnose",),
    "contnorm.diagnosis.result": ("Diagnosis",),
    "contnorm.diagnosis.run": (
        "RunDiagnosis",
        "diagnose_run",
        "diagnose_weights",
    ),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(
            f"module 'contnorm.diagnosis' has no attribute {name!r}. Public names: {', '.join(__all__)}."
        )
    return getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
