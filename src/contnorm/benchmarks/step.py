"""Time of a training step per seed in a CUDA graph: ER on images of 32x32, 10 samples of the stream, 10 of the memory.

Images are noise, since the time of a step does not depend on their content.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import Source
from contnorm.bench.engine.cuda_graph import Stepper, stepper_for
from contnorm.bench.engine.precision import numerics
from contnorm.bench.engine.scheduler import resolve
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams.image_store import DeviceImages
from contnorm.benchmarks.timing import Percentiles

__all__ = ["StepCase", "StepRow", "measure_steps", "step_config"]

PER_TASK = {"cuda": 500, "cpu": 20}  # samples: 50 steps, or 2; steps of the first task have no replay
BLOCKS = {"cuda": (8, 50), "cpu": (5, 1)}  # number of measurements, and steps per measurement


@dataclass(frozen=True)
class StepCase:
    """Settings of a measure_time step."""

    norm: str
    stem: str
    precision: str
    lanes: int
    deterministic: bool = True


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


def noise_source(per_class: int = 100) -> Source:
    """Noise in the shape of CIFAR-100, with 100 classes."""
    generator = np.random.default_rng(0)
    labels = np.arange(100 * per_class) % 100
    images = generator.integers(0, 256, size=(len(labels), 3, 32, 32), dtype=np.uint8)
    return Source("cifar100", images, labels, images[:500], labels[:500], 100, "noise")


def step_config(case: StepCase, per_task: int = 500) -> RunConfig:
    values: dict[str, Any] = {
        "stream": {"name": "split-cifar100", "source": "cifar100", "train_per_task": per_task},
        "strategy": {"name": "er"},
        "norm": {"name": case.norm},
        "model": {"stem": case.stem},
        "train": {"precision": case.precision, "deterministic": case.deterministic, "lr": 0.003},
    }
    return resolve(values, Path())


def measure_steps(device: torch.device, chosen: Sequence[StepCase] | None = None) -> Iterator[StepRow]:
    """Measure each case after its CUDA graph is captured; on a CPU two cases, without a graph."""
    if device.type == "cpu":
        chosen = chosen or [StepCase(norm, "pool", "fp32", 1) for norm in ("bn", "cn")]
    source = noise_source()
    pictures = DeviceImages.of(source, device)
    for case in chosen or list(step_cases()):
        config = step_config(case, PER_TASK[device.type])
        blocks, steps = BLOCKS[device.type]
        with numerics(config.train):
            lanes = [Trainer(config, seed, source, device, pictures) for seed in range(case.lanes)]
            stepper = stepper_for(lanes)
            stepper.advance(PER_TASK[device.type] // config.train.batch + steps)  # skips the first task and the capture
            yield StepRow(case, Percentiles.of([_block(stepper, steps, case.lanes) for _ in range(blocks)]))


def _block(stepper: Stepper, steps: int, lanes: int) -> float:
    started = time.perf_counter()
    stepper.advance(steps)  # returns losses, so the device is synchronized
    return (time.perf_counter() - started) / steps / lanes
