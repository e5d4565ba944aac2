"""Exact moments: of the inputs of a layer, pooled over batches, over processes and over models.

The variance of data from several sources is the mean of their variances plus the variance of their means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from contnorm.checks import in_float64, widest
from contnorm.detect import DetectedNorm, UnsupportedNorm, detect_norm, holds_moments
from contnorm.moments.freeze import stats_state
from contnorm.norms.base import MomentNorm, channel_moments, unbiased
from contnorm.registry import NORMS

Moments = tuple[Tensor, Tensor]  # mean and variance
Frozen = Literal["raise", "lift", "keep"]
# The samples of a batch by weight: the weight, and the numbers of the samples; None for all of them.
WeightGroups = list[tuple[float, Tensor | None]]
_TORCH_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


# --- layers with moments --------------------------------------------------------------------------------------------


class NonFiniteMomentsError(ValueError):
    """The moments of the data at a layer are NaN or infinite.

    Attributes:
        layer: The layer's name in the model.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"reestimate: the moments of the data at layer {layer!r} are NaN or infinite. The model is "
            f"unchanged. Check the batches and the model's weights for values that are not finite or overflow."
        )
        self.layer = layer

    def __reduce__(self) -> tuple[type[NonFiniteMomentsError], tuple[str]]:
        return type(self), (self.layer,)


def moment_layers(model: nn.Module, frozen: Frozen = "raise") -> dict[str, nn.Module]:
    """Return the norm layers whose running moments `reestimate` sets, by name.

    Args:
        model: The model.
        frozen: What to do with layers whose moments are frozen: raise an error, or include (``"lift"``) or leave out
            (``"keep"``) the layers.

    Raises:
        ValueError: For a layer whose moments are frozen or cannot be estimated, and for an unknown layer with buffers
            ``running_mean`` and ``running_var``.

    Example:
        >>> list(moment_layers(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4))))
        ['1']
    """
    if frozen not in get_args(Frozen):
        raise ValueError(f"reestimate: frozen={frozen!r} must be 'raise', 'lift' or 'keep'.")
    layers = {}
    for name, module in model.named_modules():
        detected = detect_norm(module)
        if detected is None or isinstance(module, _InstanceNorm):
            continue
        if isinstance(detected, DetectedNorm) and (detected.constant or not NORMS[detected.norm].keeps_moments):
            continue
        has_own = hasattr(module, "batch_moments") or type(module) in _TORCH_CLASSES
        reason = ""
        if isinstance(detected, UnsupportedNorm):
            reason = detected.reason
        elif NORMS[detected.norm].layers and not has_own:
            reason = "its class does not define batch_moments(x), the mean and biased variance that an input adds"
        elif not holds_moments(module):
            reason = "it has no moments and normalizes with the batch; convert it with track_running_stats=True"
        if reason:
            raise ValueError(f"reestimate: layer {name!r} ({type(module).__name__}): {reason}.")
        is_frozen = not stats_state(module)[1]
        if is_frozen and frozen == "raise":
            raise ValueError(
                f"reestimate: layer {name!r} ({type(module).__name__}): its moments are frozen. Call "
                f"contnorm.freeze_stats(model, False), or unfreeze_norms(model), first; reestimate also takes "
                f"frozen='lift' to set them too and frozen='keep' to leave them."
            )
        if frozen != "keep" or not is_frozen:
            layers[name] = module
    return layers


def keeps_moments(model: nn.Module) -> bool:
    """Whether any norm of the model has running moments.

    Example:
        >>> keeps_moments(nn.Sequential(nn.BatchNorm1d(4))), keeps_moments(nn.GroupNorm(2, 4))
        (True, False)
    """
    norms = (detect_norm(module) for module in model.modules())
    return any(isinstance(norm, DetectedNorm) and NORMS[norm.norm].keeps_moments for norm in norms)


def read_moments(layers: Mapping[str, nn.Module]) -> dict[str, Moments]:
    """Return copies of the running moments of layers."""
    return {n: (layer.running_mean.clone(), layer.running_var.clone()) for n, layer in layers.items()}  # type: ignore


