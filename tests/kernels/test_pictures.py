"""The bench's own kernels, in Triton's interpreter or on a GPU: to the bit what torch's operators give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from contnorm.bench.streams.transforms import crop_and_flip
from contnorm.kernels.triton import augment as picture_views
from contnorm.kernels.triton import launcher as launching
from contnorm.kernels.triton import max_pool as pooling
from contnorm.kernels.triton.augment import viewed
from contnorm.kernels.triton.availability import usable
from contnorm.kernels.triton.max_pool import StemPool, max_pool
from tests.kernels.exactness import last, same_under_vmaps


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> None:
    if not usable(device):
        pytest.skip("Triton can't run here")


def pictures(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (9, 3, 8, 6), dtype=torch.uint8, generator=g)
    return pixels.to(device), torch.tensor([3, 3, 8, 0], device=device), torch.rand(3, 256, generator=g).to(device)


def scaled(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return torch.stack([levels[c][x[:, c].long()] for c in range(3)], 1)


def test_crops_flips_and_zeros_around(device: torch.device) -> None:
    pixels, image, levels = pictures(device)
    views = torch.tensor([[0, 8, 1], [4, 4, 0], [8, 1, 1], [3, 0, 0]], device=device)
    out = viewed(pixels, image, levels, views=views, padding=4)
    assert torch.equal(out, scaled(crop_and_flip(pixels[image], views, 4), levels))
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_pixels_in_the_order_of_their_task(device: torch.device) -> None:
    pixels, image, levels = pictures(device)
    g = torch.Generator().manual_seed(1)
    orders = torch.stack([torch.randperm(144, generator=g) for _ in range(3)]).to(device)
    task = torch.tensor([0, 2, 1, 2], device=device)
    shuffled = pixels[image].flatten(1).gather(1, orders[task]).view(4, 3, 8, 6)
    assert torch.equal(viewed(pixels, image, levels, task=task, orders=orders), scaled(shuffled, levels))


def test_pictures_as_they_are(device: torch.device) -> None:
    pixels, image, levels = pictures(device)
    assert torch.equal(viewed(pixels, image, levels), scaled(pixels[image], levels))


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 5, 7, 9), (3, 4, 1, 1), (2, 2, 6, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_max_pooling_and_its_gradient(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Rounded values, so that windows have several largest; and one that is not a number."""
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
def test_max_pooling_can_be_differentiated_twice(shape: tuple[int, ...], device: torch.device) -> None:
    """As the penalty on a gradient does: it is linear in the gradient above it, which has one of its own."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g).to(device)

    def penalty(pool: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(pool(leaf).pow(3).sum(), leaf, create_graph=True)
        return slope, *torch.autograd.grad(slope.square().sum(), leaf)

    for ours, stock in zip(penalty(max_pool), penalty(lambda t: F.max_pool2d(t, 3, 2, 1)), strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


def test_several_gradients_of_max_pooling_at_once(device: torch.device) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 6, generator=g).to(device).requires_grad_()
    y = max_pool(x)
    same_under_vmaps(x, y, torch.randn(2, *y.shape, generator=g).to(device))


def test_the_kernels_are_launched_on_the_device_of_what_they_read(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for module in (pooling, picture_views):
        monkeypatch.setattr(module, "here", lambda x: asked.append(x.device) or launching.here(x))
    x = torch.randn(1, 2, 4, 4).to(device).requires_grad_()
    max_pool(x).sum().backward()
    pixels, image, levels = pictures(device)
    viewed(pixels, image, levels)
    assert asked == [pixels.device] * 3


def test_the_stem_steps_back_from_what_looks_inside_and_from_other_types(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = last(torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))).to(device)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    taken: list[torch.dtype] = []
    monkeypatch.setattr(pooling, "max_pool", lambda x: taken.append(x.dtype) or F.max_pool2d(x, 3, 2, 1))
    stem = StemPool()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):  # in float32 a kernel would lose half of float64
        stem(x.to(dtype))
    assert taken == [torch.float32, torch.bfloat16]
    torch.func.vmap(stem)(torch.stack([x, x]))
    torch.func.jvp(stem, (x,), (torch.ones_like(x),))
    torch.export.export(stem, (x,))
    assert len(taken) == 2


def test_the_stem_pools_as_torch_does_in_any_layout(device: torch.device) -> None:
    x = torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(0)).to(device)
    for given in (x, x.to(memory_format=torch.channels_last)):
        assert torch.equal(StemPool()(given), F.max_pool2d(x, 3, 2, 1))
