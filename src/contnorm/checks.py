"""Argument checks. Each error message names the caller, the value, what is allowed and how to fix it.

Public functions and layers run these checks once and pass their name as ``caller``. Internal functions do not check
their arguments again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor, nn

__all__ = [
    "GroupsError",
    "auto_groups",
    "check_batch",
    "check_batch_weight",
    "check_eps",
    "check_features",
    "check_group_size",
    "check_input",
    "check_model",
    "check_moments",
    "check_momentum",
    "check_number",
    "check_parameters",
    "check_residual",
    "in_float64",
    "nearest_groups",
    "resolve_groups",
    "statistics_dtype",
    "updates_moments",
    "widest",
]

INPUT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
MAX_AUTO_GROUPS = 32
MIN_AUTO_CHANNELS = 2  # with one channel per group, group norm would be instance norm
MIN_AUTO_CHANNELS_OF_ONE_POSITION = 8  # with one position, a group has only its channels: fewer give noisy moments


class GroupsError(ValueError):
    """The number of groups does not divide the number of channels.

    Attributes:
        num_groups: The number of groups.
        channels: The number of channels of the first layer that it does not divide.
        suggestion: A number of groups that divides the channels; see `nearest_groups`.
    """

    def __init__(self, message: str, num_groups: int = 0, channels: int = 0, suggestion: int = 1) -> None:
        super().__init__(message)
        self.num_groups, self.channels, self.suggestion = num_groups, channels, suggestion


def check_model(model: object, caller: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{caller}: expected a torch.nn.Module as model, got {type(model).__name__}.")
    return model


def check_features(num_features: object, caller: str) -> int:
    if isinstance(num_features, bool) or not isinstance(num_features, Integral) or num_features < 1:
        raise ValueError(
            f"{caller}: num_features={num_features!r} must be a whole number of channels, 1 or more. "
            f"Give the size of dimension 1 of the input."
        )
    return int(num_features)


def check_eps(eps: float, caller: str) -> float:
    if not (_is_number(eps) and eps >= 0):
        raise ValueError(
            f"{caller}: eps={eps!r} must be 0 or more: it is added to a variance. The usual value is 1e-5."
        )
    if eps >= 1:
        raise ValueError(
            f"{caller}: eps={eps!r} must be below 1; the usual value is 1e-5. Arguments have batch norm's order, so "
            f"give groups by name: num_groups={eps!r}."
        )
    return float(eps)  # kernels accept only a Python float


def _is_number(value: object) -> bool:
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def check_momentum(momentum: float | None, caller: str) -> float | None:
    if momentum is not None and not (_is_number(momentum) and 0 <= momentum <= 1):
        raise ValueError(
            f"{caller}: momentum={momentum!r} must lie in [0, 1] (the weight of the newest batch), or be None for "
            f"the plain average of all batches. The usual value is 0.1."
        )
    return momentum


def check_batch_weight(momentum: float | Tensor, caller: str) -> float | Tensor:
    """Check the momentum of a functional form: a number in [0, 1] or a 0-dim tensor.

    The value of a tensor is not checked, because reading it would synchronize with the device.
    """
    if type(momentum) is float and 0 <= momentum <= 1:
        return momentum
    if isinstance(momentum, Tensor):
        if momentum.dim() != 0:
            raise ValueError(
                f"{caller}: momentum is a tensor of shape {tuple(momentum.shape)}. It must be a number or a 0-dim "
                f"tensor, the same for all channels."
            )
        return momentum
    if not (_is_number(momentum) and 0 <= momentum <= 1):
        raise ValueError(
            f"{caller}: momentum={momentum!r} must lie in [0, 1] (the weight of the newest batch). The usual value is "
            f"0.1; for the plain average of all batches give 1 / (batches so far + 1)."
        )
    return float(momentum)


def check_number(value: float, least: float, name: str, caller: str, finite: bool = False) -> float:
    """Check that a value is a number and at least ``least``; return it as a float."""
    if not (_is_number(value) and value >= least) or (finite and value == math.inf):
        what = "a finite number" if finite else "a number"
        raise ValueError(f"{caller}: {name}={value!r} must be {what}, {least:g} or more.")
    return float(value)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def nearest_groups(channels: Sequence[int], wanted: int) -> int:
    """Return the number of groups nearest to ``wanted`` that divides the channels of every layer.

    It leaves at least 2 channels in each group, since with one channel per group, group norm would be instance norm.

    Example:
        >>> nearest_groups([20], 32), nearest_groups([64, 48], 32), nearest_groups([64], 5), nearest_groups([7], 2)
        (10, 16, 4, 1)
    """
    most = max(1, min(channels) // MIN_AUTO_CHANNELS)
    choices = [groups for groups in divisors(math.gcd(*channels)) if groups <= most]
    return min(choices, key=lambda groups: (abs(groups - wanted), -groups))


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


def resolve_groups(num_groups: int | str, channels: int, rank: int, caller: str) -> int:
    """Check the number of groups, and resolve ``"auto"`` for an input of this rank; see `auto_groups`.

    Example:
        >>> resolve_groups("auto", 100, rank=4, caller="demo"), resolve_groups("auto", 100, rank=2, caller="demo")
        (25, 10)
    """
    if num_groups == "auto":
        return auto_groups(channels, one_position=rank == 2)
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 1:
        raise ValueError(f"{caller}: num_groups={num_groups!r} must be a whole number, 1 or more, or 'auto'.")
    if channels % num_groups:
        raise GroupsError(
            f"{caller}: num_groups={num_groups} does not divide the {channels} channels. "
            f"Use a divisor of {channels}: {_some(divisors(channels), num_groups)}; or num_groups='auto'.",
            num_groups,
            channels,
            nearest_groups([channels], num_groups),
        )
    return num_groups


def _some(choices: Sequence[int], wanted: int, most: int = 12) -> str:
    """Format the choices; if there are more than ``most``, only those nearest to ``wanted``."""
    near = sorted(choices, key=lambda d: abs(d - wanted))[:most]
    return ", ".join(map(str, sorted(near))) + (" among others" if len(choices) > most else "")


def check_input(x: Tensor, ranks: Sequence[int], channels: int | None, caller: str) -> None:
    """Check the type, layout, rank, number of channels and dtype of an input."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}: expected a torch.Tensor as input, got {type(x).__name__}.")
    if x.layout is not torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else f"the layout {x.layout}"
        raise ValueError(f"{caller}: expected a dense input, got {layout}. Convert it to a plain tensor first.")
    if x.dim() not in ranks:
        shapes = {2: "(N, C)", 3: "(N, C, L)", 4: "(N, C, H, W)", 5: "(N, C, D, H, W)"}
        allowed = " or ".join(shapes[r] for r in ranks)
        raise ValueError(
            f"{caller}: expected an input of shape {allowed}, got {tuple(x.shape)}{_other_layer(x.dim(), caller)}"
        )
    if channels is not None and x.shape[1] != channels:
        raise ValueError(
            f"{caller}: built for {channels} channels, got an input of shape {tuple(x.shape)} with {x.shape[1]}. "
            f"Channels are dimension 1; build the layer with num_features={x.shape[1]}, or permute the input."
        )
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(
            f"{caller}: expected float16, bfloat16, float32 or float64 input, got {x.dtype}. Use x.float()."
        )


