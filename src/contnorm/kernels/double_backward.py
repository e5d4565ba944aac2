"""Gradients computed with torch operators, for when the kernels of a backward pass cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from contnorm.kernels.triton.continual.eager import is_plain

__all__ = ["Again", "by_kernels", "gradients_by_torch"]

Again = Callable[..., Tensor]


def by_kernels(dy: Tensor) -> bool:
    """Whether kernels can compute a backward pass: no double backward, vmap or dispatch mode is active."""
    batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # `is_grads_batched`
    return not torch.is_grad_enabled() and not batched and is_plain(dy)


def gradients_by_torch(
    again: Again, dy: Tensor, given: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute gradients with torch operators; they are differentiable if grad mode is enabled.

    Args:
        again: The function that the kernels compute, in torch operators.
        dy: The gradient of its output.
        given: Its arguments.
        needed: For each argument, whether its gradient is needed.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> gradients_by_torch(torch.square, torch.tensor(1.0), [x], [True])[0]
        tensor(6., grad_fn=...)
    """
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # A view of each argument, at which its gradient stops: one argument may depend on another (x may depend on a
        # tied weight), and the gradient along that path is not part of this function's gradient.
        views = [None if t is None else t.view_as(t) for t in given]
        inputs = [t for t, need in zip(views, needed, strict=True) if need and t is not None]
        grads = iter(torch.autograd.grad(again(*views), inputs, dy, create_graph=differentiable))
    return tuple(next(grads) if need and t is not None else None for t, need in zip(views, needed, strict=True))
