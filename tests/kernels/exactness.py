"""What the tests of kernels share: the other layout, how far results are off, and backward passes under a vmap."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["errors", "last", "same_under_vmaps"]


def last(x: Tensor) -> Tensor:
    """The same values with channels next to each other."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Of each result the largest error, over its largest value where that is more than one."""
    assert actual.keys() == expected.keys()
    found = {}
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        found[name] = (actual[name].double() - value).abs().max().item() / max(1.0, value.abs().max().item())
    return found


def same_under_vmaps(x: Tensor, y: Tensor, pushes: Tensor) -> None:
    """A vmap around the backward pass alone, torch's older one (`is_grads_batched`) and its newer one."""
    (older,) = torch.autograd.grad(y, x, pushes, is_grads_batched=True, retain_graph=True)
    (newer,) = torch.func.vmap(lambda push: torch.autograd.grad(y, x, push, retain_graph=True))(pushes)
    for push, *found in zip(pushes, older, newer, strict=True):
        (expected,) = torch.autograd.grad(y, x, push, retain_graph=True)
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
