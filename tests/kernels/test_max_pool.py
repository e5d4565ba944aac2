"""Max-pooling kernel, in Triton's interpreter or on a GPU: same values and gradients as torch's operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from contnorm.kernels.triton import launcher
from contnorm.kernels.triton import max_pool as max_pool_module
from contnorm.kernels.triton.availability import can_launch
from contnorm.kernels.triton.max_pool import StemPool, max_pool
from tests.kernels.exactness import last, same_under_vmaps


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> None:
    if not can_launch(device):
        pytest.skip("Triton can't run here")


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 5, 7, 9), (3, 4, 1, 1), (2, 2, 6, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_max_pool_matches_torch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Rounded values, so that windows have several maxima; and one NaN."""
    g = torch.Generator().manual_seed(0)
    x = ((2 * torch.randn(shape, generator=g)).round() / 2).to(device, dtype)
    x[0, 0, 0, 0] = float("nan")
    a, b = (x.clone().requires_grad_() for _ in range(2))
    ours, stock = max_pool(a), F.max_pool2d(b, 3, 2, 1)
    torch.testing.assert_close(ours, stock, rtol=0, atol=0, equal_nan=True)
    dy = torch.randn(stock.shape, generator=g).to(device, dtype)
    ours.backward(dy)
    stock.backward(dy)
    # At most four terms, summed in float32 and rounded once; torch may round each.
    torch.testing.assert_close(a.grad, b.grad, rtol=0 if dtype == torch.float32 else 2e-2, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 2, 7, 5), (2, 2, 1, 3)], ids=str)
def test_max_pool_double_backward(shape: tuple[int, ...], device: torch.device) -> None:
    """Double backward, as for a gradient penalty."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(device)

    def penalty(pool: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(pool(leaf).pow(3).sum(), leaf, create_graph=True)
        return slope, *torch.autograd.grad(slope.square().sum(), leaf)

    for ours, stock in zip(penalty(max_pool), penalty(lambda t: F.max_pool2d(t, 3, 2, 1)), strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


def test_max_pool_batched_gradients(device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 6, generator=g).to(device).requires_grad_()
    y = max_pool(x)
    same_under_vmaps(x, y, torch.randn(2, *y.shape, generator=g).to(device))


def test_max_pool_launches_on_device_of_input(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    record = lambda x: devices.append(x.device) or launcher.on_device_of(x)  # noqa: E731
    monkeypatch.setattr(max_pool_module, "on_device_of", record)
    x = torch.randn(1, 2, 4, 4).to(device).requires_grad_()
    max_pool(x).sum().backward()
    assert devices == [x.device] * 2


def test_stem_pool_falls_back_under_transforms_and_other_dtypes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = last(torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))).to(device)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    taken: list[torch.dtype] = []
    monkeypatch.setattr(max_pool_module, "max_pool", lambda x: taken.append(x.dtype) or F.max_pool2d(x, 3, 2, 1))
    stem = StemPool()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):  # in float32 a kernel would lose half of float64
        stem(x.to(dtype))
    assert taken == [torch.float32, torch.bfloat16]
    torch.func.vmap(stem)(torch.stack([x, x]))
    torch.func.jvp(stem, (x,), (torch.ones_like(x),))
    torch.export.export(stem, (x,))
    assert len(taken) == 2


def test_stem_pool_matches_torch_in_any_layout(device: torch.device) -> None:
    x = torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(0)).to(device)
    for images in (x, x.to(memory_format=torch.channels_last)):
        assert torch.equal(StemPool()(images), F.max_pool2d(x, 3, 2, 1))