@torch.no_grad()
def write_moments(layers: Mapping[str, nn.Module], values: Mapping[str, Moments], finite: bool = False) -> None:
    """Write running moments.

    Raises:
        NonFiniteMomentsError: If a buffer has NaN or infinite values afterwards, and ``finite`` is set.
    """
    for name, moments in values.items():
        buffers = layers[name]._buffers
        for key, value in zip(("running_mean", "running_var"), moments, strict=True):
            buffer = cast(Tensor, buffers[key])
            buffer.copy_(value.to(buffer.dtype))
            if finite and not buffer.isfinite().all():  # after the write: a moment may overflow the buffer's dtype
                raise NonFiniteMomentsError(name)


# --- moments of data ------------------------------------------------------------------------------------------------


def group_by_weight(weights: Tensor | float) -> WeightGroups:
    """Group the samples of a batch by weight. A layer defines moments without weights; those of groups are merged.

    Raises:
        ValueError: If the weights are not one finite number from 0 for each sample, or one for the batch.

    Example:
        >>> group_by_weight(torch.tensor([2.0, 1.0, 2.0]))
        [(1.0, tensor([1])), (2.0, tensor([0, 2]))]
    """
    if not isinstance(weights, Tensor) or weights.dim() == 0:
        weights = torch.tensor([float(weights)], dtype=torch.float64)
    values = widest(weights.detach())
    if values.dim() != 1 or not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError(
            "reestimate: weights(batch) must return one finite number from 0 for each sample, as a tensor of shape "
            "(N,), or one number for the batch."
        )
    distinct, group = torch.unique(values, return_inverse=True)
    if len(distinct) == 1:
        return [(distinct.item(), None)]
    numbers = cast("list[float]", distinct.tolist())
    return [(weight, torch.nonzero(group == number).squeeze(1)) for number, weight in enumerate(numbers)]


@dataclass
class PooledMoments:
    """Weight, mean and sum of squared deviations, merged batch by batch (Chan et al.), in float64."""

    count: int = 0  # values per channel
    total: float = 0  # sum of their weights; an int if they have none
    total_squares: float = 0  # sum of the squared weights
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))

    def moments(self, layer: Any, normalizing: bool = False) -> tuple[Tensor, Tensor]:
        """Return the mean and variance that a layer stores, or those that a training-mode forward normalizes with."""
        var = self.squares / self.total
        equal = self.count == self.total == self.total_squares
        effective = self.count if equal else self.total * self.total / self.total_squares  # number of values (Kish)
        if normalizing:
            return self.mean, layer.normalizing_variance(var, effective) if isinstance(layer, MomentNorm) else var
        own = hasattr(layer, "batch_moments") and hasattr(layer, "stored_variance")
        return self.mean, (layer.stored_variance if own else unbiased)(var, effective)

    def add_input(self, layer: nn.Module, x: Tensor, groups: WeightGroups | None) -> None:
        """Add the values of a layer's input, by the weights of its samples."""
        if groups and groups[0][1] is not None and sum(len(rows) for _, rows in groups if rows is not None) != len(x):
            raise ValueError(f"reestimate: weights(batch) must have {len(x)} weights, as many as a norm has samples.")
        for weight, rows in [(1, None)] if groups is None else groups:
            part = x if rows is None else x[rows.to(x.device)]
            if weight and part.numel():
                count = part.numel() // part.shape[1]
                own = getattr(layer, "batch_moments", None)
                # Pooled in float64; on the CPU for a device without it.
                mean, var = map(in_float64, own(part) if own else channel_moments(widest(part)))
                added = count * weight
                self.merge(PooledMoments(count, added, added * weight, mean, var * added))

    def merge(self, other: PooledMoments) -> None:
        """Add the values of another pool."""
        if other.total == 0:
            return
        total = self.total + other.total
        mean, squares = self.mean.to(other.mean.device), self.squares.to(other.mean.device)
        off = other.mean - mean
        share = other.total / total
        self.mean = mean + off * share
        self.squares = squares + other.squares + off * off * (self.total * share)
        self.count, self.total = self.count + other.count, total
        self.total_squares += other.total_squares


class NoLockstepError(RuntimeError):
    """Batches or processes can't advance together: too little memory, or they do not call the same layers once each."""


