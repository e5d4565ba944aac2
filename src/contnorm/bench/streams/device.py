"""Samples of a stream on a device: storage of the images, and batched transforms to inputs of a network.

On a CPU, images stay in their memory-mapped file. On a GPU, the whole data set is copied to the device if it fits.
Otherwise it stays on the host, and a `PrefetchedFeed` copies the images of the next steps through pinned memory while
the current steps run; the plan lists them in advance. In both cases, a step gathers its images by index from one tensor
at a fixed address. A captured CUDA graph is therefore the same for both.

Crop offsets and flips come from the plan; nothing in this module is random.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from contnorm.bench.data.dataset import Images, Indices, Source
from contnorm.bench.streams.tasks import TaskSequence

SHARE = 0.5  # fraction of a GPU's free memory that images may use; the rest is for networks
WINDOW_BYTES = 128 * 2**20  # device memory for prefetched images


class SplitImages:
    """Images of one split.

    Args:
        images: Images, memory-mapped or in memory.
        device: Device that uses the images.
        whole: Whether all images are stored on the device; otherwise they stay on the host.
    """

    def __init__(self, images: Images, device: torch.device, whole: bool) -> None:
        self.device, self.whole = device, whole
        pixels = torch.from_numpy(images if images.flags.writeable else images.copy())
        # An array such as images[rows, None] has strides from which torch concludes that channels are last, and
        # convolutions then sum in another order: equal arrays must give equal bits.
        self.pixels = pixels.flatten().reshape(pixels.shape)
        if whole:
            self.pixels = self.pixels.to(device)

    def __getitem__(self, images: Tensor) -> Tensor:
        """Return the images (B, C, H, W), on the device, for a tensor of indices."""
        if self.whole:
            return self.pixels[images]
        selected = self.pixels.index_select(0, images.cpu())
        selected = selected.pin_memory() if self.device.type == "cuda" else selected
        return selected.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class DeviceImages:
    """Images of both splits of a data set, which several runs can share."""

    train: SplitImages
    test: SplitImages

    @classmethod
    def of(cls, source: Source, device: torch.device, whole: bool | None = None) -> DeviceImages:
        """Store the images of a data set for a device.

        Args:
            source: Data set.
            device: Device that uses the images.
            whole: Whether to store all images on the device; None to do so if they fit.
        """
        splits = source.train_images, source.test_images
        if whole is None:
            whole = device.type == "cpu" or sum(s.nbytes for s in splits) < SHARE * torch.cuda.mem_get_info(device)[0]
        return cls(*(SplitImages(images, device, whole) for images in splits))


class ImageFeed:
    """Images of steps on the device: the position of an image is its index in the data set."""

    def __init__(self, images: SplitImages) -> None:
        self.pixels = images.pixels

    def reach(self, start: int, end: int) -> int:
        """Return the end of the longest range of steps from ``start`` whose images are available at once."""
        return end

    def places(self, steps: Sequence[Indices], start: int) -> list[Indices]:
        """Return the positions of the images of each step in ``pixels``; ``start`` is the number of the first step."""
        return list(steps)

    def close(self) -> None:
        """Release resources; no more steps follow."""


class PrefetchedFeed(ImageFeed):
    """Images of steps on the host, prefetched into a double buffer on the device.

    One half of the buffer holds the images of the current steps while those of the next steps are copied to the other.

    Args:
        images: Images.
        plan: Indices of the images of every step of a run.
        size: Size of the buffer in bytes; None for `WINDOW_BYTES`.
    """

    def __init__(self, images: SplitImages, plan: Sequence[Indices], size: int | None = None) -> None:
        self.host, self.device, self.plan = images.pixels, images.device, plan
        largest = max((len(images) for images in plan), default=1)
        image_bytes = self.host[0].numel() * self.host.element_size()
        self.steps = max(1, (WINDOW_BYTES if size is None else size) // 2 // (largest * image_bytes))
        self.half_size = self.steps * largest
        self.pixels = torch.empty((2 * self.half_size, *self.host.shape[1:]), dtype=self.host.dtype, device=self.device)
        on_gpu = self.device.type == "cuda"  # pinned memory for faster copies
        self._staging = torch.empty_like(self.pixels, device="cpu", pin_memory=on_gpu)
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._prefetched: tuple[tuple[int, int], int, Future[None]] | None = None
        self._in_use = 1

    def reach(self, start: int, end: int) -> int:
        return min(end, start + self.steps)

    def places(self, steps: Sequence[Indices], start: int) -> list[Indices]:
        end = start + len(steps)
        half_index = self._half_with(start, end)
        self._in_use = half_index
        self._prefetch(end, self.reach(end, len(self.plan)), 1 - half_index)
        ends = np.cumsum([len(images) for images in steps]) + half_index * self.half_size
        return [np.arange(stop - len(images), stop) for images, stop in zip(steps, ends, strict=True)]

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _half_with(self, start: int, end: int) -> int:
        """Return the half that holds these steps; copies them now if other steps were prefetched."""
        if self._prefetched is not None:
            span, half_index, copied = self._prefetched
            copied.result()
            if span[0] == start and span[1] >= end:
                return half_index
        half_index = 1 - self._in_use
        self._copy(start, end, half_index)
        return half_index

    def _prefetch(self, start: int, end: int, half_index: int) -> None:
        if start >= end:
            self._prefetched = None
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # wait for all reads of that half
        self._prefetched = (start, end), half_index, self._worker.submit(self._copy, start, end, half_index)

    def _copy(self, start: int, end: int, half_index: int) -> None:
        indices = torch.from_numpy(np.concatenate(self.plan[start:end]))
        span = slice(half_index * self.half_size, half_index * self.half_size + len(indices))
        torch.index_select(self.host, 0, indices, out=self._staging[span])
        if self.device.type == "cuda":
            # Not of the priority of trainers: torch assigns the streams of a priority round-robin, and a copy on a
            # stream from which a CUDA graph is being captured would invalidate the capture.
            copying = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(copying):
                self.pixels[span].copy_(self._staging[span], non_blocking=True)
                torch.cuda.current_stream().synchronize()
        else:
            self.pixels[span].copy_(self._staging[span])


@dataclass(frozen=True)
class ItemTensors:
    """Image index, label and task of each item, on a device."""

    image: Tensor
    label: Tensor
    task: Tensor


class DeviceStream:
    """Images, labels and tasks of a stream on a device.

    Args:
        stream: Stream of tasks.
        device: Device.
        images: Images of its data set on that device, shared with other streams; None to load them.
    """

    def __init__(self, stream: TaskSequence, device: torch.device, images: DeviceImages | None = None) -> None:
        self.sequence, self.device = stream, device
        self.images = images or DeviceImages.of(stream.source, device)
        self.train, self.test = (
            ItemTensors(*(torch.from_numpy(part.copy()).to(device) for part in (items.image, items.label, items.task)))
            for items in (stream.train, stream.test)
        )
        self.permutations = None if stream.permutations is None else torch.from_numpy(stream.permutations).to(device)
        self.competing = torch.from_numpy(stream.competing).to(device)
        self._mean, self._std = (
            None if v is None else torch.tensor(v, device=device).view(1, -1, 1, 1) for v in (stream.mean, stream.std)
        )
        self._scaled = stream.source.train_images.dtype == np.uint8  # other values are used as they are

    def train_x(self, items: Tensor, views: Tensor | None = None) -> Tensor:
        """Return the inputs (B, C, H, W) of training items, in float32."""
        return self.seen(self.images.train[self.train.image[items]], self.train.task[items], views)

    def test_x(self, items: Tensor) -> Tensor:
        """Return the inputs (B, C, H, W) of test items, in float32."""
        images = self.images.train if self.sequence.held_out else self.images.test
        return self.seen(images[self.test.image[items]], self.test.task[items])

    def seen(self, x: Tensor, task: Tensor, views: Tensor | None = None) -> Tensor:
        """Return network inputs of images: permuted by task or augmented, and normalized."""
        if self.permutations is not None:
            x = x.flatten(1).gather(1, self.permutations[task]).view(x.shape)
        if views is not None:
            x = crop_and_flip(x, views, self.sequence.padding or 0)
        if x.is_cuda and x.dim() == 4:  # the layout that is fast on tensor cores
            x = x.contiguous(memory_format=torch.channels_last)
        scaled = x.float() / 255 if self._scaled else x.float()
        return scaled if self._mean is None or self._std is None else (scaled - self._mean) / self._std


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
