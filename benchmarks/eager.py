"""Eager mode, as most people train: the time of the host per layer, and of a whole training step.

With small batches the host is the limit: it launches kernels more slowly than the GPU executes them. CN is measured on
both of its paths: through Python, and with launches replayed by the C++ extension.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.step import StepCase, step_config
from benchmarks.timing import Percentiles
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.models.networks import ResNet18
from contnorm.kernels.triton import eager
from contnorm.norms.continual import ContinualNorm2d

LAYERS = 20  # as in a ResNet-18
REPEATS = {"cuda": 50, "cpu": 5}
WARM_UP = {"cuda": 20, "cpu": 2}
BATCHES = {"cuda": (20, 128, 256), "cpu": (20,)}


@dataclass(frozen=True)
class HostCase:
    """A layer (bn or cn) and its host path: torch's for bn; python, cpp or compiled (by torch.compile) for cn."""

    layer: str
    path: str


@dataclass(frozen=True)
class HostRow:
    """Microseconds of the host per layer, in a chain of layers on a small input."""

    case: HostCase
    direction: str  # forward or backward
    seconds: Percentiles


@dataclass(frozen=True)
class EagerCase:
    """A training step of ResNet-18 on images of 32x32 in an eager loop."""

    layer: str
    path: str
    batch: int
    layout: str = "nchw"
    stem: str = "plain"
    precision: str = "tf32"


@dataclass(frozen=True)
class EagerRow:
    """Time of the step, and its peak memory in bytes; 0 if it was not measured."""

    case: EagerCase
    seconds: Percentiles
    peak_bytes: int = 0


def measure_host(device: torch.device) -> Iterator[HostRow]:
    """Measure the time that the host needs to launch a layer, forward and backward."""
    cases = [HostCase("bn", "torch"), *(HostCase("cn", path) for path in _paths(device))]
    for case in cases:
        forward, backward = _host_seconds(case, device)
        yield HostRow(case, "forward", Percentiles.of(forward))
        yield HostRow(case, "backward", Percentiles.of(backward))


def _paths(device: torch.device) -> tuple[str, ...]:
    return ("python", "cpp", "compiled") if device.type == "cuda" else ("python",)


def _host_seconds(case: HostCase, device: torch.device) -> tuple[list[float], list[float]]:
    """Return seconds per layer. The device is idle when a measurement starts, and nothing waits for it."""
    torch.manual_seed(0)
    network: Callable[[Tensor], Tensor] = nn.Sequential(*(_norm(case.layer, 64) for _ in range(LAYERS))).to(device)
    if case.path == "compiled":
        network = torch.compile(network)
    x = torch.randn(20, 64, 8, 8, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    forward, backward = [], []
    with _path(case.path):
        for number in range(WARM_UP[device.type] + REPEATS[device.type]):
            _synchronize(device)
            started = time.perf_counter()
            y = network(x)
            between = time.perf_counter()
            y.backward(dy)  # type: ignore[no-untyped-call]
            ended = time.perf_counter()
            x.grad = None
            for parameter in network.parameters():  # type: ignore[attr-defined]
                parameter.grad = None
            if number >= WARM_UP[device.type]:
                forward.append((between - started) / LAYERS)
                backward.append((ended - between) / LAYERS)
    return forward, backward


@contextmanager
def _path(path: str) -> Iterator[None]:
    """Context manager in which CN takes one of its host paths; afterwards it goes through Python."""
    eager.stop()
    if path == "cpp" and not eager.activate():
        raise RuntimeError("launches can't be replayed here: is there a C++ compiler?")
    try:
        yield
    finally:
        eager.stop()


def measure_eager_steps(device: torch.device) -> Iterator[EagerRow]:
    """Measure a training step in an eager loop with TF32, by batch size: torch's batch norm, and CN on both paths."""
    paths = [("bn", "torch"), *(("cn", path) for path in _paths(device) if path != "compiled")]
    for batch in BATCHES[device.type]:
        for layer, path in paths:
            yield _eager_row(EagerCase(layer, path, batch), device)


def _eager_row(case: EagerCase, device: torch.device) -> EagerRow:
    train = step_config(StepCase("bn", case.stem, case.precision, 1, deterministic=False)).train
    with numerics(train), _path(case.path):
        step = _eager_step(case, device)
        for _ in range(WARM_UP[device.type]):
            step()
        seconds = []
        for _ in range(REPEATS[device.type]):
            _synchronize(device)
            started = time.perf_counter()
            step()
            _synchronize(device)
            seconds.append(time.perf_counter() - started)
        return EagerRow(case, Percentiles.of(seconds), _peak(step) if device.type == "cuda" else 0)


def _eager_step(case: EagerCase, device: torch.device) -> Callable[[], None]:
    """An ordinary eager training step: no CUDA graph, one seed, torch's own layers where they exist."""
    torch.manual_seed(0)
    stem = "pool" if case.stem == "pool" else "plain"
    model = ResNet18(3, 85, 64, lambda channels: _norm(case.layer, channels), stem).to(device)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    x = torch.rand(case.batch, 3, 32, 32, device=device)
    target = torch.randint(0, 85, (case.batch,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _norm(layer: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if layer == "bn" else ContinualNorm2d(channels, num_groups=32)


def _peak(step: Callable[[], None]) -> int:
    """Peak memory of one more step, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
