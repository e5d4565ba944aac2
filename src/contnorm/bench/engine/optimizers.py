"""Optimizers, and their state as named tensors for checkpoints.

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
    """Stochastic gradient descent without momentum or weight decay.

    The results are bit-identical to `torch.optim.SGD`. Constructing that one imports torch's compiler, which takes
    seconds at the start of every run.

    Args:
        parameters: The parameters to update.
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
        self.state: dict[nn.Parameter, dict[str, Any]] = {}  # always empty: there is no momentum

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient; on CUDA in one kernel."""
        updates = [(parameter, parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        if updates:
            torch._foreach_add_([parameter for parameter, _ in updates], [grad for _, grad in updates], alpha=-self.lr)


Optimizer = PlainSGD | torch.optim.Optimizer


def build_optimizer(config: TrainConfig, model: nn.Module, device: torch.device) -> Optimizer:
    """Build the optimizer of a run, with torch's defaults except for the learning rate.

    Example:
        >>> type(build_optimizer(TrainConfig(optimizer="adam"), nn.Linear(2, 2), torch.device("cpu"))).__name__
        'Adam'
    """
    on_gpu = device.type == "cuda"
    if config.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=config.lr, fused=on_gpu, capturable=on_gpu)
    return PlainSGD(model.parameters(), config.lr)


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the state tensors of an optimizer by name; empty before its first step, or if it has no state.

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
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    named = {f"{name}/{key}": value for name, values in states.items() for key, value in values.items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def load_optimizer_state(optimizer: Optimizer, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the state tensors of `optimizer_state` into an optimizer of the same model.

    State of the shape of its parameter gets the memory layout of the parameter, which fused kernels require. Step
    counts go to the device if the optimizer is capturable, and to the CPU otherwise.
    """
    if isinstance(optimizer, PlainSGD):
        return
    parameters = dict(model.named_parameters())
    on_device = any(group.get("capturable") for group in optimizer.param_groups)
    for name, value in state.items():
        parameter_name, _, key = name.rpartition("/")
        parameter = parameters[parameter_name]
        if value.shape == parameter.shape and key != "step":
            value = torch.empty_like(parameter, requires_grad=False).copy_(value)
        else:
            value = value.to(parameter.device if on_device else "cpu", copy=True)
        optimizer.state[parameter][key] = value
