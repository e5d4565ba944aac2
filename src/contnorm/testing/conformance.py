"""`check_norm`: run the conformance checks on a norm, and report which it passes."""

from __future__ import annotations

import copy
import textwrap
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from contnorm.registry import (
    DIMS,
    Dim,
    LayerFactory,
    NormInfo,
    build_norm,
    describe_norm,
    find_norm,
    layer_parameters,
    norm_class,
)
from contnorm.tags import BatchTags, batch_tags

CHANNELS = 8
GROUPS = 2  # groups of four: on (N, C) input a group of two would always be plus and minus one
# One shape per rank, no two sizes equal where that could hide a transposition.
SHAPES = {2: (6, CHANNELS), 3: (5, CHANNELS, 7), 4: (4, CHANNELS, 5, 3), 5: (3, CHANNELS, 2, 3, 4)}
DIM_OF_RANK: Mapping[int, Dim] = {2: 1, 3: 1, 4: 2, 5: 3}

Moments = tuple[Tensor, Tensor]


class CheckSkipped(Exception):  # noqa: N818 - a signal, not an error
    """A check does not apply to a norm; the message says why."""


class NormReference(Protocol):
    """An independent formula of a norm: the expected results of a layer for an input.

    Example:
        >>> from contnorm.testing import check_norm
        >>> def formula(layer, x):
        ...     y = nn.functional.group_norm(x.double(), 4, layer.weight.double(), layer.bias.double(), layer.eps)
        ...     return y, None
        >>> def norm(num_features):
        ...     return nn.GroupNorm(4, num_features)
        >>> len(check_norm(norm, checks=["training_matches_reference"], reference=formula).passed)
        1
    """

    def __call__(self, layer: nn.Module, x: Tensor, /) -> tuple[Tensor, Moments | None]:
        """Return the output of a layer for an input, and its running moments afterwards, all in float64.

        Args:
            layer: The layer before the forward pass, in training or evaluation mode. It must not be changed.
            x: The input.

        Returns:
            The output, and the running mean and variance after the pass; None if the norm has none.
        """


