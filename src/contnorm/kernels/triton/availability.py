"""Checks whether Triton kernels can run, and gradients in torch operators for where they cannot.

Importing this package does not require Triton.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "COMPILER",
    "INSTALLED",
    "INTERPRETED",
    "TYPES",
    "before_relu",
    "can_launch",
    "can_use_kernels",
    "is_plain",
    "torch_gradients",
]

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of inputs; the kernels compute in float32

# Read once, because Triton also reads its mode at import. A C compiler builds its launcher at the first launch.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = find_spec("triton") is not None
COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def can_launch(device: torch.device) -> bool:
    """Whether a kernel can be launched on this device."""
    if INTERPRETED:
        return INSTALLED
    return INSTALLED and COMPILER and device.type == "cuda"


def is_plain(x: Tensor) -> bool:
    """Whether kernels can be launched directly: a plain tensor, and no compiler, dispatch mode or functorch active."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def can_use_kernels(dy: Tensor) -> bool:
    """Whether kernels can compute a backward pass: no double backward, vmap or dispatch mode is active."""
    batched = torch._C._functorch.is_legacy_batchedtensor(dy)  # `is_grads_batched`
    return not torch.is_grad_enabled() and not batched and is_plain(dy)


def before_relu(dy: Tensor, y: Tensor | None) -> Tensor:
    """Return the gradient before a ReLU with this output, in torch operators; dy itself if there is no ReLU.

    Example:
        >>> before_relu(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0]))
        tensor([0., 2.])
    """
    return dy if y is None else torch.where(y <= 0, 0.0, dy)


def torch_gradients(
    recompute: Callable[..., Tensor], dy: Tensor, arguments: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Compute gradients with torch operators; they are differentiable if grad mode is enabled.

    Args:
        recompute: The function that the kernels compute, in torch operators.
        dy: The gradient of its output.
        arguments: Its arguments.
        needed: For each argument, whether its gradient is needed.

    Example:
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> torch_gradients(torch.square, torch.tensor(1.0), [x], [True])[0]
        tensor(6., grad_fn=...)
    """
    if not any(needed):
        return (None,) * len(arguments)
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        # A view of each argument, at which its gradient stops: one argument may depend on another (x may depend on a
        # tied weight), and the gradient along that path is not part of this function's gradient.
        views = [None if t is None else t.view_as(t) for t in arguments]
        inputs = [t for t, need in zip(views, needed, strict=True) if need and t is not None]
        grads = iter(torch.autograd.grad(recompute(*views), inputs, dy, create_graph=differentiable))
    return tuple(next(grads) if need and t is not None else None for t, need in zip(views, needed, strict=True))
