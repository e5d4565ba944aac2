"""Batches put together: what lies together is not copied, and what does not is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contnorm.bench.strategies.base import joined


def base() -> Tensor:
    return torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0))


PARTS = {
    "cut": lambda x: x.split([2, 1, 3]),
    "in channels_last": lambda x: x.contiguous(memory_format=torch.channels_last).split([2, 4]),
    "alone": lambda x: (x,),
}
OTHERS = {
    "swapped": lambda x: x.split(3)[::-1],
    "with a gap": lambda x: (x[:2], x[3:]),
    "of two tensors": lambda x: (x[:3], x.clone()[3:]),
    "of other channels": lambda x: (x[:3, :2], x[3:, 1:]),
    "that need gradients": lambda x: x.clone().requires_grad_().split(3),
    "of every other": lambda x: (x[0:4:2], x[4:5]),
}


@pytest.mark.parametrize("kind", PARTS)
def test_adjacent_slices_are_not_copied(kind: str) -> None:
    parts = PARTS[kind](base())
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(list(parts)))
    assert whole.data_ptr() == parts[0].data_ptr() and whole.stride() == parts[0].stride()


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_are_copied(kind: str) -> None:
    parts = OTHERS[kind](base())
    whole = joined(parts)
    assert torch.equal(whole, torch.cat(list(parts)))
    assert whole.data_ptr() != parts[0].data_ptr()
