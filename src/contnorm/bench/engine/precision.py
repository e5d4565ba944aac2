"""Precision and determinism of a run, and bfloat16 copies of the weights."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from contnorm.bench.config.schema import RunConfig, TrainConfig
from contnorm.bench.user_code import is_user_code
from contnorm.kernels import VARIABLE as KERNEL_VARIABLE
from contnorm.kernels.cpp.library import unavailable_reason
from contnorm.kernels.side_stream import Convolution
from contnorm.kernels.triton.weight_update import can_update, update_weight

__all__ = ["Bf16Weights", "cn_kernel", "cpu_instructions", "device_name", "numerics"]


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


CAST = (nn.Conv2d, Convolution, nn.Linear)  # layers whose weights and biases autocast casts


class Bf16Weights:
    """A network that computes with bfloat16 copies of its weights.

    Autocast casts every weight separately in every forward pass, and every gradient back: about fifty small kernels a
    step. Here one kernel casts all weights, and one casts all gradients back, with the same values. Autocast still
    casts everything else.

    Args:
        model: The network. Its parameters and their gradients stay in float32.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        cast = {
            f"{path}.{name}": parameter
            for path, module in model.named_modules()
            if type(module) in CAST
            for name, parameter in module.named_parameters(recurse=False)
        }
        self.names, self.weights = list(cast), list(cast.values())
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16).detach() for weight in self.weights]
        self.passes: list[list[Tensor]] = []  # the copies that each forward pass used, which receive its gradients

    def refresh(self) -> None:
        """Update the copies from the weights, and discard the previous passes."""
        self.passes.clear()
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.weights)

    def __call__(self, x: Tensor) -> Tensor:
        """Do a forward pass. Each pass has its own leaf tensors, so that gradients of several are summed in float32."""
        leaves = [copy.detach().requires_grad_() for copy in self.copies]
        self.passes.append(leaves)
        y: Tensor = functional_call(self.model, dict(zip(self.names, leaves, strict=True)), (x,))
        return y

    @torch.no_grad()
    def update(self, lr: float) -> bool:
        """Do the step of `PlainSGD` for all weights, if a kernel can, and discard the passes; returns whether it did.

        The result is that of `add_gradients` and the optimizer's step, which read and write 18 bytes for each weight
        after one pass, and 54 after three; this method 10 and 14.
        """
        of_weights = [
            (weight, [grad for leaves in reversed(self.passes) if (grad := leaves[number].grad) is not None])
            for number, weight in enumerate(self.weights)
        ]
        used = [(weight, grads) for weight, grads in of_weights if grads]
        if not all(weight.grad is None and can_update(weight, grads) for weight, grads in used):
            return False
        for weight, grads in used:
            update_weight(weight, grads, -lr)
        torch.autograd.graph.increment_version([weight for weight, _ in used])
        self.passes.clear()
        return True

    def add_gradients(self) -> None:
        """Add the gradients of all passes to those of the weights; the last pass first, as autograd does."""
        for leaves in reversed(self.passes):
            pairs = [(weight, leaf.grad) for weight, leaf in zip(self.weights, leaves, strict=True)]
            _add([(weight, grad) for weight, grad in pairs if grad is not None])
        self.passes.clear()


def _add(pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Add bfloat16 gradients to the float32 gradients of their weights."""
    gradients = [torch.empty_like(weight) for weight, _ in pairs]
    torch._foreach_copy_(gradients, [grad for _, grad in pairs])
    for (weight, _), grad in zip(pairs, gradients, strict=True):
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
