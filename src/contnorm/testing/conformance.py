"""`check_norm`: run the conformance checks on a norm, and report which it passes."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from contnorm.registry import DIMS, Dim, LayerFactory, NormInfo, describe_norm, find_norm
from contnorm.testing import module_checks, moment_checks, precision_checks, value_checks
from contnorm.testing.subject import NORM_CHECKS, CheckSkipped, NormCheck, NormReference, NormSubject

__all__ = ["CheckResult", "NormCheckError", "NormReport", "check_norm"]

Status = Literal["passed", "failed", "skipped", "declared"]
# Importing a module adds its checks to the list.
CHECK_MODULES = (value_checks, moment_checks, precision_checks, module_checks)
_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parents[1])
_RANKS = ("rank2", "rank3", "rank4", "rank5")


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        check: The name of the check.
        status: ``"passed"``, ``"failed"``, ``"skipped"``, or ``"declared"`` for a failure that the norm declares.
        reason: Why it failed or was skipped; empty if it passed.

    Example:
        >>> from torch import nn
        >>> check_norm(nn.BatchNorm2d, checks=["momentum"]).results[0]
        CheckResult(check='momentum', status='passed', reason='')
    """

    check: str
    status: Status
    reason: str = ""


@dataclass(frozen=True)
class NormReport:
    """Results of all checks of a norm. Its text has one line per check that did not pass; failures are first.

    Example:
        >>> from torch import nn
        >>> report = check_norm(nn.BatchNorm2d, checks=["momentum", "auxiliary_loss"])
        >>> print(report)
        BatchNorm2d: 1 passed, 0 failed, 1 skipped
          skipped   auxiliary_loss: it does not define auxiliary_loss
    """

    norm: str
    results: tuple[CheckResult, ...]

    def with_status(self, status: Status) -> tuple[CheckResult, ...]:
        """Return the results of one status."""
        return tuple(result for result in self.results if result.status == status)

    @property
    def passed(self) -> tuple[CheckResult, ...]:
        """The checks that passed."""
        return self.with_status("passed")

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return self.with_status("failed")

    @property
    def skipped(self) -> tuple[CheckResult, ...]:
        """The checks that do not apply, or that the caller skipped."""
        return self.with_status("skipped")

    @property
    def declared(self) -> tuple[CheckResult, ...]:
        """The checks that fail as the norm declares in ``cannot``."""
        return self.with_status("declared")

    def __str__(self) -> str:
        counts = [f"{len(self.passed)} passed", f"{len(self.failed)} failed"]
        counts += [f"{len(self.with_status(s))} {s}" for s in ("declared", "skipped") if self.with_status(s)]
        lines = [f"{self.norm}: {', '.join(counts)}"]
        others = (*self.failed, *self.declared, *self.skipped)
        lines += [f"  {result.status:8}  {result.check}: {result.reason}" for result in others]
        return "\n".join(lines)


class NormCheckError(AssertionError):
    """A norm failed conformance checks.

    Attributes:
        report: The results of all checks.

    Example:
        >>> from torch import nn
        >>> try:
        ...     check_norm(lambda num_features: nn.Identity(), checks=["affine_parameters"])
        ... except NormCheckError as error:
        ...     print([result.check for result in error.report.failed])
        ['affine_parameters']
    """

    def __init__(self, report: NormReport) -> None:
        failures = "; ".join(f"{result.check}: {result.reason}" for result in report.failed)
        total = len(report.passed) + len(report.failed)
        super().__init__(f"check_norm: {report.norm} fails {len(report.failed)} of {total} checks: {failures}")
        self.report = report


