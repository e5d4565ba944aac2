"""Time of a training step per seed in a CUDA graph.

Most cases are ER on images of 32x32, with 10 samples of the stream and 10 of the memory. Some are DER++ on images of
64x64, with three passes of 32 samples.

Images are noise, since the time of a step does not depend on their content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Percentiles
from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import SOURCES
from contnorm.bench.engine.cuda_graph import GraphStepper
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams.device import DeviceImages

SOURCE_BY_SIZE = {32: "cifar100", 64: "tiny-imagenet"}  # by height and width of images
PER_CLASS = {32: 100, 64: 16}  # images of a class, enough for the steps that are measured
FIRST_TASK = {"cuda": 50, "cpu": 2}  # steps, which have no replay
BLOCKS = {"cuda": (8, 50), "cpu": (5, 1)}  # number of measurements, and steps per measurement
LARGE_FIRST_TASK, LARGE_BLOCKS = 10, (8, 8)  # the same on a GPU with images of 64x64, whose steps take long


@dataclass(frozen=True)
class StepCase:
    """Settings of a step."""

    norm: str
    stem: str
    precision: str
    lanes: int
    deterministic: bool = True
    strategy: str = "er"
    size: int = 32  # height and width of images


@dataclass(frozen=True)
class StepRow:
    """Time of a step per seed."""

    case: StepCase
    seconds: Percentiles


def step_cases() -> Iterator[StepCase]:
    for stem in ("plain", "pool"):
        for precision in ("tf32", "bf16"):
            for norm in ("bn", "cn"):
                yield StepCase(norm, stem, precision, 8)
    for stem, precision in (("plain", "tf32"), ("plain", "bf16"), ("pool", "tf32")):
        yield StepCase("none", stem, precision, 8)  # the cost of everything but the norm
    for norm in ("bn", "cn"):
        yield StepCase(norm, "pool", "tf32", 1)
        yield StepCase(norm, "pool", "bf16", 8, deterministic=False)
    for norm, precision, lanes in (("cn", "tf32", 1), ("bn", "bf16", 1), ("cn", "bf16", 1), ("cn", "bf16", 4)):
        yield StepCase(norm, "plain", precision, lanes, strategy="derpp", size=64)


def noise_source(size: int = 32) -> Source:
    """Noise in the shape of CIFAR-100, or of Tiny-ImageNet with images of 64x64."""
    generator = np.random.default_rng(0)
    spec = SOURCES[SOURCE_BY_SIZE[size]]
    labels = np.arange(spec.classes * PER_CLASS[size]) % spec.classes
    images = generator.integers(0, 256, size=(len(labels), 3, size, size), dtype=np.uint8)
    return Source(spec.name, images, labels, images[:500], labels[:500], spec.classes, "noise")


def step_config(case: StepCase, per_task: int = 500) -> RunConfig:
    source = SOURCE_BY_SIZE[case.size]
    values: dict[str, Any] = {
        "stream": {"name": f"split-{source}", "source": source, "train_per_task": per_task},
        "strategy": {"name": case.strategy},
        "norm": {"name": case.norm},
        "model": {"stem": case.stem},
        "train": {"precision": case.precision, "deterministic": case.deterministic, "lr": 0.003},
    }
    return resolve(values, Path())


def measure_steps(device: torch.device, chosen: Sequence[StepCase] | None = None) -> Iterator[StepRow]:
    """Measure each case after its CUDA graph is captured; on a CPU two cases, without a graph."""
    if device.type == "cpu":
        chosen = chosen or [StepCase(norm, "pool", "fp32", 1) for norm in ("bn", "cn")]
    for size, cases in groupby(chosen or step_cases(), key=lambda case: case.size):
        source = noise_source(size)
        images = DeviceImages.of(source, device)
        for case in cases:
            yield _measure(case, device, source, images)


def _measure(case: StepCase, device: torch.device, source: Source, images: DeviceImages) -> StepRow:
    large = case.size > 32 and device.type == "cuda"
    first_task = LARGE_FIRST_TASK if large else FIRST_TASK[device.type]
    blocks, steps = LARGE_BLOCKS if large else BLOCKS[device.type]
    config = step_config(case, first_task * step_config(case).train.batch)
    with numerics(config.train):
        lanes = [Trainer(config, seed, source, device, images) for seed in range(case.lanes)]
        advance = GraphStepper(lanes).advance if device.type == "cuda" else partial(_step_all, lanes)
        advance(first_task + steps)  # skips the steps without replay, and the capture
        return StepRow(case, Percentiles.of([_block(advance, steps, case.lanes) for _ in range(blocks)]))


def _step_all(lanes: Sequence[Trainer], steps: int) -> list[float]:
    losses = [[float(lane.step()) for lane in lanes] for _ in range(steps)]
    return losses[-1]


def _block(advance: Callable[[int], object], steps: int, lanes: int) -> float:
    started = time.perf_counter()
    advance(steps)  # returns losses, so the device is synchronized
    return (time.perf_counter() - started) / steps / lanes
