"""Copies of a network's weights in bfloat16. One kernel casts all weights, and one casts all gradients back.

Autocast casts every weight separately in every forward pass, and every gradient back: about fifty small kernels a step.
The two kernels here give the same values. Autocast still casts everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from contnorm.kernels.side_stream import Convolution

__all__ = ["Bf16Weights"]

CAST = (nn.Conv2d, Convolution, nn.Linear)  # layers whose weights and biases autocast casts


class Bf16Weights:
    """A network that computes with bfloat16 copies of its weights.

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

    def bring_gradients(self) -> None:
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
