"""CUDA streams of training, of weight gradients beside it, and of copies.

PyTorch has a pool of 32 streams per priority and assigns them round-robin: the 33rd request returns the first one
again. A copy on a stream from which a CUDA graph is being captured would invalidate the capture. A weight gradient on
the stream that PyTorch captures from, which has the default priority, would delay the others. So each use has a
priority of its own, if the GPU has as many.
"""

from __future__ import annotations

import torch

__all__ = ["copying_stream", "has_side_streams", "side_stream", "training_stream"]

# Smaller numbers come first. Weight gradients take what the rest of a step leaves free.
SIDE, TRAINING, COPYING = -1, -2, -3


def training_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream for the steps of a trainer."""
    return _stream(device, TRAINING if has_side_streams() else 0)


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream for weight gradients, with a lower priority than the stream of training."""
    return _stream(device, SIDE)


def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream for copies, which no trainer uses."""
    return _stream(device, COPYING if has_side_streams() else -1)


def has_side_streams() -> bool:
    """Whether the GPU has enough priorities for side streams."""
    _, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static; the stub is wrong
    return int(greatest) <= COPYING


def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
