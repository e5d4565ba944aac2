"""Whether Triton's kernels can run here; it is not needed to import anything of ours."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

__all__ = ["COMPILER", "INSTALLED", "INTERPRETED", "TYPES", "usable"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs: our kernels reckon in float32

# Read once: Triton, too, takes its mode at import. Its launcher is built by a C compiler at the first launch.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = find_spec("triton") is not None
COMPILER = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


def usable(device: torch.device) -> bool:
    """Whether a kernel can be launched on this device."""
    if INTERPRETED:
        return INSTALLED
    return INSTALLED and COMPILER and device.type == "cuda"
