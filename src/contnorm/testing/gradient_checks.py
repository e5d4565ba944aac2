"""Checks of first and second derivatives against numeric ones, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from contnorm.moments.freeze import frozen_stats
from contnorm.testing.checks import norm_check
from contnorm.testing.subject import NormSubject
from contnorm.testing.value_checks import MODES

_Function = Callable[..., Tensor]


def _function_of(subject: NormSubject, layer: nn.Module) -> _Function:
    """Return the layer as a function of its input and parameters; it leaves the running moments unchanged."""
    names = [name for name, _ in layer.named_parameters()]

    def function(x: Tensor, *values: Tensor) -> Tensor:
        with frozen_stats(layer), subject.tags(len(x)):
            y: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return y

    return function


def _check(subject: NormSubject, compare: Callable[[_Function, tuple[Tensor, ...]], bool], what: str) -> None:
    for rank in (rank for rank in subject.ranks if rank < 5):
        for training, mode in MODES:
            layer = subject.make(rank).double()
            subject.run(layer, subject.data(rank, seed=8, dtype=torch.float64))
            layer.train(training)
            x = _small(subject.data(rank, dtype=torch.float64)).clone().requires_grad_()
            values = tuple(p.detach().clone().requires_grad_() for p in layer.parameters())
            try:
                compare(_function_of(subject, layer), (x, *values))
            except RuntimeError as error:  # the error of torch.autograd.gradcheck has a table in its message
                line = str(error).strip().partition("\n")[0].rstrip(",")
                raise AssertionError(
                    f"{what} differ from numeric ones for rank {rank} in {mode} mode: {line}"
                ) from error


def _small(x: Tensor) -> Tensor:
    """Return a part of an input: a numeric Jacobian costs one forward pass per number."""
    if x.dim() == 2:
        return x[:4]
    return x[:3, :, :2, :2] if x.dim() == 4 else x[:3, ..., :2]


@norm_check()
def gradients(subject: NormSubject) -> None:
    """The gradients of its input and parameters are those of numeric differentiation."""
    _check(subject, lambda f, values: torch.autograd.gradcheck(f, values), "its gradients")


@norm_check(slow=True)
def second_derivatives(subject: NormSubject) -> None:
    """The second derivatives of its input and parameters are those of numeric differentiation."""
    _check(subject, lambda f, values: torch.autograd.gradgradcheck(f, values), "its second derivatives")
