"""The list of conformance checks, to which the modules of checks add theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from contnorm.testing.subject import NormSubject

__all__ = ["NORM_CHECKS", "NormCheck", "norm_check"]

Check = Callable[[NormSubject], None]


@dataclass(frozen=True)
class NormCheck:
    """A conformance check.

    Attributes:
        name: Its name in ``checks``, ``skip`` and ``cannot``.
        summary: What a norm must do to pass it.
        run: The check: it raises an exception if the norm fails.
        strict: Whether it is a requirement of this package beyond what torch's own norms do.
        slow: Whether it takes more than about a second.

    Example:
        >>> from contnorm.testing import NORM_CHECKS
        >>> NORM_CHECKS["momentum"].strict
        False
    """

    name: str
    summary: str
    run: Check
    strict: bool = False
    slow: bool = False


NORM_CHECKS: dict[str, NormCheck] = {}


def norm_check(*, strict: bool = False, slow: bool = False) -> Callable[[Check], Check]:
    """Add a function to the list of checks. Its docstring begins with what a norm must do to pass."""

    def add(function: Check) -> Check:
        name, summary = function.__name__, (function.__doc__ or "").splitlines()[0].rstrip(".")
        NORM_CHECKS[name] = NormCheck(name, summary, function, strict, slow)
        return function

    return add
