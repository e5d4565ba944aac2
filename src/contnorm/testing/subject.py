"""The norm under test, with inputs and expected values in float64; and the list of checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from contnorm.registry import Dim, NormInfo, build_norm, layer_parameters, norm_class
from contnorm.tags import BatchTags, batch_tags

__all__ = [
    "CHANNELS",
    "DIM_OF_RANK",
    "NORM_CHECKS",
    "SHAPES",
    "CheckSkipped",
    "NormCheck",
    "NormReference",
    "NormSubject",
    "assert_close",
    "norm_check",
]

CHANNELS = 8
GROUPS = 2  # groups of four: on (N, C) input a group of two would always be plus and minus one
# One shape per rank, no two sizes equal where that could hide a transposition.
SHAPES = {2: (6, CHANNELS), 3: (5, CHANNELS, 7), 4: (4, CHANNELS, 5, 3), 5: (3, CHANNELS, 2, 3, 4)}
DIM_OF_RANK: Mapping[int, Dim] = {2: 1, 3: 1, 4: 2, 5: 3}
_PARAMETER_SEED = 7

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
    def layer_class(self) -> type[nn.Module]:
        return type(self.make(self.rank))

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

    def require_options(self, *names: str) -> None:
        """Skip the check if the constructor does not have these arguments."""
        missing = next((name for name in names if not self.accepts(name)), None)
        if missing is not None:
            raise CheckSkipped(f"its constructor has no argument {missing!r}")

    def accepts(self, option: str) -> bool:
        return option in layer_parameters(norm_class(self.spec, DIM_OF_RANK[self.rank]))

    def make(self, rank: int | None = None, **options: Any) -> nn.Module:
        """Create a layer with random parameters, so that each of them has an effect."""
        layer = self.make_new(rank, **options)
        generator = torch.Generator().manual_seed(_PARAMETER_SEED)
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
        mean: float = 0.3,
        spread: float = 1.7,
        size: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Return input whose channels differ in mean and variance."""
        rank = self.rank if rank is None else rank
        shape = SHAPES[rank] if size is None else (size, *SHAPES[rank][1:])
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        channel = torch.arange(CHANNELS, dtype=torch.float64).reshape(1, -1, *[1] * (rank - 2))
        return ((x * (1 + channel / CHANNELS) + channel / 4) * spread + mean).to(dtype).to(self.device)

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Run a layer as the bench does: in training, a norm with ``needs_tags`` gets tags, and its loss is taken."""
        with self.tags(len(x)) if self.needs_tags and layer.training else nullcontext():
            y = cast(Tensor, layer(x))
        for module in layer.modules() if layer.training else ():
            if callable(getattr(module, "auxiliary_loss", None)):
                cast(Any, module).auxiliary_loss()
        return y

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


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raise unless values agree within a tolerance of the larger of 1 and the value: norms have outputs of order 1."""
    a, b = (tensor.detach().double().cpu() for tensor in (actual, expected))
    if a.shape != b.shape:
        raise AssertionError(f"{what}: its shape is {tuple(a.shape)} and not {tuple(b.shape)}.")
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
