"""Where the images of a data set are kept, and how a step reaches them: whole on the device, or brought as needed.

On a CPU the images stay in their mapped file. A GPU takes them whole where they fit. Where they don't, they stay on
the host, and a `Window` brings those of the coming steps through pinned memory while the present ones run: the plan
knows them ahead. Either way a step finds its images by index in one tensor of fixed address, so a captured step need
not know which it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contnorm.bench.data.formats import Images
from contnorm.bench.data.registry import Source
from contnorm.bench.streams.copy_stream import copying_stream

__all__ = ["Feed", "Gallery", "Pictures", "Window"]

Indices = NDArray[np.int64]
SHARE = 0.5  # of a GPU's free memory that images may take; the rest is for networks
WINDOW_BYTES = 128 * 2**20  # of images on the device at a time, where they are brought as needed


class Gallery:
    """The images of one split.

    Args:
        images: As uint8, mapped or in memory.
        device: Where they are looked at.
        whole: Whether they are kept there; else they stay on the host.
    """

    def __init__(self, images: Images, device: torch.device, whole: bool) -> None:
        self.device, self.whole = device, whole
        self.pixels = torch.from_numpy(images if images.flags.writeable else images.copy())
        if whole:
            self.pixels = self.pixels.to(device)

    def __getitem__(self, images: Tensor) -> Tensor:
        """(B, C, H, W) of an index tensor on the device."""
        if self.whole:
            return self.pixels[images]
        chosen = self.pixels.index_select(0, images.cpu())
        return _pinned(chosen, self.device).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Pictures:
    """Both splits of a data set, shared by all that look at it."""

    train: Gallery
    test: Gallery

    @classmethod
    def of(cls, source: Source, device: torch.device, whole: bool | None = None) -> Pictures:
        """Keep a data set on a device, whole where it fits or where that is asked for."""
        splits = source.train_images, source.test_images
        if whole is None:
            whole = device.type == "cpu" or sum(s.nbytes for s in splits) < SHARE * torch.cuda.mem_get_info(device)[0]
        return cls(*(Gallery(images, device, whole) for images in splits))


class Feed:
    """Images of steps from a gallery that is whole on the device: an image's place is its number."""

    def __init__(self, gallery: Gallery) -> None:
        self.pixels = gallery.pixels

    def reach(self, start: int, end: int) -> int:
        """How far from ``start`` the images can be at hand at once."""
        return end

    def places(self, steps: Sequence[Indices], start: int) -> list[Indices]:
        """Where the images of each step are in ``pixels``, for steps from number ``start`` on."""
        return list(steps)

    def close(self) -> None:
        """No more steps will come."""


class Window(Feed):
    """Images of steps from a gallery on the host: the coming ones are brought while the present ones are looked at.

    The device holds two halves; a stretch of steps is in one of them while the next is on its way to the other.

    Args:
        gallery: The images.
        plan: The images of every step of a run.
        size: Bytes to use on the device; None for `WINDOW_BYTES`.
    """

    def __init__(self, gallery: Gallery, plan: Sequence[Indices], size: int | None = None) -> None:
        self.host, self.device, self.plan = gallery.pixels, gallery.device, plan
        largest = max((len(images) for images in plan), default=1)
        image_bytes = self.host[0].numel()
        self.steps = max(1, (WINDOW_BYTES if size is None else size) // 2 // (largest * image_bytes))
        self.half = self.steps * largest
        self.pixels = torch.empty((2 * self.half, *self.host.shape[1:]), dtype=torch.uint8, device=self.device)
        self._stage = _pinned(torch.empty_like(self.pixels, device="cpu"), self.device)
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._coming: tuple[tuple[int, int], int, Future[None]] | None = None
        self._in_use = 1

    def reach(self, start: int, end: int) -> int:
        return min(end, start + self.steps)

    def places(self, steps: Sequence[Indices], start: int) -> list[Indices]:
        end = start + len(steps)
        side = self._arrived(start, end)
        self._in_use = side
        self._send_for(end, self.reach(end, len(self.plan)), 1 - side)
        ends = np.cumsum([len(images) for images in steps]) + side * self.half
        return [np.arange(stop - len(images), stop) for images, stop in zip(steps, ends, strict=True)]

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _arrived(self, start: int, end: int) -> int:
        """The half that holds these steps; brings them now where others had been sent for."""
        if self._coming is not None:
            span, side, arrival = self._coming
            arrival.result()
            if span[0] == start and span[1] >= end:
                return side
        side = 1 - self._in_use
        self._bring(start, end, side)
        return side

    def _send_for(self, start: int, end: int, side: int) -> None:
        if start >= end:
            self._coming = None
            return
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # who looked at that half has finished
        self._coming = (start, end), side, self._worker.submit(self._bring, start, end, side)

    def _bring(self, start: int, end: int, side: int) -> None:
        wanted = torch.from_numpy(np.concatenate(self.plan[start:end]))
        span = slice(side * self.half, side * self.half + len(wanted))
        torch.index_select(self.host, 0, wanted, out=self._stage[span])
        if self.device.type == "cuda":
            with torch.cuda.stream(copying_stream(self.device)):
                self.pixels[span].copy_(self._stage[span], non_blocking=True)
                torch.cuda.current_stream().synchronize()
        else:
            self.pixels[span].copy_(self._stage[span])


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    """Page-locked, where that makes copies to the device faster."""
    return x.pin_memory() if device.type == "cuda" else x
