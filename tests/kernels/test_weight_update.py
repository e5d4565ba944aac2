"""The update kernel gives the bits of torch's casts, sums and update, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contnorm.kernels.triton.availability import can_launch
from contnorm.kernels.triton.weight_update import can_update, update_weight


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> None:
    if not can_launch(device):
        pytest.skip("Triton can't run here")


def noise(number: int, device: torch.device, shape: tuple[int, ...] = (5, 7, 3, 3)) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(device)
    return values.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_update_equals_torchs(count: int, device: torch.device) -> None:
    weight = noise(0, device)
    gradients = [noise(i + 1, device).bfloat16() for i in range(count)]
    total = gradients[0].float()
    for gradient in gradients[1:]:
        total = total + gradient.float()
    expected = [weight.clone()]
    torch._foreach_add_(expected, [total], alpha=-0.03)
    assert can_update(weight, gradients)
    update_weight(weight, gradients, -0.03)
    if device.type == "cuda":
        assert torch.equal(weight, expected[0])
    else:  # the interpreter has no fused multiply-add: a weight of less than 4 may differ by one unit
        torch.testing.assert_close(weight, expected[0], rtol=0, atol=2**-22)


def test_other_layouts_and_numbers_of_gradients_are_refused(device: torch.device) -> None:
    weight, gradient = noise(0, device), noise(1, device).bfloat16()
    assert not can_update(weight, [gradient.contiguous()])
    assert not can_update(weight, []) and not can_update(weight, [gradient] * 4)
    assert not can_update(weight.double(), [gradient])
    assert not can_update(weight[:, :3], [gradient[:, :3]]), "not dense"
