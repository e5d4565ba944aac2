"""Checks whether Triton kernels can run. Importing this package does not require Triton."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

__all__ = ["COMPILER", "INSTALLED", "INTERPRETED", "TYPES", "usable"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of inputs; the kernels compute in float32

# Read once, because Triton also reads its mode at import. A C compiler builds its launcher at the first launch.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = find_spec("triton") is not None
COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def usable(device: torch.device) -> bool:
    """Whether a kernel can be launched on this device."""
    if INTERPRETED:
        return INSTALLED
    return INSTALLED and COMPILER and device.type == "cuda"
