"""Input of the comparisons with numbers that public implementations computed."""

import torch
from torch import Tensor


def wave(shape: tuple[int, ...], shift: float) -> Tensor:
    """Values that any program can compute, with a first sample that differs from the others in mean and variance."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    x = (torch.sin(i * 1.7 + shift) * 2 + torch.cos(i * i * 0.01)).reshape(shape)
    x[0] = x[0] * 3 + 4
    return x