def _other_layer(rank: int, caller: str) -> str:
    """Advice for the error message: the 1d, 2d or 3d class that accepts this rank, if the caller is such a class."""
    suffix = {2: "1d", 3: "1d", 4: "2d", 5: "3d"}.get(rank)
    if suffix and caller[-2:] in ("1d", "2d", "3d"):
        return f". Use {caller[:-2]}{suffix} for that rank."
    return ". The first two dimensions are samples and channels."


def check_parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None, caller: str) -> None:
    """Check that weight and bias have shape (C,), because other shapes would be broadcast silently."""
    shape = (x.shape[1],)
    if (weight is None or weight.shape == shape) and (bias is None or bias.shape == shape):
        return
    name, wrong = ("bias", bias) if weight is None or weight.shape == shape else ("weight", weight)
    assert wrong is not None
    raise ValueError(
        f"{caller}: {name} has shape {tuple(wrong.shape)}, but an input of shape {tuple(x.shape)} needs {shape}: one "
        f"value per channel."
    )


def check_residual(residual: Tensor | None, x: Tensor, caller: str) -> Tensor | None:
    """Check that a residual has the input's shape, dtype and device; under autocast, cast it to the input's dtype.

    The output therefore always has the input's shape and dtype.
    """
    if residual is None:
        return None
    if not isinstance(residual, Tensor):
        raise TypeError(f"{caller}: residual must be a tensor, got {type(residual).__name__}.")
    if residual.shape != x.shape:
        raise ValueError(
            f"{caller}: residual has shape {tuple(residual.shape)} and the input {tuple(x.shape)}. They must be equal; "
            f"use residual.expand_as(x) if it is meant to be broadcast."
        )
    if residual.device != x.device:
        raise ValueError(f"{caller}: residual is on {residual.device} and the input on {x.device}. Move one of them.")
    if residual.dtype == x.dtype:
        return residual
    # Under autocast, branches may have different dtypes: a shortcut without any operation stays in float32.
    if residual.dtype in INPUT_DTYPES and _in_autocast(x.device.type):
        return residual.to(x.dtype)
    raise ValueError(
        f"{caller}: residual is {residual.dtype} and the input {x.dtype}. They must be equal outside autocast; use "
        f"residual.to(x.dtype)."
    )


