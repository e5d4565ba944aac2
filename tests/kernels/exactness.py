"""Helpers of the kernel tests: channels_last layout, relative errors, and backward passes under vmap."""

import torch
from torch import Tensor

__all__ = ["errors", "last", "same_under_vmaps"]


def last(x: Tensor) -> Tensor:
    """The same values in channels_last layout."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each result, relative to its largest value if that is above one."""
    assert actual.keys() == expected.keys()
    result = {}
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        result[name] = (actual[name].double() - value).abs().max().item() / max(1.0, value.abs().max().item())
    return result


def same_under_vmaps(x: Tensor, y: Tensor, pushes: Tensor) -> None:
    """Backward pass under both of torch's vmaps: `is_grads_batched` and `torch.func.vmap`."""
    (older,) = torch.autograd.grad(y, x, pushes, is_grads_batched=True, retain_graph=True)
    (newer,) = torch.func.vmap(lambda push: torch.autograd.grad(y, x, push, retain_graph=True))(pushes)
    for push, *result in zip(pushes, older, newer, strict=True):
        (expected,) = torch.autograd.grad(y, x, push, retain_graph=True)
        for each in result:
            torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
