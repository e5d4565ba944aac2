"""Continual normalization fused into one kernel, or a few, by Triton: the memory traffic of plain batch norm.

The algebra is `analytic`'s; ``docs/concepts/one-pass.md`` tells how it is laid out on a GPU. This file is the door: it
says where the kernels can run and calls them. Triton is not needed to import it, and is imported at the first launch.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from contnorm.kernels.activation import activated
from contnorm.kernels.fused import eager, launch, operators, plan
from contnorm.kernels.reference import BatchMoments

__all__ = ["can_move_moments", "evaluate", "move_moments", "refusal", "suits", "train"]

# Read once: Triton, too, takes its mode at import. Its launcher is built by a C compiler at the first launch.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = find_spec("triton") is not None
COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(x: Tensor, num_groups: int) -> str | None:
    """Why the kernels can't take this input; None where they can."""
    if not INSTALLED:
        return "Triton is not installed"
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        return f"it runs on CUDA, and the input is on {x.device} (there, only Triton's interpreter: TRITON_INTERPRET=1)"
    if not (COMPILER or INTERPRETED):
        return "Triton needs a C compiler, and neither gcc nor clang is found, nor one named in CC"
    if x.dtype not in TYPES:
        return f"its statistics are float32, and the input is {x.dtype}"
    if not plan.fits(launch.sizes_of(x, num_groups)):
        return f"an input of shape {tuple(x.shape)} in {num_groups} groups is too large for it"
    return None


def suits(x: Tensor, num_groups: int) -> bool:
    """Whether to take the kernels unasked: on CUDA, and where nothing has to look inside the operators."""
    return (
        x.is_cuda
        and not torch.compiler.is_exporting()  # an exported program should need no operators of ours
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not _transformed()
        and refusal(x, num_groups) is None
    )


def train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    residual: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, BatchMoments]:
    """Normalize with the moments of the batch, add the residual, cut off below zero.

    The variance given with the output is the biased one: `move_moments` corrects it on the way.
    """
    _check(x, weight, bias)
    if not _fusible(x, residual):
        y, found = train(x, weight, bias, eps, num_groups)
        return activated(y, residual, relu), found
    run: Any = operators.continual_norm
    if _transformed():
        run = operators.plain_training
    elif eager.is_plain(x):
        run = eager.Training.apply
    y, mean, var, _ = run(x, weight, bias, residual, eps, num_groups, relu)
    return y, BatchMoments(mean, var)


def evaluate(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    num_groups: int,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """The same with given moments."""
    _check(x, mean, var, weight, bias)
    if not _fusible(x, residual):
        return activated(evaluate(x, mean, var, weight, bias, eps, num_groups), residual, relu)
    run: Any = operators.continual_norm_eval
    if _transformed():
        run = operators.plain_evaluation
    elif eager.is_plain(x):
        run = eager.Evaluation.apply
    y: Tensor = run(x, mean, var, weight, bias, residual, eps, num_groups, relu)
    return y


def _check(x: Tensor, *channels: Tensor | None) -> None:
    """What torch's operators see to themselves: a kernel would read past an end, or on another device."""
    for each in channels:
        if each is not None and (each.shape != x.shape[1:2] or each.device != x.device):
            raise RuntimeError(
                f"continual_norm: an input of shape {tuple(x.shape)} on {x.device} needs parameters and moments of "
                f"shape ({x.shape[1]},) there, and one has {tuple(each.shape)} on {each.device}. "
                f"Move the layer with layer.to(x.device)."
            )


def _transformed() -> bool:
    """Whether functorch or a forward-mode derivative is at work: neither can look inside the operators."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _fusible(x: Tensor, residual: Tensor | None) -> bool:
    """A residual of another kind follows torch's rules for such sums, outside the kernel."""
    return residual is None or (residual.shape, residual.dtype, residual.device) == (x.shape, x.dtype, x.device)


def can_move_moments(running_mean: Tensor, running_var: Tensor, momentum: float | Tensor) -> bool:
    """Whether `move_moments` can take these buffers."""
    here = running_mean.device
    return (
        not _transformed()
        and running_mean.is_contiguous()
        and running_var.is_contiguous()
        and (not isinstance(momentum, Tensor) or (momentum.device == here and momentum.dim() == 0))
    )


def move_moments(
    running_mean: Tensor, running_var: Tensor, found: BatchMoments, momentum: float | Tensor, count: int
) -> None:
    """Move both running moments towards those of a batch of so many values a channel, in one launch."""
    device, host = (momentum, 0.0) if isinstance(momentum, Tensor) else (None, float(momentum))
    factor = count / (count - 1)
    run: Any = eager.move_moments if eager.is_plain(running_mean) else operators.update_moments_
    run(running_mean, running_var, found.mean, found.var, host, device, factor)
