"""Conformance checks for norm layers, as scikit-learn's ``check_estimator`` is for estimators.

`check_norm` runs the same checks that the norms of this package have to pass, on a norm of any origin. It needs no test
framework. `NORM_CHECKS` lists the checks with their descriptions.

>>> from contnorm.testing import check_norm
>>> print(check_norm(torch.nn.BatchNorm2d, checks=["affine_parameters", "input_unchanged", "deterministic"]))
BatchNorm2d: 3 passed, 0 failed
"""

from __future__ import annotations

from contnorm.testing import module_checks, value_checks  # noqa: F401 - their import adds the checks
from contnorm.testing.conformance import (
    NORM_CHECKS,
    CheckResult,
    NormCheck,
    NormCheckError,
    NormReference,
    NormReport,
    check_norm,
)

__all__ = ["NORM_CHECKS", "CheckResult", "NormCheck", "NormCheckError", "NormReference", "NormReport", "check_norm"]
