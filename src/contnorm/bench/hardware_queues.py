"""Hardware queues of a GPU, which CUDA streams share if there are more streams than queues."""

from __future__ import annotations

import os

__all__ = ["request_hardware_queues"]

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
QUEUES = 32  # the most that a GPU has; the driver uses 8 of them unless it is told otherwise


def request_hardware_queues() -> None:
    """Let the CUDA driver use all hardware queues, unless the environment variable has a value already.

    Runs in a CUDA graph have one or two streams each, and kernels of streams that share a queue wait for each other.
    The driver reads the variable when it is initialized; afterwards this has no effect in this process.

    Example:
        >>> request_hardware_queues()
        >>> int(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) > 0
        True
    """
    os.environ.setdefault(VARIABLE, str(QUEUES))
