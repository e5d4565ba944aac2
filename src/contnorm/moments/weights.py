"""Weights of samples in re-estimated moments: a weight for each sample, or one for all samples of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from contnorm.checks import widest
from contnorm.moments.batches import number_of_batches

__all__ = ["BatchWeights", "WeightGroups", "Weights"]

Weights = Callable[[Any], Tensor | float] | Sequence[float] | Tensor

# The samples of a batch by weight: the weight and the samples' numbers, their count if all samples have the weight, or
# None if the weight is that of the batch, whose number of samples is not needed.
WeightGroups = list[tuple[float, Tensor | int | None]]

_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class BatchWeights:
    """The ``weights`` of `reestimate`: a function of a batch, or a sequence of one number for each batch.

    Raises:
        TypeError: If the weights are neither a function nor a sequence of numbers.
        ValueError: If a sequence has a wrong number, does not fit the number of batches, or if their order changes.
    """

    def __init__(self, weights: Weights, batches: Iterable[Any]) -> None:
        self._function = weights if callable(weights) else None
        self._numbers = [] if callable(weights) else _numbers(weights)
        if self._function is None and isinstance(batches, DataLoader) and isinstance(batches.sampler, _SHUFFLING):
            raise ValueError(
                "reestimate: weights is a sequence, one number for each batch, and the DataLoader shuffles its "
                "samples. Give a DataLoader with shuffle=False, or a function of a batch as weights."
            )
        length = number_of_batches(batches)
        if length:
            self.check_count(length)

    def groups(self, batch: Any, index: int) -> WeightGroups:
        """Group the samples of a batch by weight. A layer defines moments without weights; those of groups are merged.

        Args:
            batch: The batch.
            index: The number of batches before it in the pass.
        """
        if self._function is not None:
            return _groups(self._function(batch))
        if index >= len(self._numbers):
            self.check_count(index + 1, "or more ")
        return [(self._numbers[index], None)]

    def check_count(self, batches: int, more: str = "") -> None:
        """Check that a sequence has one number for each of the batches of a pass."""
        if self._function is None and len(self._numbers) != batches:
            raise ValueError(
                f"reestimate: weights has {len(self._numbers)} numbers, and there are {batches} {more}batches. Give "
                f"one number for each batch, or a function of a batch that returns one weight for each sample."
            )


def _numbers(weights: Any) -> list[float]:
    """Return the numbers of a sequence: a list or tuple, or a tensor or array with one dimension."""
    if hasattr(weights, "tolist"):
        weights = weights.tolist()
    if not isinstance(weights, Sequence) or isinstance(weights, str) or not all(_is_number(w) for w in weights):
        raise TypeError(
            f"reestimate: weights is a {type(weights).__name__}. Give a function of a batch that returns one weight "
            f"for each sample or one for the batch, or a list of numbers, one for each batch."
        )
    return [_checked(weight, "weights") for weight in weights]


def _is_number(weight: object) -> bool:
    return isinstance(weight, Real) or (isinstance(weight, Tensor) and weight.dim() == 0 and not weight.is_complex())


def _checked(weight: Any, where: str) -> float:
    value = float(weight)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"reestimate: {where} has the weight {value}. Weights are finite numbers from 0.")
    return value


def _groups(weights: object) -> WeightGroups:
    if _is_number(weights):
        return [(_checked(weights, "weights(batch)"), None)]
    if not isinstance(weights, Tensor) or weights.dim() != 1 or weights.is_complex():
        what = f"a tensor of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(
            f"reestimate: weights(batch) returned {what}. Return a tensor of one weight per sample, (N,), or one "
            f"number for the batch."
        )
    values = widest(weights.detach())
    wrong = values[~(values.isfinite() & (values >= 0))]
    if len(wrong):
        _checked(wrong[0], "weights(batch)")
    distinct, group = torch.unique(values, return_inverse=True)
    if len(distinct) == 1:
        return [(distinct.item(), len(values))]
    numbers = cast("list[float]", distinct.tolist())
    return [(weight, torch.nonzero(group == number).squeeze(1)) for number, weight in enumerate(numbers)]
