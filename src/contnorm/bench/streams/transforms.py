"""Batched transforms of items to input tensors: gather, permute or augment, and normalize, on the device.

Crop offsets and flips come from the plan; nothing in this module is random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contnorm.bench.streams.image_store import DeviceImages, SplitImages
from contnorm.bench.streams.tasks import Items, TaskSequence

__all__ = ["DeviceStream", "crop_and_flip"]


class DeviceStream:
    """Images, labels and tasks of a stream on a device.

    Args:
        stream: Stream of tasks.
        device: Device.
        pictures: Images of its data set on that device, shared with other streams; None to load them.
    """

    def __init__(self, stream: TaskSequence, device: torch.device, pictures: DeviceImages | None = None) -> None:
        self.sequence, self.device = stream, device
        self.pictures = pictures or DeviceImages.of(stream.source, device)
        self.train, self.test = _item_tensors(stream.train, device), _item_tensors(stream.test, device)
        self.permutations = None if stream.permutations is None else torch.from_numpy(stream.permutations).to(device)
        self.competing = torch.from_numpy(stream.competing).to(device)
        self._mean, self._std = (
            None if v is None else torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (stream.mean, stream.std)
        )
        self._scaled = stream.source.train_images.dtype == np.uint8  # other values are used as they are

    def train_x(self, items: Tensor, views: Tensor | None = None) -> Tensor:
        """Return the inputs (B, C, H, W) of training items, in float32."""
        return self._inputs(self.pictures.train, self.train.image[items], self.train.task[items], views)

    def test_x(self, items: Tensor) -> Tensor:
        """Return the inputs (B, C, H, W) of test items, in float32."""
        images = self.pictures.train if self.sequence.held_out else self.pictures.test
        return self._inputs(images, self.test.image[items], self.test.task[items], None)

    def _inputs(self, gallery: SplitImages, image: Tensor, task: Tensor, views: Tensor | None) -> Tensor:
        if gallery.whole:
            return self.seen(gallery.pixels, image, task, views)
        return self.seen(gallery[image], torch.arange(len(image), device=self.device), task, views)

    def seen(self, pixels: Tensor, image: Tensor, task: Tensor, views: Tensor | None = None) -> Tensor:
        """Return network inputs of the selected images: permuted by task or augmented, and normalized."""
        x = pixels[image]
        if self.permutations is not None:
            x = x.flatten(1).gather(1, self.permutations[task]).view(x.shape)
        if views is not None:
            x = crop_and_flip(x, views, self.sequence.padding or 0)
        if x.is_cuda and x.dim() == 4:  # the layout that is fast on tensor cores
            x = x.contiguous(memory_format=torch.channels_last)
        return self._normalize(x)

    def _normalize(self, x: Tensor) -> Tensor:
        scaled = x.float() / 255 if self._scaled else x.float()
        return scaled if self._mean is None or self._std is None else (scaled - self._mean) / self._std


@dataclass(frozen=True)
class _ItemTensors:
    """Image index, label and task of each item, on a device."""

    image: Tensor
    label: Tensor
    task: Tensor


def _item_tensors(items: Items, device: torch.device) -> _ItemTensors:
    return _ItemTensors(*(torch.from_numpy(part.copy()).to(device) for part in (items.image, items.label, items.task)))


def crop_and_flip(x: Tensor, views: Tensor, padding: int) -> Tensor:
    """Pad images with zeros, crop them to their original size, and flip some of them horizontally; vectorized.

    Args:
        x: (B, C, H, W).
        views: (B, 3): vertical and horizontal offset, from 0 to ``2 * padding``, and 1 to flip horizontally.
        padding: Number of zeros on each side.

    Example:
        >>> x = torch.arange(4.0).view(1, 1, 2, 2)
        >>> crop_and_flip(x, torch.tensor([[1, 1, 1]]), padding=1)  # offset 1 is no shift; flipped
        tensor([[[[1., 0.],
                  [3., 2.]]]])
        >>> crop_and_flip(x, torch.tensor([[0, 1, 0]]), padding=1)  # one row down
        tensor([[[[0., 0.],
                  [0., 1.]]]])
    """
    batch, _, height, width = x.shape
    padded = torch.nn.functional.pad(x, (padding,) * 4)
    rows = torch.arange(height, device=x.device)[None] + views[:, :1]
    columns = torch.arange(width, device=x.device)[None].expand(batch, -1)
    columns = torch.where(views[:, 2:] == 1, width - 1 - columns, columns) + views[:, 1:2]
    sample = torch.arange(batch, device=x.device)[:, None, None]
    return padded.movedim(1, -1)[sample, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
