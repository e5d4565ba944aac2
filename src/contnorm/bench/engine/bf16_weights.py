"""The weights of a network in bfloat16, all cast in one go, and their gradients brought back in one go.

Autocast casts every weight by itself in every forward pass, and every gradient back: some fifty small kernels a step.
Here the same numbers come from two kernels. Autocast still sees to everything else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from contnorm.kernels.side_stream import Convolution

__all__ = ["HalfWeights"]

CAST = (nn.Conv2d, Convolution, nn.Linear)  # whose weights and biases autocast casts


class HalfWeights:
    """A network that looks at bfloat16 copies of its weights.

    Args:
        model: The network; its parameters stay in float32, and their gradients come to be there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        found = {
            f"{place}.{name}": parameter
            for place, module in model.named_modules()
            if type(module) in CAST
            for name, parameter in module.named_parameters(recurse=False)
        }
        self.names, self.weights = list(found), list(found.values())
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16).detach() for weight in self.weights]
        self.passes: list[list[Tensor]] = []  # what each forward pass looked at; gradients come to be there

    def refresh(self) -> None:
        """Copy the weights as they are now; forget past passes."""
        self.passes.clear()
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.weights)

    def __call__(self, x: Tensor) -> Tensor:
        """A forward pass. Each has leaves of its own, so that gradients of several are summed in float32."""
        leaves = [copy.detach().requires_grad_() for copy in self.copies]
        self.passes.append(leaves)
        y: Tensor = functional_call(self.model, dict(zip(self.names, leaves, strict=True)), (x,))
        return y

    def bring_gradients(self) -> None:
        """Sum the gradients of all passes into those of the weights, the last pass first, as autograd does."""
        for leaves in reversed(self.passes):
            arrived = [(weight, leaf.grad) for weight, leaf in zip(self.weights, leaves, strict=True)]
            _add([(weight, grad) for weight, grad in arrived if grad is not None])
        self.passes.clear()


def _add(arrived: list[tuple[nn.Parameter, Tensor]]) -> None:
    wide = [torch.empty_like(weight) for weight, _ in arrived]
    torch._foreach_copy_(wide, [grad for _, grad in arrived])
    for (weight, _), grad in zip(arrived, wide, strict=True):
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
