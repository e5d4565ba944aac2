"""Draws of initial weights, made once for networks that start from the same seed.

Runs that differ in their norm only start from the same weights. Drawing those of a ResNet-18 takes 0.1 seconds: most of
the time between two units of work on a GPU. A draw is a function of the state of the generator, the shape and
the bounds: with the same ones, a copy of the earlier result is the same to the bit, and the generator gets the state
that it had after that draw.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["WeightDraws"]

LIMIT = 2**29  # bytes of all weights: those of eleven ResNet-18 of width 64
SMALL = 2**14  # values; fewer are drawn faster than looked up
# Torch asks the mode about the first of them that is called; older versions call the second directly.
DRAWING = (nn.init.kaiming_uniform_, Tensor.uniform_)


class WeightDraws(TorchFunctionMode):
    """Context manager in which draws of weights from torch's global generator are remembered; can be entered again.

    Example:
        >>> draws, layers = WeightDraws(), []
        >>> for _ in range(2):
        ...     with draws, torch.random.fork_rng():
        ...         _ = torch.manual_seed(0)
        ...         layers.append(nn.Linear(128, 128))
        >>> torch.equal(layers[0].weight, layers[1].weight), torch.equal(layers[0].bias, layers[1].bias), len(draws)
        (True, True, 1)
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: OrderedDict[tuple[Any, ...], tuple[Tensor, Tensor]] = OrderedDict()  # oldest first
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensor: Any = kwargs.get("tensor", args[0] if args else None)
        if func not in DRAWING or not _can_remember(tensor, kwargs):
            return func(*args, **kwargs)
        settings = [repr(value) for value in (*args, *sorted(kwargs.items())) if not _has_tensor(value)]
        state = torch.random.get_rng_state()
        key = func.__name__, *settings, tuple(tensor.shape), tensor.dtype, state.numpy().tobytes()
        if key not in self._results:
            func(*args, **kwargs)
            self._remember(key, tensor.detach().clone(), torch.random.get_rng_state())
            return tensor
        result, after = self._results[key]
        self._results.move_to_end(key)
        with torch.no_grad():
            tensor.copy_(result)
        torch.random.set_rng_state(after)
        return tensor

    def _remember(self, key: tuple[Any, ...], result: Tensor, after: Tensor) -> None:
        self._results[key] = result, after
        self._bytes += result.nbytes
        while self._bytes > LIMIT:
            self._bytes -= self._results.popitem(last=False)[1][0].nbytes


def _can_remember(tensor: object, options: Mapping[str, Any]) -> bool:
    """Whether a draw is a large one on the CPU, from the global generator."""
    return (
        isinstance(tensor, Tensor)
        and tensor.device.type == "cpu"
        and tensor.numel() >= SMALL
        and tensor.is_contiguous()
        and options.get("generator") is None
    )


def _has_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple) and isinstance(value[-1], Tensor))