class Meetings:
    """Context manager in which the processes of a group meet at each norm layer that they measure, and at the end.

    A process that can't go on says so instead. Then all leave: with a RuntimeError if one has failed, and otherwise
    with `NoLockstepError`. So all processes meet the same number of times, and none waits for another.

    Args:
        group: The process group.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.size, self._open = group, dist.get_world_size(group), True

    def pool(self, name: str, pool: PooledMoments) -> PooledMoments:
        """Merge the moments of a layer over the processes, in their order."""
        merged = PooledMoments()
        for other in self._meet("at", name, replace(pool, mean=pool.mean.cpu(), squares=pool.squares.cpu())):
            merged.merge(other)
        return replace(merged, mean=merged.mean.to(pool.mean.device), squares=merged.squares.to(pool.mean.device))

    def _meet(self, state: str, detail: str = "", pool: PooledMoments | None = None) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (state, detail, pool), self.group)
        self._open = state == "at" and all(there[:2] == (state, detail) for there in gathered)
        for rank, (state_there, detail_there, _) in enumerate(gathered):
            if state_there == "failed":
                raise RuntimeError(f"reestimate: process {rank} of the group failed: {detail_there}")
        if len({there[:2] for there in gathered}) > 1:
            raise NoLockstepError("reestimate: the processes of the group have data that reaches different layers.")
        return [there[2] for there in gathered]

    def __enter__(self) -> Meetings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            return
        if error is None:
            self._meet("end")
        elif isinstance(error, NoLockstepError | torch.OutOfMemoryError):
            self._meet("no sweep")
        elif isinstance(error, Exception):
            with suppress(RuntimeError):  # this process raises its own error
                self._meet("failed", f"{type(error).__name__}: {error}")


def meetings_of(group: Any) -> AbstractContextManager[Meetings | None]:
    """Return the meetings of a process group; a context without any if there is none."""
    return nullcontext() if group is None else Meetings(group)


# --- moments of several models --------------------------------------------------------------------------------------


def average_state_dicts(
    states: Sequence[Mapping[str, Tensor]],
    weights: Sequence[float] | None = None,
    *,
    moments: Literal["pool", "average"] = "pool",
) -> dict[str, Tensor]:
    """Return the weighted average of state dicts of equal models.

    Floating-point tensors are averaged. Integers, such as ``num_batches_tracked``, take the largest value, because an
    average would not be an integer. Of running variances, see ``moments``. The moments of several models are not those
    of the averaged weights; `reestimate` measures those from data.

    Args:
        states: State dicts with the same keys and shapes.
        weights: A number from 0 for each state dict, such as a client's number of samples; only ratios matter. Default:
            the same for all.
        moments: ``"pool"`` computes the variance of all data: the mean of ``running_var`` plus the variance of
            ``running_mean``. ``"average"`` computes the mean of ``running_var``, as if the means were equal.

    Returns:
        A new state dict, with the dtypes and devices of the first one.

    Raises:
        ValueError: If their keys differ, if the weights do not fit, or for another value of ``moments``.

    Example:
        >>> first, second = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
        >>> _ = second.running_mean.fill_(4.0)
        >>> state = average_state_dicts([first.state_dict(), second.state_dict()], weights=[3, 1])
        >>> state["running_mean"], state["running_var"]  # 1 + (3 * 1^2 + 1 * 3^2) / 4
        (tensor([1.]), tensor([4.]))
    """
    if moments not in ("pool", "average"):
        raise ValueError(f"average_state_dicts: moments={moments!r} must be 'pool' or 'average'.")
    numbers = [1.0] * len(states) if weights is None else [float(weight) for weight in weights]
    if len(numbers) != len(states) or min(numbers, default=-1) < 0 or not 0 < sum(numbers) < math.inf:
        raise ValueError(f"average_state_dicts: weights={numbers} must be a number from 0 for each state dict.")
    if any(state.keys() != states[0].keys() for state in states):
        raise ValueError("average_state_dicts: the state dicts have different keys.")
    shares = torch.tensor([number / sum(numbers) for number in numbers], dtype=torch.float64)

    def stack(name: str) -> Tensor:
        return torch.stack([state[name].detach().to(states[0][name].device) for state in states])

    def mean(values: Tensor) -> Tensor:
        wide = in_float64(values)
        weighted: Tensor = torch.tensordot(shares.to(wide.device, wide.dtype), wide, 1)
        return weighted

    averaged = {}
    for name, first in states[0].items():
        values, key = stack(name), f"{name.removesuffix('running_var')}running_mean"
        if not (values.is_floating_point() or values.is_complex()):
            averaged[name] = values.amax(0)
            continue
        if moments == "pool" and name.rpartition(".")[2] == "running_var" and key in states[0]:
            means = in_float64(stack(key))
            values = in_float64(values) + (means - mean(means)).square()
        averaged[name] = mean(values).to(first.dtype).to(first.device)
    return averaged
