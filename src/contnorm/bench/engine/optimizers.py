"""Optimizers of a run, and their state as named tensors: what must survive a restart beside the model's own.

On CUDA they update all parameters in one kernel and count their steps on the device, so that a step can be captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from contnorm.bench.config.schema import TrainConfig

__all__ = ["Optimizer", "PlainSGD", "build_optimizer", "load_optimizer_state", "optimizer_state"]


class PlainSGD:
    """Gradient descent and nothing else: each parameter less its gradient times the learning rate.

    The bits are those of `torch.optim.SGD`. That one brings torch's compiler with it when the first is made: seconds at
    the start of every run, for one line of arithmetic.

    Args:
        parameters: What to update.
        lr: The learning rate.

    Example:
        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> (3 * weight).backward()
        >>> PlainSGD([weight], lr=0.1).step()
        >>> weight.item()
        0.699999988079071
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.state: dict[nn.Parameter, dict[str, Any]] = {}  # it remembers nothing

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update what has a gradient, on CUDA in one kernel."""
        moved = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_add_([parameter for parameter, _ in moved], [grad for _, grad in moved], alpha=-self.lr)


Optimizer = PlainSGD | torch.optim.Optimizer


def build_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """The optimizer a run asks for, as torch has it by default but for the learning rate.

    Example:
        >>> type(build_optimizer(TrainConfig(optimizer="adam"), nn.Linear(2, 2), torch.device("cpu"))).__name__
        'Adam'
    """
    on_gpu = device.type == "cuda"
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=config.lr, fused=on_gpu, capturable=on_gpu)
    return PlainSGD(model.parameters(), config.lr)


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What an optimizer remembers of each parameter; nothing before its first step, or where it remembers nothing.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> optimizer_state(optimizer, model)
        {}
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer_state(optimizer, model))[:3]
        ['bias/exp_avg', 'bias/exp_avg_sq', 'bias/step']
    """
    kept = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    named = {f"{name}/{key}": value for name, values in kept.items() for key, value in values.items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give an optimizer what another one remembered of the same model.

    What is remembered value for value lies in memory as its parameter does, which one kernel for all needs; a count of
    steps is kept where it is counted.
    """
    if isinstance(optimizer, PlainSGD):
        return
    parameters = dict(model.named_parameters())
    on_device = any(group.get("capturable") for group in optimizer.param_groups)
    for name, value in state.items():
        of, _, key = name.rpartition("/")
        parameter = parameters[of]
        if value.shape == parameter.shape and key != "step":
            value = torch.empty_like(parameter, requires_grad=False).copy_(value)
        else:
            value = value.to(parameter.device if on_device else "cpu", copy=True)
        optimizer.state[parameter][key] = value
