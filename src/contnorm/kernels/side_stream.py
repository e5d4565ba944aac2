"""Weight gradients beside the rest of a backward pass, on a CUDA stream of their own.

A convolution's backward pass makes two gradients that do not need each other: that of its input, for which every layer
below waits, and that of its weight, for which only the update does. Kernels of small batches leave most of a GPU idle,
so the second may run in what the first leaves over. The kernels are the same ones, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Beside", "Convolution", "weights_beside"]

LARGE = 2**22  # values of an input: kernels of so many fill a GPU, and it would have to be kept for longer


class Beside:
    """A stream for weight gradients, and what is under way there.

    Autograd knows nothing of the stream, so it is not given these gradients: they are put where they belong at the end.

    Args:
        stream: Not the one that the step runs on.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.read: list[tuple[Tensor, ...]] = []  # kept: else their memory could be given away while they are read
        self.made: list[tuple[Tensor, Tensor]] = []  # weights and their gradients, in the order of the backward pass

    @contextmanager
    def fork(self, *read: Tensor) -> Iterator[None]:
        """Inside, work goes to the stream, after all that was sent to the current one."""
        self.read.append(read)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Wait for what was forked, and give each weight its gradient; one used several times gets the sum."""
        if self.read:
            torch.cuda.current_stream().wait_stream(self.stream)
        for weight, gradient in self.made:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self.read.clear()
        self.made.clear()


_beside: ContextVar[Beside | None] = ContextVar("beside", default=None)


@contextmanager
def weights_beside(beside: Beside | None) -> Iterator[None]:
    """For the passes inside, weight gradients are made beside the rest; they are there when it is left."""
    before = _beside.set(beside)
    try:
        yield
    finally:
        _beside.reset(before)
    if beside is not None:
        beside.join()


class Convolution(nn.Conv2d):
    """`nn.Conv2d`, whose weight gradient may be made beside the rest of the backward pass.

    Example:
        >>> Convolution(3, 8, 3, padding=1, bias=False)(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        beside = _beside.get()
        kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.weight.dtype
        # A weight that is cast on its way has its gradient cast on the way back, by autograd.
        own = self.weight.is_leaf and self.weight.requires_grad and self.weight.dtype == kind
        plain = self.bias is None and self.padding_mode == "zeros" and isinstance(self.padding, tuple)
        if beside is None or not (own and plain) or not torch.is_grad_enabled() or input.numel() > LARGE:
            return super().forward(input)
        settings = self.stride, self.padding, self.dilation, self.groups
        y: Tensor = _Convolution.apply(input.to(kind), self.weight, beside, *settings)  # type: ignore[no-untyped-call]
        return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, beside: Beside, *settings: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.beside, ctx.settings = weight, beside, settings
        return F.conv2d(x, weight, None, *settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        about = None, stride, padding, dilation, False, [0] * len(padding), groups

        def gradient(of: int) -> Tensor:
            wanted = [i == of for i in range(3)]
            found: Tensor = torch.ops.aten.convolution_backward(dy, x, ctx.weight, *about, wanted)[of]
            return found

        with ctx.beside.fork(dy, x):
            ctx.beside.made.append((ctx.weight, gradient(1)))
        dx = gradient(0) if ctx.needs_input_grad[0] else None
        return dx, *(None,) * 6