def _in_autocast(device_type: str) -> bool:
    """Whether autocast is enabled. `torch.is_autocast_enabled` raises for device types without autocast."""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def check_batch(x: Tensor, eps: float, caller: str) -> None:
    """Raise if batch statistics cannot be computed (one value per channel, or eps of 0), as torch's BatchNorm does."""
    if x.numel() == x.shape[1]:
        raise ValueError(
            f"{caller}: Expected more than 1 value per channel when training, got input size {x.shape}. "
            f"Use a batch of 2 or more, or evaluation mode."
        )
    if eps == 0:
        raise ValueError(f"{caller}: eps must be above 0 when training, got {eps!r}. The usual value is 1e-5.")


def check_group_size(x: Tensor, num_groups: int, caller: str) -> None:
    """Raise if a group has a single value, which always normalizes to zero."""
    if x.numel() == x.shape[0] * num_groups and x.numel():
        raise ValueError(
            f"{caller}: num_groups={num_groups} leaves one value in each group of an input of shape {tuple(x.shape)}, "
            f"and one value always normalizes to zero. Use fewer groups, such as "
            f"{resolve_groups('auto', x.shape[1], 2, caller)}."
        )


def check_moments(running_mean: Tensor | None, running_var: Tensor | None, caller: str) -> None:
    if (running_mean is None) != (running_var is None):
        missing = "running_mean" if running_mean is None else "running_var"
        raise ValueError(f"{caller}: {missing} is None and the other one is not. Give both, or neither.")
    if running_mean is None or running_var is None:
        return
    if running_mean.dim() != 1 or running_mean.shape != running_var.shape:
        raise ValueError(
            f"{caller}: running_mean has shape {tuple(running_mean.shape)} and running_var {tuple(running_var.shape)}. "
            f"Give one value for each channel in both."
        )
    if not (running_mean.is_floating_point() and running_var.is_floating_point()):
        raise ValueError(
            f"{caller}: running_mean is {running_mean.dtype} and running_var {running_var.dtype}. Moments must be "
            f"floating-point numbers; use .float()."
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


def _has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def widest(x: Tensor) -> Tensor:
    """Return a tensor in float64; in float32 on a device without float64, such as Apple's MPS."""
    return x.double() if _has_float64(x.device) else x.float()


def in_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, or complex128; on the CPU if its device has no float64. For small tensors."""
    if not _has_float64(x.device):
        x = x.cpu()
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
