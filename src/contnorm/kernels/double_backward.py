"""Gradients through torch's operators, for backward passes whose kernels torch can't look into."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from contnorm.kernels.triton.continual.eager import is_plain

__all__ = ["Again", "by_kernels", "gradients_by_torch"]

Again = Callable[..., Tensor]


def by_kernels(dy: Tensor) -> bool:
    """Whether kernels may do a backward pass: it is not differentiated itself, of one gradient, and seen by nothing."""
    batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # `is_grads_batched`
    return not torch.is_grad_enabled() and not batched and is_plain(dy)


def gradients_by_torch(
    again: Again, dy: Tensor, given: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of what is needed; differentiable themselves, where that is asked for.

    Args:
        again: The same function as the kernels', in torch's operators.
        dy: The gradient of its output.
        given: What it was given.
        needed: Of which of these a gradient is needed.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> gradients_by_torch(torch.square, torch.tensor(1.0), [x], [True])[0]
        tensor(6., grad_fn=...)
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # A name of its own for each, at which the gradient stops: one may have been made from another (a tied weight is
        # behind x as well), and what goes that way is not this function's.
        own = [None if t is None else t.view_as(t) for t in given]
        wanted = [t for t, need in zip(own, needed, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(again(*own), wanted, dy, create_graph=differentiable))
    return tuple(next(found) if need and t is not None else None for t, need in zip(own, needed, strict=True))
