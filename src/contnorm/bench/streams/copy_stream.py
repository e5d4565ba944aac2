"""The CUDA stream on which data is copied beside a run's own work."""

from __future__ import annotations

import torch

__all__ = ["copying_stream"]


def copying_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that no lane ever has.

    Torch hands out streams of one priority in turn, thirty-two of them: a thirty-third is the first again. A copy on
    a stream that a graph is being captured from would spoil the capture. Lanes have the usual priority, copies another.
    """
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
