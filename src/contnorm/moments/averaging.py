"""Averages of state dicts, as in federated averaging: running variances are pooled, and batch counters stay integers.

The variance of data from several sources is the mean of their variances plus the variance of their means. Averaged
running variances lack the second part, which is large for sources that differ, such as clients with different classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from contnorm.checks import in_float64

__all__ = ["average_state_dicts"]


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
        ValueError: If their keys differ, or if the weights do not fit.

    Example:
        >>> first, second = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
        >>> _ = second.running_mean.fill_(4.0)
        >>> state = average_state_dicts([first.state_dict(), second.state_dict()], weights=[3, 1])
        >>> state["running_mean"], state["running_var"]  # 1 + (3 * 1^2 + 1 * 3^2) / 4
        (tensor([1.]), tensor([4.]))
    """
    numbers = [1.0] * len(states) if weights is None else [float(weight) for weight in weights]
    if len(numbers) != len(states) or min(numbers, default=-1) < 0 or not 0 < sum(numbers) < math.inf:
        raise ValueError(f"average_state_dicts: weights={numbers} must be a number from 0 for each state dict.")
    if any(state.keys() != states[0].keys() for state in states):
        raise ValueError("average_state_dicts: the state dicts have different keys.")
    shares = [number / sum(numbers) for number in numbers]
    averaged = {name: _average([state[name] for state in states], shares) for name in states[0]}
    if moments == "pool":
        for name in averaged:
            mean = f"{name.removesuffix('running_var')}running_mean"
            if name.rpartition(".")[2] == "running_var" and mean in averaged:
                averaged[name] = _pooled_variance([(state[mean], state[name]) for state in states], shares)
    return averaged


def _average(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    first = values[0]
    stacked = torch.stack([value.detach().to(first.device) for value in values])
    if not (stacked.is_floating_point() or stacked.is_complex()):
        return stacked.amax(0)
    return _weighted(stacked, shares).to(first.dtype).to(first.device)


def _pooled_variance(moments: Sequence[tuple[Tensor, Tensor]], shares: Sequence[float]) -> Tensor:
    first = moments[0][1]
    means, variances = (
        torch.stack([in_float64(tensor.detach().to(first.device)) for tensor in tensors])
        for tensors in zip(*moments, strict=True)
    )
    pooled = _weighted(variances + (means - _weighted(means, shares)).square(), shares)
    return pooled.to(first.dtype).to(first.device)


def _weighted(stacked: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the weighted sum over the first dimension, in double precision."""
    wide = in_float64(stacked)
    summed: Tensor = torch.tensordot(torch.tensor(shares, dtype=wide.dtype, device=wide.device), wide, 1)
    return summed
