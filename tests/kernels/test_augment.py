"""Image augmentation kernel, in Triton's interpreter or on a GPU: bit-exact with torch's operators."""

from __future__ import annotations

import pytest
import torch

from contnorm.bench.streams.transforms import crop_and_flip
from contnorm.kernels.triton import augment as augment_module
from contnorm.kernels.triton import launcher
from contnorm.kernels.triton.augment import augmented
from contnorm.kernels.triton.availability import can_launch


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> None:
    if not can_launch(device):
        pytest.skip("Triton can't run here")


def images(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (9, 3, 8, 6), dtype=torch.uint8, generator=g)
    return pixels.to(device), torch.tensor([3, 3, 8, 0], device=device), torch.rand(3, 256, generator=g).to(device)


def scaled(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return torch.stack([levels[c][x[:, c].long()] for c in range(3)], 1)


def test_crop_and_flip_match_torch(device: torch.device) -> None:
    pixels, image, levels = images(device)
    views = torch.tensor([[0, 8, 1], [4, 4, 0], [8, 1, 1], [3, 0, 0]], device=device)
    out = augmented(pixels, image, levels, views=views, padding=4)
    assert torch.equal(out, scaled(crop_and_flip(pixels[image], views, 4), levels))
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_pixel_permutation_by_task(device: torch.device) -> None:
    pixels, image, levels = images(device)
    g = torch.Generator().manual_seed(1)
    orders = torch.stack([torch.randperm(144, generator=g) for _ in range(3)]).to(device)
    task = torch.tensor([0, 2, 1, 2], device=device)
    shuffled = pixels[image].flatten(1).gather(1, orders[task]).view(4, 3, 8, 6)
    assert torch.equal(augmented(pixels, image, levels, task=task, orders=orders), scaled(shuffled, levels))


def test_images_without_augmentation(device: torch.device) -> None:
    pixels, image, levels = images(device)
    assert torch.equal(augmented(pixels, image, levels), scaled(pixels[image], levels))


def test_augmented_launches_on_device_of_pixels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = []
    monkeypatch.setattr(augment_module, "on_device_of", lambda x: devices.append(x.device) or launcher.on_device_of(x))
    pixels, image, levels = images(device)
    augmented(pixels, image, levels)
    assert devices == [pixels.device]
