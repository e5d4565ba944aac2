"""Compute weight gradients on a second CUDA stream, in parallel with the rest of the backward pass.

The backward pass of a convolution computes two independent gradients: that of its input, on which the backward pass of
all earlier layers depends, and that of its weight, on which only the update depends. Kernels of small batches leave
most of a GPU idle, so both can run at the same time. The kernels are the same, so the results are bit-exact.

The stream of the rest needs a higher priority, so that weight gradients only take what it leaves free. Measured on an
H200, ResNet-18, milliseconds of a step of all seeds together: one seed 0.94 instead of 1.15, five 1.67 instead of 1.86,
eight 2.48 instead of 2.51. See docs/benchmarks.md for steps that become slower.

Where a table of measurements has a Triton kernel that is faster than cuDNN's, it computes the convolution or one of its
gradients (`contnorm.kernels.triton.convolution`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.kernels.triton.availability import can_launch, can_use_kernels, is_plain
from contnorm.kernels.triton.continual import is_untraced
from contnorm.kernels.triton.convolution.launch import Geometry, convolve, input_gradient, weight_gradient
from contnorm.kernels.triton.convolution.table import LayerTiles, current_table

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

    Inside `contnorm.kernels.triton.convolution.table.using_table`, Triton computes what the table names.

    Example:
        >>> Convolution(3, 8, 3, padding=1, bias=False)(torch.randn(2, 3, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        if _side_stream.get() is None and not current_table():
            return super().forward(input)
        if self.bias is not None or self.padding_mode != "zeros" or not isinstance(self.padding, tuple):
            return super().forward(input)
        kind = input.device.type
        is_cast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if is_cast else self.weight.dtype
        if input.dtype != dtype and not is_cast:
            return super().forward(input)  # raises an error
        side, tiles, geometry = self._side_stream_for(input, dtype), _NO_TILES, self.geometry(input)
        if geometry is not None and _suits(input, self.weight, dtype):
            tiles = current_table().tiles(str(dtype).removeprefix("torch."), geometry)
        if side is None and tiles == _NO_TILES:
            return super().forward(input)
        settings = self.stride, self.padding, self.dilation, self.groups
        options = _Options(settings, side, tiles, geometry)
        y: Tensor = _Convolution.apply(input.to(dtype), self.weight.to(dtype), options)  # type: ignore[no-untyped-call]
        return y

    def _side_stream_for(self, input: Tensor, dtype: torch.dtype) -> SideStream | None:
        """Return the side stream for the weight gradient of this input; None to compute it in the backward pass."""
        # If autocast casts the weight, autograd must cast its gradient back, so it cannot be assigned directly.
        direct = self.weight.is_leaf and self.weight.requires_grad and self.weight.dtype == dtype
        return _side_stream.get() if direct and torch.is_grad_enabled() and input.numel() <= LARGE else None

    def geometry(self, input: Tensor) -> Geometry | None:
        """Return the sizes of the convolution; None if the kernels do not support them."""
        stride, padding, size = self.stride, self.padding, self.kernel_size
        square = stride[0] == stride[1] and padding[0] == padding[1] and size[0] == size[1]
        if not square or self.dilation != (1, 1) or self.groups != 1 or input.dim() != 4:
            return None
        samples, channels, height, width = input.shape
        return Geometry(samples, channels, height, width, self.out_channels, size[0], stride[0], int(padding[0]))


_NO_TILES = LayerTiles()


def _suits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can replace cuDNN: channels_last, no tracing, and TF32 only if torch may use it."""
    precision: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return (
        (dtype == torch.bfloat16 or (dtype == torch.float32 and precision.fp32_precision == "tf32"))
        and x.dtype != torch.float64
        and can_launch(x.device)
        and is_plain(x)
        and is_untraced()
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


class _Options(NamedTuple):
    settings: tuple[Any, ...]  # stride, padding, dilation, groups
    side: SideStream | None
    tiles: LayerTiles
    geometry: Geometry | None  # None if there are no tiles


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, options: _Options) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.weight = options, weight if options.side is not None else None
        if options.tiles.forward is None:
            return F.conv2d(x, weight, None, *options.settings)
        assert options.geometry is not None
        return convolve(x, weight, options.geometry, options.tiles.forward)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        options, (need_x, need_weight, _) = ctx.options, ctx.needs_input_grad
        if not can_use_kernels(dy):  # torch's operator can be differentiated again
            return *_torch_gradients(dy, x, weight, options, need_x, need_weight), None
        if options.side is None:
            dx, dweight = _gradients(dy, x, weight, options, need_x, need_weight)
            return dx, dweight, None
        with options.side.fork(dy, x):
            options.side.made.append((ctx.weight, _gradients(dy, x, weight, options, False, True)[1]))
        return _gradients(dy, x, weight, options, need_x, False)[0], None, None


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, options: _Options, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients that are needed: those without tiles by cuDNN, the others by Triton."""
    of_x, of_weight, geometry = options.tiles.input, options.tiles.weight, options.geometry
    by_torch = need_x and of_x is None, need_weight and of_weight is None
    dx, dweight = _torch_gradients(dy, x, weight, options, *by_torch) if any(by_torch) else (None, None)
    if geometry is not None and (of_x is not None or of_weight is not None):
        dy = dy.contiguous(memory_format=torch.channels_last)
        if need_x and of_x is not None:
            dx = input_gradient(dy, weight, geometry, of_x)
        if need_weight and of_weight is not None:
            dweight = weight_gradient(dy, x, geometry, of_weight)
    return dx, dweight


def _torch_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, options: _Options, need_x: bool, need_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    stride, padding, dilation, groups = options.settings
    mask = [need_x, need_weight, False]
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups, mask
    )
    return dx, dweight
