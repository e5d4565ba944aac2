"""Compute weight gradients on a second CUDA stream, in parallel with the rest of the backward pass.

The backward pass of a convolution computes two independent gradients: that of its input, on which the backward pass of
all earlier layers depends, and that of its weight, on which only the update depends. Kernels of small batches leave
most of a GPU idle, so both can run at the same time. The kernels are the same, so the results are bit-exact.

Measured gain on an H200, ResNet-18 with one seed: 1.10 ms per step instead of 1.32. With several seeds in one graph the
GPU is full, and it is slower (five seeds: 0.74 ms instead of 0.52), so it is used for one seed only. See
docs/benchmarks.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Convolution", "SideStream", "side_stream_gradients"]

LARGE = 2**22  # values of an input from which a kernel fills the GPU, and keeping the input longer costs memory


class SideStream:
    """A CUDA stream for weight gradients, and the gradients that are being computed on it.

    Autograd does not know about the stream, so these gradients are not returned to it: `join` assigns them at the end.

    Args:
        stream: A CUDA stream other than the one that the step runs on.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.read: list[tuple[Tensor, ...]] = []  # kept alive, so that their memory is not reused while they are read
        self.made: list[tuple[Tensor, Tensor]] = []  # weights and their gradients, in the order of the backward pass

    @contextmanager
    def fork(self, *read: Tensor) -> Iterator[None]:
        """Context manager that queues work on the side stream, after all work queued on the current one."""
        self.read.append(read)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Wait for the forked work, and assign each weight its gradient; a weight used several times gets the sum."""
        if self.read:
            torch.cuda.current_stream().wait_stream(self.stream)
        for weight, gradient in self.made:
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
        self.read.clear()
        self.made.clear()


_side_stream: ContextVar[SideStream | None] = ContextVar("side_stream", default=None)


@contextmanager
def side_stream_gradients(side_stream: SideStream | None) -> Iterator[None]:
    """Context manager that computes weight gradients on the side stream; they are assigned on exit."""
    token = _side_stream.set(side_stream)
    try:
        yield
    finally:
        _side_stream.reset(token)
    if side_stream is not None:
        side_stream.join()


class Convolution(nn.Conv2d):
    """`nn.Conv2d` whose weight gradient can be computed in parallel with the rest of the backward pass.

    Example:
        >>> Convolution(3, 8, 3, padding=1, bias=False)(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        side = _side_stream.get()
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.weight.dtype
        # If autocast casts the weight, autograd must cast its gradient back, so it cannot be assigned directly.
        direct = self.weight.is_leaf and self.weight.requires_grad and self.weight.dtype == dtype
        plain = self.bias is None and self.padding_mode == "zeros" and isinstance(self.padding, tuple)
        if side is None or not (direct and plain) or not torch.is_grad_enabled() or input.numel() > LARGE:
            return super().forward(input)
        settings = self.stride, self.padding, self.dilation, self.groups
        y: Tensor = _Convolution.apply(input.to(dtype), self.weight, side, *settings)  # type: ignore[no-untyped-call]
        return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, side: SideStream, *settings: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.side, ctx.settings = weight, side, settings
        return F.conv2d(x, weight, None, *settings)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.settings
        options = None, stride, padding, dilation, False, [0] * len(padding), groups

        def gradient(index: int) -> Tensor:
            output_mask = [i == index for i in range(3)]
            grad: Tensor = torch.ops.aten.convolution_backward(dy, x, ctx.weight, *options, output_mask)[index]
            return grad

        with ctx.side.fork(dy, x):
            ctx.side.made.append((ctx.weight, gradient(1)))
        dx = gradient(0) if ctx.needs_input_grad[0] else None
        return dx, *(None,) * 6
