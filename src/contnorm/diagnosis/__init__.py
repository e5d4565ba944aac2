"""The cross-task normalization effect of a model: measurement, result, figure and comparison of two models.

Public names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from contnorm.lazy_names import lazy_names

if TYPE_CHECKING:
    from contnorm.diagnosis.measure import Diagnosis, diagnose
    from contnorm.diagnosis.run import RunDiagnosis, diagnose_run

__all__ = ["Diagnosis", "RunDiagnosis", "diagnose", "diagnose_run"]

_NAMES_BY_MODULE = {
    "contnorm.diagnosis.measure": ("Diagnosis", "diagnose"),
    "contnorm.diagnosis.run": ("RunDiagnosis", "diagnose_run"),
}
__getattr__, __dir__ = lazy_names(__name__, _NAMES_BY_MODULE, extra="bench")
