"""How numbers are made on a device: precision, and the same bits every time."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from contnorm.bench.config.schema import TrainConfig

__all__ = ["cpu_instructions", "device_name", "numerics"]


def device_name(device: torch.device) -> str:
    """What the machine calls it; numbers, and times even more, depend on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def cpu_instructions() -> str:
    """Instruction set that torch uses on this CPU, such as AVX2 or AVX512: the order of its sums depends on it."""
    return torch.backends.cpu.get_cpu_capability()


@contextmanager
def numerics(config: TrainConfig, threads: int = 1) -> Iterator[None]:
    """Set torch to a run's precision and determinism; everything is as it was afterwards.

    How many threads share a sum changes its order, so a run on a CPU has a number of its own: one, where nothing else
    is asked for. Other runs beside it, in their own processes, then change nothing in it.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    old = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    had_threads, was_deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    fresh: Any = torch.utils.deterministic
    was_filled = fresh.fill_uninitialized_memory
    try:
        torch.set_num_threads(threads)
        matmul.allow_tf32 = cudnn.allow_tf32 = config.precision != "fp32"
        cudnn.deterministic, cudnn.benchmark = config.deterministic, False
        # As torch.use_deterministic_algorithms, which also brings torch's compiler: seconds at the start of every run.
        torch.set_deterministic_debug_mode("error" if config.deterministic else "default")
        # Deterministic mode would fill every fresh tensor before use: half of all kernels of a step, to no effect.
        fresh.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_num_threads(had_threads)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = old
        torch.set_deterministic_debug_mode(was_deterministic)
        fresh.fill_uninitialized_memory = was_filled
