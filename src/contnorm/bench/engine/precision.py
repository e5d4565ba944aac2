"""Precision and determinism of a run."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from contnorm.bench.components import is_user_code
from contnorm.bench.config.schema import RunConfig, TrainConfig
from contnorm.kernels import VARIABLE as KERNEL_VARIABLE
from contnorm.kernels.cpp.library import unavailable_reason

__all__ = ["cn_kernel", "cpu_instructions", "device_name", "numerics"]


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or CPU. Results depend on it slightly, times strongly."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def cpu_instructions() -> str:
    """Return the instruction set that torch uses on this CPU, such as AVX2; the order of sums depends on it."""
    return torch.backends.cpu.get_cpu_capability()


def cn_kernel(config: RunConfig) -> str | None:
    """Return the kernel of continual normalization on a CPU: ``cpp``, or ``torch`` if it can't be compiled here.

    The bits of a run depend on it. A kernel that the settings or ``CONTNORM_KERNEL`` name is returned as it is. None if
    the run can't have such layers; a norm or network of the user may have them.
    """
    own_code = is_user_code(config.norm.name) or is_user_code(config.model.name)
    if not own_code and (config.norm.name != "cn" or config.norm.layers != "ours"):
        return None
    named = dict(config.norm.options).get("kernel") or os.environ.get(KERNEL_VARIABLE) or "auto"
    if named != "auto":
        return str(named)
    return "cpp" if unavailable_reason() is None else "torch"


@contextmanager
def numerics(config: TrainConfig, threads: int = 1) -> Iterator[None]:
    """Set the precision and determinism of torch for a run; all settings are restored afterwards.

    The number of threads determines the order of sums, so it is fixed for each run on a CPU. The results then do not
    depend on other runs that are executed at the same time in other processes. All of this is global in a process, so
    runs of several Python threads take turns.

    Args:
        config: The training settings.
        threads: CPU threads of the run.
    """
    with _one_thread_at_a_time, _global_numerics(config, threads):
        yield


_one_thread_at_a_time = threading.RLock()


@contextmanager
def _global_numerics(config: TrainConfig, threads: int) -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    old = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    old_threads, old_deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    deterministic: Any = torch.utils.deterministic
    old_fill = deterministic.fill_uninitialized_memory
    try:
        torch.set_num_threads(threads)
        matmul.allow_tf32 = cudnn.allow_tf32 = config.precision != "fp32"
        cudnn.deterministic, cudnn.benchmark = config.deterministic, False
        # Not torch.use_deterministic_algorithms: it also imports torch's compiler, which takes seconds in every run.
        torch.set_deterministic_debug_mode("error" if config.deterministic else "default")
        # Deterministic mode fills every new tensor before use: half of all kernels of a step, without any effect.
        deterministic.fill_uninitialized_memory = False
        yield
    finally:
        torch.set_num_threads(old_threads)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = old
        torch.set_deterministic_debug_mode(old_deterministic)
        deterministic.fill_uninitialized_memory = old_fill
