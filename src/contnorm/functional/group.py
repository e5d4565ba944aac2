"""Group, instance and layer normalization, with one weight and bias per channel.

They use torch's operator, except for channels_last input on CUDA, for which a Triton kernel is used: torch's operator
copies such an input to the contiguous layout, and its output back.
"""

from __future__ import annotations

from torch import Tensor

from contnorm.checks import (
    check_eps,
    check_group_size,
    check_input,
    check_parameters,
    check_residual,
    resolve_groups,
    statistics_dtype,
)
from contnorm.functional.batch import ANY_RANK, channels_of, empty_like_input
from contnorm.kernels import resolve_kernel
from contnorm.kernels.reference import add_residual_and_relu, group_norm_in_layout
from contnorm.kernels.triton import cn_variants as variants
from contnorm.kernels.triton.continual.launch import channels_last
from contnorm.kernels.triton.group_norm import group_step

__all__ = ["group_norm", "instance_norm", "layer_norm"]


def group_norm(
    x: Tensor,
    num_groups: int | str = 32,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
    caller: str = "group_norm",
) -> Tensor:
    """Group normalization: ``F.group_norm`` whose output has the input's memory layout and, also under autocast, dtype.

    Args:
        x: Input of shape (N, C) or (N, C, *).
        num_groups: A divisor of C, or ``"auto"``.
        weight: (C,) or None.
        bias: (C,) or None.
        eps: Value added to the variance.
        residual: Tensor added to the result, with the input's shape, dtype and device; under autocast it is cast to the
            input's dtype.
        relu: Whether to apply ReLU to the result, after the residual. The Triton kernel does both in the same pass.
        caller: The function or layer that error messages name.

    Example:
        >>> group_norm(torch.tensor([[0.0, 2.0, 5.0, 7.0]]), num_groups=2, eps=1e-12)
        tensor([[-1.,  1., -1.,  1.]])
    """
    check_input(x, ANY_RANK, channels_of(None, weight), caller)
    eps = check_eps(eps, caller)
    check_parameters(x, weight, bias, caller)
    residual = check_residual(residual, x, caller)
    groups = resolve_groups(num_groups, x.shape[1], x.dim(), caller)
    if x.numel() == 0:
        return add_residual_and_relu(empty_like_input(x, weight, bias), residual, relu)
    check_group_size(x, groups, caller)
    if _uses_kernel(x, groups, caller) and _on_device(x, weight, bias):
        return group_step(x, weight, bias, eps, groups, x.dtype, residual, relu)
    if weight is not None and weight.dtype != x.dtype:
        # Half-precision input with float32 weights is supported on CPU but not on CUDA, so all are cast to float32.
        wide = statistics_dtype(x)
        offset = None if bias is None else bias.to(wide)
        y = group_norm_in_layout(x.to(wide), groups, weight.to(wide), offset, eps)
    else:
        y = group_norm_in_layout(x, groups, weight, bias, eps)
    return add_residual_and_relu(y.to(x.dtype), residual, relu)


def _uses_kernel(x: Tensor, groups: int, caller: str) -> bool:
    """Whether to use the Triton kernel: it can run, and torch's operator would copy the input."""
    return (
        x.is_cuda
        and resolve_kernel(None, caller) in ("auto", "triton")
        and variants.auto_selects(x, groups)
        and not x.is_contiguous()
        and channels_last(x)
    )


def _on_device(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether all parameters are on the input's device; if not, torch's operator raises the error."""
    return all(p is None or p.device == x.device for p in parameters)


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
    caller: str = "instance_norm",
) -> Tensor:
    """Instance normalization: normalizes each channel of each sample alone, so it needs more than one position.

    ``residual`` and ``relu`` are as in `group_norm`.

    Example:
        >>> instance_norm(torch.tensor([[[0.0, 2.0], [5.0, 5.5]]]), eps=1e-12)
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])
    """
    check_input(x, ANY_RANK, channels_of(None, weight), caller)
    if x.numel() and x.numel() == x.shape[0] * x.shape[1]:
        raise ValueError(
            f"{caller}: an input of shape {tuple(x.shape)} has one value per instance, which always normalizes to "
            f"zero. Give it more than one position, or use group or layer normalization."
        )
    return group_norm(x, x.shape[1], weight, bias, eps, residual=residual, relu=relu, caller=caller)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
    caller: str = "layer_norm",
) -> Tensor:
    """Layer normalization over channels and positions; weight and bias are per channel.

    ``residual`` and ``relu`` are as in `group_norm`.

    Example:
        >>> layer_norm(torch.tensor([[0.0, 2.0]]), eps=1e-12)
        tensor([[-1.,  1.]])
    """
    return group_norm(x, 1, weight, bias, eps, residual=residual, relu=relu, caller=caller)
