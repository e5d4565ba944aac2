"""Estimates of the seconds of runs, from records of similar runs: which to start first, and whether processes pay.

The seconds of a run are those that it keeps its device busy. Needs no torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import SOURCES
from contnorm.bench.records import Record, is_hash, read_record
from contnorm.bench.streams.tasks import find_stream
from contnorm.errors import UserError

# Seconds per sample of a training step, per GFLOP of the network: the order of magnitude on an H200 and on a CPU core.
DEFAULT_RATES = {"cuda": 3e-4, "cpu": 1e-1}
FASTEST_STEP = 2e-4  # seconds of a step of the smallest network
# GFLOP of a network for one image of 224 x 224.
GFLOPS = {"mlp": 0.001, "resnet18": 1.8, "resnet34": 3.6, "resnet50": 4.1, "resnet101": 7.8, "resnet152": 11.5}
MOST_RECORDS = 200  # at most so many records are read to estimate the next runs


class CostModel:
    """Estimates seconds of runs: by the most similar records on the same kind of device, or by the size of the network.

    Args:
        runs: Folder of runs, of which one record of each experiment is read, at most 200; None for no records.
        device: ``"cuda"`` or ``"cpu"``.

    Example:
        >>> model = CostModel(device="cpu")
        >>> model.seconds(RunConfig(), samples=1000)  # 5 tasks
        1.0
    """

    def __init__(self, runs: Path | None = None, device: str = "cuda") -> None:
        rates: dict[Hashable, list[float]] = defaultdict(list)
        for record in islice(_one_record_each(runs), MOST_RECORDS) if runs is not None else ():
            seconds, ends = record.seconds, record.raw.get("task_ends")
            if ends and seconds and record.device.get("kind") == device:
                rate = sum(seconds.get(name, 0.0) for name in ("train", "evaluate")) / _samples(record.config, ends[-1])
                for kind in _kinds(record.config):
                    rates[kind].append(rate)
        self._rates = {kind: median(values) for kind, values in rates.items()}
        self._default_rate = DEFAULT_RATES[device]

    def seconds(self, config: RunConfig, samples: int) -> float:
        """Return the seconds that one run keeps a device busy.

        Args:
            config: The settings.
            samples: Number of training samples in the data set.
        """
        steps = count_steps(config, samples)
        known = (self._rates[kind] for kind in _kinds(config) if kind in self._rates)
        rate = next(known, self._default_rate * _network_gflops(config))
        return max(_samples(config, steps) * rate, steps * FASTEST_STEP)


def _one_record_each(runs: Path) -> Iterator[Record]:
    """Yield the first finished record of each experiment; a damaged one is reported by those who need it."""
    for folder in sorted(runs.iterdir()) if runs.is_dir() else ():
        if is_hash(folder.name):
            for path in sorted(path for path in folder.glob("*.json") if path.stem.isdecimal())[:1]:
                with suppress(UserError):
                    yield read_record(path)


def count_steps(config: RunConfig, samples: int) -> float:
    """Return the number of training steps of a run, as far as its settings say it.

    Args:
        config: The settings.
        samples: Number of training samples in the data set.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> stream = {"name": "split-cifar100", "source": "cifar100", "part": "learn"}
        >>> count_steps(from_dict({"stream": stream, "train": {"batch": 10}}), samples=50_000)  # 17 of 20 tasks
        4250.0
    """
    stream, train, spec = config.stream, config.train, find_stream(config.stream.name)
    whole = spec.tasks or stream.tasks or 1
    part = {"learn": whole - spec.validation, "validate": spec.validation}.get(stream.part or "all", whole)
    per_task = samples if spec.kind == "permuted" else samples / whole
    learned = (stream.tasks or part) * min(per_task, stream.train_per_task or math.inf)
    return min(learned * train.passes * train.updates / train.batch, train.max_steps or math.inf)


def _network_gflops(config: RunConfig) -> float:
    """GFLOP of the network for one image, roughly."""
    if config.model.name == "mlp":
        return GFLOPS["mlp"]
    shape = SOURCES[config.stream.source].shape if config.stream.source in SOURCES else (3, 32, 32)
    size = max(shape[1] * shape[2] / 224**2, 0.05)
    return GFLOPS.get(config.model.name, GFLOPS["resnet18"]) * (config.model.width / 64) ** 2 * size


def _samples(config: RunConfig, steps: float) -> float:
    """Samples of some training steps."""
    return steps * (config.train.batch + config.train.replay)


def _kinds(config: RunConfig) -> list[Hashable]:
    """What a run has in common with similar ones, the most similar first."""
    network = (config.stream.name, config.model.name, config.model.width, config.model.stem, config.train.precision)
    method = (config.strategy.name, config.strategy.forward, config.train.batch, config.evaluate.moments)
    return [(*network, *method, config.norm.name), (*network, *method), network]
