"""Checks of arguments, made once where a value enters, and the dtypes of statistics."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_AUTO_GROUPS = 32
MIN_AUTO_CHANNELS = 2  # with one channel per group, group norm would be instance norm
MIN_AUTO_CHANNELS_OF_ONE_POSITION = 8  # with one position, a group has only its channels: fewer give noisy moments


def check_input(x: Tensor, *vectors: Tensor | None) -> None:
    """Check that an input has floating-point values, and that parameters and moments have one value per channel.

    Vectors of other shapes would be broadcast silently.
    """
    if not x.is_floating_point():
        raise TypeError(f"expected a floating-point input, got {x.dtype}.")
    for vector in vectors:
        if vector is not None and vector.shape != x.shape[1:2]:
            raise ValueError(
                f"an input of shape {tuple(x.shape)} has {x.shape[1]} channels, in dimension 1, but a parameter or "
                f"running moment has shape {tuple(vector.shape)}."
            )


def check_number(value: float, least: float, name: str, most: float = math.inf) -> float:
    """Check that a value is a finite number within limits; return it as a float."""
    if not least <= value <= most or value == math.inf:
        limits = f"at least {least:g}" if most == math.inf else f"between {least:g} and {most:g}"
        raise ValueError(f"{name}={value!r} must be a finite number, {limits}.")
    return float(value)


def check_eps(eps: float) -> float:
    """Check a number that is added to a variance. It is below 1, unlike a number of groups given in its place."""
    if not 0 <= eps < 1:
        raise ValueError(f"eps={eps!r} must be at least 0 and below 1. Give the number of groups by name: num_groups.")
    return float(eps)  # kernels accept only a Python float


def check_residual(residual: Tensor | None, x: Tensor) -> Tensor | None:
    """Check that a residual has the input's shape and device; cast it to the input's dtype, which the output has."""
    if residual is not None and (residual.shape != x.shape or residual.device != x.device):
        raise ValueError(f"the residual is {tuple(residual.shape)} on {residual.device}, the input {tuple(x.shape)}.")
    return None if residual is None else residual.to(x.dtype)


def check_batch(x: Tensor, eps: float) -> None:
    """Raise if batch statistics cannot be computed (one value per channel, or eps of 0), as torch's BatchNorm does."""
    if x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.shape}.")
    if eps == 0:
        raise ValueError("eps must be above 0 when training.")


def auto_groups(channels: int, one_position: bool = False) -> int:
    """Return the number of groups that ``num_groups="auto"`` selects.

    It is the largest divisor of the number of channels, up to 32, that leaves at least 2 channels in each group, or at
    least 8 where the input has one position: (N, C), or a 1 x 1 map. If no divisor does, as for every prime number of
    channels, it is 1.

    Example:
        >>> [auto_groups(channels) for channels in (16, 64, 100, 512, 37)]
        [8, 32, 25, 32, 1]
        >>> [auto_groups(channels, one_position=True) for channels in (16, 64, 100, 512, 37)]
        [2, 8, 10, 32, 1]
    """
    least = MIN_AUTO_CHANNELS_OF_ONE_POSITION if one_position else MIN_AUTO_CHANNELS
    most = min(channels // least, MAX_AUTO_GROUPS)
    return next((groups for groups in range(most, 0, -1) if channels % groups == 0), 1)


def resolve_groups(num_groups: int | str, channels: int, rank: int) -> int:
    """Check the number of groups, and resolve ``"auto"`` for an input of this rank; see `auto_groups`.

    Example:
        >>> resolve_groups("auto", 100, rank=4), resolve_groups("auto", 100, rank=2)
        (25, 10)
    """
    if num_groups == "auto":
        return auto_groups(channels, one_position=rank == 2)
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ValueError(f"num_groups={num_groups!r} must be a whole number, 1 or more, or 'auto'.")
    if channels % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide the {channels} channels. Use a divisor, such as "
            f"{auto_groups(channels)}, or num_groups='auto'."
        )
    return num_groups


def check_groups(num_groups: int | str, channels: int, ranks: tuple[int, ...]) -> int | str:
    """Check the number of groups at construction; ``"auto"`` is kept if it depends on the rank of the input."""
    resolved = {resolve_groups(num_groups, channels, rank) for rank in ranks}
    return resolved.pop() if len(resolved) == 1 else num_groups


def check_group_size(x: Tensor, num_groups: int) -> None:
    """Raise if a group has a single value, which always normalizes to zero."""
    if x.numel() == x.shape[0] * num_groups and x.numel():
        raise ValueError(
            f"num_groups={num_groups} leaves one value, which normalizes to zero, in each group of an input of shape "
            f"{tuple(x.shape)}. Use fewer groups, such as {auto_groups(x.shape[1], one_position=True)}."
        )


def updates_moments(running_mean: Tensor | None, momentum: float | Tensor) -> bool:
    """Whether a batch updates the running moments: they exist, and the momentum is not the number 0.

    Example:
        >>> updates_moments(torch.zeros(2), 0.1), updates_moments(torch.zeros(2), 0), updates_moments(None, 0.1)
        (True, False, False)
    """
    return running_mean is not None and (isinstance(momentum, Tensor) or momentum != 0)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the statistics of an input: float64 for float64 input, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


WITHOUT_FLOAT64 = ("mps",)  # types of devices


def widest(x: Tensor) -> Tensor:
    """Return a tensor in float64; in float32 on a device without float64, such as Apple's MPS."""
    return x.float() if x.device.type in WITHOUT_FLOAT64 else x.double()


def in_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, or complex128; on the CPU if its device has no float64. For small tensors."""
    if x.device.type in WITHOUT_FLOAT64:
        x = x.cpu()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