def check_norm(
    norm: str | LayerFactory | Mapping[Dim, LayerFactory] | NormInfo,
    *,
    checks: Collection[str] | None = None,
    skip: Collection[str] | Mapping[str, str] = (),
    dims: Collection[Dim] | None = None,
    options: Mapping[str, object] | None = None,
    reference: NormReference | None = None,
    strict: bool = False,
    device: torch.device | str = "cpu",
    raise_on_failure: bool = True,
) -> NormReport:
    """Check that a norm behaves as a norm layer of torch does: values, moments, gradients, precision, and as a module.

    A norm declares what it can't do in ``cannot`` (an attribute of the class, or an argument of `register_norm`): names
    of checks with reasons. A declared check must fail, so that declarations stay true. ``rank2`` to ``rank5`` declare
    ranks of input that a norm can't process. The checks restore the random state, and take some seconds.

    Args:
        norm: A class, a function ``(num_features, **options)`` that returns a layer, one of them for each dimension as
            in ``{1: MyNorm1d, 2: MyNorm2d}``, or the name of a norm.
        checks: Names of the checks to run; None for all. `NORM_CHECKS` lists them.
        skip: Names of checks that are not run, or a dict of names and reasons.
        dims: The dimensions to check: 1 for (N, C) and (N, C, L) input, 2 for (N, C, H, W), 3 for (N, C, D, H, W).
            Default: all that the norm has.
        options: Arguments of every layer, such as ``{"num_groups": 4}``. Layers have 8 channels.
        reference: A formula of the norm in float64, which gives expected values (see `NormReference`). Without it, they
            are those of the layer itself in float64, and no check notices a norm that computes something else.
        strict: Whether to run also the checks that torch's own norms do not pass, as the norms of this package do.
        device: The device of layers and inputs.
        raise_on_failure: Whether to raise an error if a check fails.

    Returns:
        The results of the checks.

    Raises:
        NormCheckError: If a check fails, with the reason of each failure. It is an AssertionError.
        ValueError: For an unknown name of a check or norm.

    Example:
        >>> class HalfNorm(nn.BatchNorm2d):
        ...     def forward(self, x):
        ...         return super().forward(x.mul_(0.5))
        >>> report = check_norm(HalfNorm, checks=["affine_parameters", "input_unchanged"], raise_on_failure=False)
        >>> print(report)
        HalfNorm: 1 passed, 1 failed
          failed    input_unchanged: its forward changes the input in place.
    """
    spec = _spec(norm)
    _check_names("checks", checks or ())
    _check_names("skip", skip)
    chosen = tuple(dim for dim in DIMS if (dims is None or dim in dims) and (not spec.layers or dim in spec.layers))
    if not chosen:
        raise ValueError(f"check_norm: norm {spec.name!r} has no layer for dims={dims!r}.")
    subject = NormSubject(spec, chosen, torch.device(device), reference, options or {})
    reasons = dict(skip) if isinstance(skip, Mapping) else dict.fromkeys(skip, "skipped by the caller")
    results = [
        CheckResult(name, "skipped", reasons[name]) if name in reasons else _result(check, subject, strict)
        for name, check in NORM_CHECKS.items()
        if checks is None or name in checks
    ]
    report = NormReport(spec.name, tuple(results))
    if raise_on_failure and report.failed:
        raise NormCheckError(report)
    return report


def _spec(norm: str | LayerFactory | Mapping[Dim, LayerFactory] | NormInfo) -> NormInfo:
    if isinstance(norm, str):
        spec = find_norm(norm)[0]
    elif isinstance(norm, NormInfo):
        spec = norm
    else:
        spec = describe_norm(norm)
    unknown = sorted(set(spec.cannot) - set(NORM_CHECKS) - set(_RANKS))
    if unknown:
        raise ValueError(f"check_norm: norm {spec.name!r} declares cannot={unknown[0]!r}, which is not a check.")
    return spec


def _check_names(argument: str, names: Collection[str]) -> None:
    if isinstance(names, str):
        raise TypeError(f"check_norm: {argument}={names!r} must be a collection of names, such as [{names!r}].")
    unknown = sorted(set(names) - set(NORM_CHECKS))
    if unknown:
        raise ValueError(f"check_norm: {argument} has {unknown[0]!r}. Use one of {', '.join(NORM_CHECKS)}.")


def _result(check: NormCheck, subject: NormSubject, strict: bool) -> CheckResult:
    if check.strict and not strict:
        return CheckResult(check.name, "skipped", "only with strict=True")
    declared = subject.spec.cannot.get(check.name)
    devices = [subject.device] if subject.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            check.run(subject)
    except CheckSkipped as reason:
        return CheckResult(check.name, "skipped", f"{reason}")
    except AssertionError as error:
        failure = _line(str(error))
    except Exception as error:  # code under test may raise anything
        failure = f"{type(error).__name__}{_place(error)}: {_line(str(error))}"
    else:
        if declared is None:
            return CheckResult(check.name, "passed")
        return CheckResult(check.name, "failed", f"it passes, but is declared in cannot ({declared}). Remove that.")
    if declared is not None:
        return CheckResult(check.name, "declared", declared)
    return CheckResult(check.name, "failed", failure)


def _place(error: Exception) -> str:
    """Return the last file and line of a traceback outside of torch and this package; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(package) for package in _PACKAGES):
            return f" at {path.name}, line {frame.lineno}"
    return ""


def _line(text: str, most: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}..."
