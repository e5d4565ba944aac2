"""Speed of single layers: continual norm, composed of two torch calls and as our kernel, relative to batch norm.

Layers are called through their functions, with running moments, weight and bias. In training, forward and backward are
measure_time together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Percentiles, copy_bandwidth, measure_time
from contnorm.kernels.triton.launcher import can_compile_ahead, compiling_ahead
from contnorm.norms.continual import continual_norm

Shape = tuple[int, int, int, int]
# Input shapes by the use case that they represent.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "ResNet-18 on 20 images of 32x32": ((20, 64, 32, 32), (20, 128, 16, 16), (20, 256, 8, 8), (20, 512, 4, 4)),
    "the same at batch 128": ((128, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (128, 512, 4, 4)),
    "images of 84x84": ((20, 64, 84, 84), (20, 64, 42, 42)),
    "large": ((128, 64, 112, 112), (256, 256, 56, 56)),
}
SMALL: dict[str, tuple[Shape, ...]] = {
    "ResNet-18 on 20 images of 32x32": SHAPES["ResNet-18 on 20 images of 32x32"],
    "the same at batch 128": ((128, 64, 32, 32),),
}
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = {"train": 8, "eval": 2}  # minimum number of reads and writes of the whole tensor


@dataclass(frozen=True)
class LayerCase:
    """One input: shape, dtype and memory layout; and whether the layer is in training mode."""

    shape: Shape
    dtype: str
    layout: str  # nchw or nhwc
    mode: str  # train or eval


@dataclass(frozen=True)
class LayerRow:
    """Measurement of one layer on one input."""

    case: LayerCase
    layer: str
    seconds: Percentiles
    over_bn: float
    share_of_floor: float  # time of copies that move the same bytes, divided by ours


def layer_cases(shapes: Sequence[Shape], dtypes: Sequence[str]) -> Iterator[LayerCase]:
    for shape in shapes:
        for dtype in dtypes:
            for layout in ("nchw", "nhwc"):
                for mode in ("train", "eval"):
                    yield LayerCase(shape, dtype, layout, mode)


def measure_layers(device: torch.device, dtypes: Sequence[str] = tuple(TYPES)) -> Iterator[LayerRow]:
    """Measure every layer on every case of a device; on a CPU only the smaller cases."""
    bandwidth = copy_bandwidth(device, 2**28 if device.type == "cuda" else 2**26)
    chosen = SHAPES if device.type == "cuda" else SMALL
    shapes = [shape for group in chosen.values() for shape in group]
    cases = list(layer_cases(shapes, dtypes if device.type == "cuda" else ["fp32"]))
    if device.type == "cuda" and can_compile_ahead():
        with compiling_ahead():  # all kernels in parallel: one after the other they take minutes
            for case in cases:
                _layer_calls(case, device)["cn"]()
    for case in cases:
        yield from _rows(case, device, bandwidth)


def _rows(case: LayerCase, device: torch.device, bandwidth: float) -> Iterator[LayerRow]:
    spreads = {name: measure_time(work, device) for name, work in _layer_calls(case, device).items()}
    n, c, h, w = case.shape
    size = n * c * h * w * TYPES[case.dtype].itemsize
    floor = PASSES[case.mode] * size / bandwidth
    for name, spread in spreads.items():
        yield LayerRow(case, name, spread, spread.p50 / spreads["bn"].p50, floor / spread.p50)


def _layer_calls(case: LayerCase, device: torch.device) -> dict[str, Callable[[], object]]:
    """Functions without arguments that run each layer on the case."""
    dtype, channels, groups = TYPES[case.dtype], case.shape[1], min(32, case.shape[1])
    torch.manual_seed(0)
    x = torch.randn(case.shape, device=device, dtype=dtype)
    if case.layout == "nhwc":
        x = x.to(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    weight, bias = torch.rand(channels, device=device), torch.rand(channels, device=device)
    mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    training = case.mode == "train"
    for tensor in (x, weight, bias):
        tensor.requires_grad_(training)

    def bn() -> Tensor:
        return F.batch_norm(x, mean, var, weight, bias, training, 0.1, 1e-5)

    def stock() -> Tensor:
        return F.batch_norm(F.group_norm(x, groups), mean, var, weight, bias, training, 0.1, 1e-5)

    def ours(kernel: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            return continual_norm(x, mean, var, weight, bias, training, 0.1, 1e-5, groups, kernel=kernel)  # type: ignore[arg-type]

        return call

    def work(call: Callable[[], Tensor]) -> Callable[[], object]:
        def forward_and_backward() -> object:
            return torch.autograd.grad(call(), (x, weight, bias), dy)

        return forward_and_backward if training else call

    calls = {"bn": bn, "cn_stock": stock, "cn": ours("auto")}
    if device.type == "cpu":
        calls["cn_analytic"] = ours("analytic")
    return {name: work(call) for name, call in calls.items()}
