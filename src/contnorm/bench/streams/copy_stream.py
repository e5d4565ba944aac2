"""The CUDA stream that copies data to the device while a run computes."""

from __future__ import annotations

import torch

__all__ = ["copying_stream"]


def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a CUDA stream that no trainer uses.

    PyTorch has a pool of 32 streams per priority and assigns them round-robin: the 33rd request returns the first one
    again. A copy on a stream from which a CUDA graph is being captured would invalidate the capture. Trainers use the
    default priority, and copies use another one.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