@dataclass(frozen=True)
class NormSubject:
    """A norm under test.

    Attributes:
        spec: The norm.
        dims: The dimensions to check.
        device: The device of layers and inputs.
        reference: The formula that gives expected values. Without it, they are those of the layer itself in float64.
        options: Arguments of every layer.
    """

    spec: NormInfo
    dims: tuple[Dim, ...]
    device: torch.device
    reference: NormReference | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of input to check, without those that the norm declares it can't process."""
        return tuple(r for r, dim in DIM_OF_RANK.items() if dim in self.dims and f"rank{r}" not in self.spec.cannot)

    @property
    def rank(self) -> int:
        """The rank of input for checks that need one only: 4 if possible."""
        if not self.ranks:
            raise CheckSkipped("it declares that it can't process any of the ranks")
        return 4 if 4 in self.ranks else self.ranks[0]

    @cached_property
    def has_moments(self) -> bool:
        """Whether new layers have the buffers ``running_mean`` and ``running_var``."""
        layer = self.make(self.rank)
        return all(isinstance(getattr(layer, name, None), Tensor) for name in ("running_mean", "running_var"))

    @cached_property
    def needs_tags(self) -> bool:
        return any(getattr(module, "needs_tags", False) for module in self.make(self.rank).modules())

    @cached_property
    def averages_batches(self) -> bool:
        """Whether layers with ``momentum=None``, the equal average of all batches, can be trained."""
        if not self.has_moments or not self.accepts("momentum"):
            return False
        try:
            self.run(self.make(momentum=None), self.data())
        except Exception:  # code under test may raise anything
            return False
        return True

    def require_moments(self) -> None:
        if not self.has_moments:
            raise CheckSkipped("it has no running moments")

    def require_reference(self) -> None:
        if self.reference is None:
            raise CheckSkipped("no reference formula is given")

    def require_options(self, *names: str) -> None:
        """Skip the check if the constructor does not have these arguments."""
        for name in names:
            if not self.accepts(name):
                raise CheckSkipped(f"its constructor has no argument {name!r}")

    def accepts(self, option: str) -> bool:
        return option in layer_parameters(norm_class(self.spec, DIM_OF_RANK[self.rank]))

    def make(self, rank: int | None = None, **options: Any) -> nn.Module:
        """Create a layer with random parameters, so that each of them has an effect."""
        layer = self.make_new(rank, **options)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in layer.parameters():
                if not parameter.is_meta:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5 + 1)
        return layer if "device" in options else layer.to(self.device)

    def make_new(self, rank: int | None = None, **options: Any) -> nn.Module:
        """Create a layer as it is after construction."""
        groups = {"num_groups": GROUPS} if self.spec.grouped else {}
        options = {**groups, **self.options, **options}
        dim = DIM_OF_RANK[self.rank if rank is None else rank]
        return build_norm(self.spec, CHANNELS, dim, options)

    def data(
        self,
        rank: int | None = None,
        seed: int = 0,
        *,
        size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return input whose channels differ in mean and variance."""
        rank = self.rank if rank is None else rank
        shape = SHAPES[rank] if size is None else (size, *SHAPES[rank][1:])
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        channel = torch.arange(CHANNELS, dtype=torch.float64).reshape(1, -1, *[1] * (rank - 2))
        return ((x * (1 + channel / CHANNELS) + channel / 4) * 1.7 + 0.3).to(dtype).to(self.device)

    def run(self, layer: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Run a layer as the bench does: in training, a norm with ``needs_tags`` gets tags, and its loss is taken."""
        with self.tags(len(x)) if self.needs_tags and layer.training else nullcontext():
            y = cast(Tensor, (layer if call is None else call)(x))
        for module in layer.modules() if layer.training else ():
            if callable(getattr(module, "auxiliary_loss", None)):
                cast(Any, module).auxiliary_loss()
        return y

    def error_of(self, layer: nn.Module, x: Tensor) -> Exception | None:
        """Run a layer, and return the error that it raises for wrong input; None if it raises none."""
        try:
            self.run(layer, x)
        except (ValueError, TypeError, RuntimeError) as error:
            return error
        return None

    def tags(self, samples: int, is_extra: bool = False) -> AbstractContextManager[None]:
        """Open the tags of a batch: every third sample is replayed, of task 0; the others are of task 1."""
        replayed = torch.arange(samples, device=self.device) % 3 == 2
        return batch_tags(BatchTags(replayed, (~replayed).long(), is_extra=is_extra))

    def expected(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Moments | None]:
        """Return the expected output and running moments of a layer in float64; the layer is not changed."""
        if self.reference is not None:
            return self.reference(layer, x)
        exact = copy.deepcopy(layer).double()
        with torch.no_grad():
            y = self.run(exact, x.detach().double())
        mean, var = getattr(exact, "running_mean", None), getattr(exact, "running_var", None)
        return y, (mean, var) if isinstance(mean, Tensor) and isinstance(var, Tensor) else None


def require(condition: object, message: str) -> None:
    """Raise unless a norm meets a requirement."""
    if not condition:
        raise AssertionError(message)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raise unless values agree within a tolerance of the larger of 1 and the value: norms have outputs of order 1."""
    a, b = (tensor.detach().double().cpu() for tensor in (actual, expected))
    require(a.shape == b.shape, f"{what}: its shape is {tuple(a.shape)} and not {tuple(b.shape)}.")
    if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
        error = (a - b).abs().nan_to_num(torch.inf).max().item()
        raise AssertionError(f"{what}: it differs by up to {error:.2g}, and {tolerance:.2g} is allowed.")


# --- the checks, to which the modules of checks add theirs ----------------------------------------------------------

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


# --- results --------------------------------------------------------------------------------------------------------

Status = Literal["passed", "failed", "skipped", "declared"]


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
    spec = norm if isinstance(norm, NormInfo) else find_norm(norm)[0] if isinstance(norm, str) else describe_norm(norm)
    ranks = [f"rank{rank}" for rank in SHAPES]
    for argument, names in (("checks", checks or ()), ("skip", skip), ("cannot", set(spec.cannot) - set(ranks))):
        if wrong := sorted(set(names) - set(NORM_CHECKS)):
            raise ValueError(f"check_norm: {argument} has {wrong[0]!r}. Use some of {', '.join(NORM_CHECKS)}.")
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
    except CheckSkipped as skipped:
        return CheckResult(check.name, "skipped", f"{skipped}")
    except Exception as error:  # code under test may raise anything
        if declared is not None:
            return CheckResult(check.name, "declared", declared)
        reason = textwrap.shorten(str(error), 300, placeholder="...")
        place = "" if isinstance(error, AssertionError) else f"{type(error).__name__}{_place(error)}: "
        return CheckResult(check.name, "failed", place + reason)
    if declared is not None:
        return CheckResult(check.name, "failed", f"it passes, but is declared in cannot ({declared}). Remove that.")
    return CheckResult(check.name, "passed")


def _place(error: Exception) -> str:
    """Return the last file and line of a traceback outside of torch and this package; empty if there is none."""
    packages = Path(torch.__file__).parent, Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(package) for package in packages):
            return f" at {path.name}, line {frame.lineno}"
    return ""
