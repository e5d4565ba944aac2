"""Networks whose forward passes have their own leaf tensors for the weights, in float32 or bfloat16.

The gradients of several passes of a step then stay apart until the update, and one kernel per weight adds them and
updates the weight. Autograd would add them with two small kernels per weight, after three passes as in DER++.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from contnorm.kernels.side_stream import Convolution
from contnorm.kernels.triton.weight_update import can_update, update_weight

__all__ = ["Bf16Weights", "PassWeights"]

CAST = (nn.Conv2d, Convolution, nn.Linear)  # layers whose weights and biases autocast casts
SMALL = 2**14  # values of a weight; smaller ones are updated together, by torch

Gradients = tuple[nn.Parameter, list[Tensor]]  # a weight, and its gradients from the last pass to the first


class PassWeights:
    """A network whose forward passes have leaf tensors of their own, which share the memory of its weights.

    Args:
        model: The network.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        parameters = dict(model.named_parameters())
        self.names, self.weights = list(parameters), list(parameters.values())
        self.passes: list[list[Tensor]] = []  # the leaf tensors of each forward pass, which receive its gradients

    def refresh(self) -> None:
        """Discard the previous passes."""
        self.passes.clear()

    def __call__(self, x: Tensor) -> Tensor:
        """Do a forward pass, with its own leaf tensors."""
        leaves = [values.detach().requires_grad_() for values in self._values()]
        self.passes.append(leaves)
        y: Tensor = functional_call(self.model, dict(zip(self.names, leaves, strict=True)), (x,))
        return y

    def _values(self) -> Sequence[Tensor]:
        return self.weights

    @torch.no_grad()
    def update(self, lr: float) -> bool:
        """Do the step of `PlainSGD` for all weights, if a kernel can, and discard the passes; returns whether it did.

        The result is that of `add_gradients` and the optimizer's step. After three passes, these read and write 36
        bytes for each float32 weight (54 with bfloat16 gradients), and this method 20 (14).
        """
        used = self._gradients()
        small = [(weight, grads) for weight, grads in used if _is_small(weight, grads)]
        large = [(weight, grads) for weight, grads in used if not _is_small(weight, grads)]
        if any(weight.grad is not None for weight, _ in used) or not all(can_update(*item) for item in large):
            return False
        for weight, grads in large:
            update_weight(weight, grads, -lr)
        torch.autograd.graph.increment_version([weight for weight, _ in large])
        if small:
            torch._foreach_add_([weight for weight, _ in small], _sums(small), alpha=-lr)
        self.passes.clear()
        return True

    def _gradients(self) -> list[Gradients]:
        """Return the gradients of each weight that has any; the last pass first, as autograd adds them."""
        of_weights = [
            (weight, [grad for leaves in reversed(self.passes) if (grad := leaves[number].grad) is not None])
            for number, weight in enumerate(self.weights)
        ]
        return [(weight, grads) for weight, grads in of_weights if grads]

    def add_gradients(self) -> None:
        """Add the gradients of all passes to those of the weights; the last pass first, as autograd does."""
        for leaves in reversed(self.passes):
            pairs = [(weight, leaf.grad) for weight, leaf in zip(self.weights, leaves, strict=True)]
            _add([(weight, grad) for weight, grad in pairs if grad is not None])
        self.passes.clear()


def _add(pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Add gradients to those of their weights; one kernel casts all that have another dtype."""
    gradients = [grad if grad.dtype == weight.dtype else torch.empty_like(weight) for weight, grad in pairs]
    cast = [(own, grad) for own, (_, grad) in zip(gradients, pairs, strict=True) if own is not grad]
    if cast:
        torch._foreach_copy_([own for own, _ in cast], [grad for _, grad in cast])
    for (weight, _), own in zip(pairs, gradients, strict=True):
        weight.grad = own if weight.grad is None else weight.grad.add_(own)


class Bf16Weights(PassWeights):
    """A network that computes with bfloat16 copies of its weights.

    Autocast casts every weight separately in every forward pass, and every gradient back: about fifty small kernels a
    step. Here one kernel casts all weights, with the same values, and gradients are summed in float32. Autocast still
    casts everything else.

    Args:
        model: The network. Its parameters and their gradients stay in float32.
        all_parameters: Whether the other parameters have leaf tensors in each pass, too; pays with several passes.
    """

    def __init__(self, model: nn.Module, all_parameters: bool = False) -> None:
        super().__init__(model)
        cast = {
            f"{path}.{name}": parameter
            for path, module in model.named_modules()
            if type(module) in CAST
            for name, parameter in module.named_parameters(recurse=False)
        }
        others = dict(zip(self.names, self.weights, strict=True)) if all_parameters else {}
        self.names, self.weights = list(cast | others), list((cast | others).values())
        self.originals = list(cast.values())
        self.copies = [torch.empty_like(weight, dtype=torch.bfloat16).detach() for weight in self.originals]

    def refresh(self) -> None:
        """Update the copies from the weights, and discard the previous passes."""
        super().refresh()
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.originals)

    def _values(self) -> Sequence[Tensor]:
        return [*self.copies, *self.weights[len(self.copies) :]]


def _is_small(weight: Tensor, grads: Sequence[Tensor]) -> bool:
    return weight.numel() < SMALL and all(grad.dtype == weight.dtype for grad in grads)


def _sums(used: Sequence[Gradients]) -> list[Tensor]:
    """Return the sum of the gradients of each weight, computed in place, with one kernel for each pass."""
    for number in range(1, max(len(grads) for _, grads in used)):
        several = [grads for _, grads in used if len(grads) > number]
        torch._foreach_add_([grads[0] for grads in several], [grads[number] for grads in several])
    return [grads[0] for _, grads in used]
