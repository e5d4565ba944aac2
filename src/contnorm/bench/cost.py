"""Estimates of the time that runs take, from records of similar runs; for planning. Needs no torch.

The seconds of a run are those that it keeps its device busy. Runs that are executed together (lanes) share a device:
the seconds of a group of n runs are modelled as ``a + n b``, so that the share of one run is ``b (1 + c / n)`` with
``c = a / b``. Both come from records, which have the seconds and the size of their group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.multilabel import PUBLISHED_STREAMS, published_stream
from contnorm.bench.data.registry import SOURCES
from contnorm.bench.records import FINISHED, Record, is_hash, read_record
from contnorm.bench.streams.tasks import STREAMS, StreamSpec
from contnorm.errors import UserError

__all__ = ["CostModel", "Timing", "count_steps", "recorded_timings"]

TASKS, SAMPLES = 10, 5000  # of a stream whose size is not known before its data is loaded
GROUP_COST = 1.5  # c, if no records say it: the runs of a group share the time that a GPU waits for the next kernel
# Seconds per sample of a training step, per GFLOP of the network: the order of magnitude on an H200 and on a CPU core.
DEFAULT_RATES = {"cuda": 3e-4, "cpu": 1e-1}
FASTEST_STEP = 2e-4  # seconds of a step of the smallest network
# GFLOP of a network for one image of 224 x 224.
GFLOPS = {"mlp": 0.001, "resnet18": 1.8, "resnet34": 3.6, "resnet50": 4.1, "resnet101": 7.8, "resnet152": 11.5}
SMALL_GROUP, LARGE_GROUP = 2, 8  # lanes
MOST_RECORDS = 200  # that are read from a folder of runs to plan the next ones


@dataclass(frozen=True)
class Timing:
    """The measured time of a recorded run.

    Attributes:
        config: Its settings.
        steps: Its training steps.
        seconds: Its share of the time of its group.
        lanes: Number of runs in the group.
        device: Type of the device.
    """

    config: RunConfig
    steps: float
    seconds: float
    lanes: int
    device: str

    @classmethod
    def of(cls, record: Record) -> Timing | None:
        """Return the time of a record; None if it has none."""
        seconds = record.raw.get("seconds", {})
        lanes = int(seconds.get("lanes", 1))
        measured = seconds.get("train", 0.0) + seconds.get("evaluate", 0.0)
        share = max(measured, seconds.get("together", 0.0) / lanes)  # a resumed run has the time since it resumed
        source = record.raw.get("source", {})
        part = source.get("images", 1) / source.get("published_images", 1)  # of a multi-label data set
        steps = (record.raw.get("task_ends") or [count_steps(record.config) * part])[-1]
        if not share or not steps:
            return None
        return cls(record.config, steps, share, lanes, record.raw.get("device", {}).get("kind", "cpu"))


def recorded_timings(runs: Path | None) -> list[Timing]:
    """Return the times of one run of each experiment in a folder; of at most 200 experiments.

    Example:
        >>> recorded_timings(Path("no such folder"))
        []
    """
    timings: list[Timing] = []
    for path in islice(_one_record_each(runs), MOST_RECORDS) if runs is not None else ():
        with suppress(UserError, OSError, ValueError):  # a damaged record is reported by those who need it
            record = read_record(path)
            timing = Timing.of(record) if record.status == FINISHED else None
            timings += [] if timing is None else [timing]
    return timings


def _one_record_each(runs: Path) -> Iterator[Path]:
    with suppress(OSError):
        for folder in sorted(runs.iterdir()):
            if is_hash(folder.name) and folder.is_dir():
                yield from sorted(path for path in folder.glob("*.json") if path.stem.isdecimal())[:1]


def count_steps(config: RunConfig, samples: int | None = None) -> float:
    """Return the number of training steps of a run, as far as the settings and published counts say it.

    Args:
        config: The settings.
        samples: Number of training samples, if it is known.

    Example:
        >>> from contnorm.bench.config.schema import from_dict
        >>> stream = {"name": "split-cifar100", "source": "cifar100", "part": "learn"}
        >>> count_steps(from_dict({"stream": stream, "train": {"batch": 10}}))  # 17 tasks of 2,500 images
        4250.0
    """
    stream, train = config.stream, config.train
    spec = STREAMS.get(stream.name)
    if stream.name in PUBLISHED_STREAMS:
        learned = float(sum(published_stream(stream.name).sizes["train"]))
    else:
        tasks = stream.tasks or _tasks(spec, stream.part)
        learned = float(tasks * (stream.train_per_task or _samples_per_task(spec, stream.source)))
    if samples is not None and (spec is None or spec.kind != "permuted"):
        learned = float(samples) if spec is None or spec.kind == "user" else min(learned, samples)
    steps = learned * train.passes * train.updates / (train.batch or 10)
    return steps if train.max_steps is None else min(steps, float(train.max_steps))


def _tasks(spec: StreamSpec | None, part: str | None) -> int:
    if spec is None or not spec.tasks:
        return TASKS
    return {"learn": spec.tasks - spec.validation, "validate": spec.validation}.get(part or "all", spec.tasks) or TASKS


def _samples_per_task(spec: StreamSpec | None, source: str | None) -> float:
    counts = SOURCES[source].published if source in SOURCES else None
    if counts is None:
        return SAMPLES
    per_class = sum(counts.train) / len(counts.train)
    return per_class * (spec.per_task if spec is not None and spec.per_task else len(counts.train))


def _network_gflops(config: RunConfig) -> float:
    """GFLOP of the network for one image, roughly."""
    width = (config.model.width or 64) / 64
    shape = SOURCES[config.stream.source].shape if config.stream.source in SOURCES else (3, 32, 32)
    if config.model.name == "mlp":
        return GFLOPS["mlp"]
    return GFLOPS.get(config.model.name, GFLOPS["resnet18"]) * width**2 * max(shape[1] * shape[2] / 224**2, 0.05)


def _work(config: RunConfig, steps: float) -> float:
    """Samples of all training steps."""
    return steps * ((config.train.batch or 10) + (config.train.replay or 0))


def _network(config: RunConfig) -> Hashable:
    """What the time that a GPU waits between kernels depends on: the network and the size of its images."""
    shape = SOURCES[config.stream.source].shape if config.stream.source in SOURCES else None
    return shape, config.model.name, config.model.width, config.model.stem


def _kinds(config: RunConfig) -> list[tuple[Hashable, bool]]:
    """What a run has in common with similar ones, the most similar first; and whether their networks may differ."""
    stream, model, train = config.stream, config.model, config.train
    network = (model.name, model.width, model.stem, train.precision)
    method = (config.strategy.name, config.strategy.forward, train.batch, config.evaluate.moments)
    shape = SOURCES[stream.source].shape if stream.source in SOURCES else None
    return [
        ((stream.name, *network, *method, config.norm.name), False),
        ((stream.name, *network, *method), False),
        ((stream.name, *network), False),
        ((stream.name,), True),
        ((shape, *network), False),
        ((shape,), True),
        ((), True),
    ]


class CostModel:
    """Estimates seconds of runs from those of recorded ones.

    Args:
        timings: Recorded times.
        device: Type of the device that runs are planned for; times on others are not used.

    Example:
        >>> config = RunConfig()
        >>> model = CostModel([Timing(config, 1000, 30.0, lanes=1, device="cpu")], "cpu")
        >>> model.seconds(config) > 0
        True
    """

    def __init__(self, timings: Iterable[Timing] = (), device: str = "cuda") -> None:
        used = [timing for timing in timings if timing.device == device]
        self.device = device
        self._group_costs = _group_costs(used)
        self._group_cost = median(self._group_costs.values()) if self._group_costs else GROUP_COST
        rates: dict[Hashable, list[float]] = defaultdict(list)
        for timing in used:
            rate = timing.seconds / _work(timing.config, timing.steps) / self._share(timing.config, timing.lanes)
            for kind, any_network in _kinds(timing.config):
                rates[kind].append(rate / _network_gflops(timing.config) if any_network else rate)
        self._rates = {kind: median(values) for kind, values in rates.items()}

    def seconds(self, config: RunConfig, lanes: int = 1, samples: int | None = None) -> float:
        """Return the seconds that one run keeps a device busy: its share of a group of some lanes.

        Args:
            config: The settings of the run.
            lanes: Number of runs of the group.
            samples: Number of training samples of the data set, if it is known.
        """
        steps = count_steps(config, samples)
        work = _work(config, steps)
        known = ((self._rates[kind], any_network) for kind, any_network in _kinds(config) if kind in self._rates)
        rate, any_network = next(known, (DEFAULT_RATES.get(self.device, DEFAULT_RATES["cpu"]), True))
        scale = _network_gflops(config) if any_network else 1.0
        return max(work * rate * scale, steps * FASTEST_STEP) * self._share(config, lanes)

    def _share(self, config: RunConfig, lanes: int) -> float:
        """Return the share of a run in the time of its group, as a multiple of that in a very large group."""
        if self.device != "cuda":
            return 1.0  # each run has its own core
        return 1 + self._group_costs.get(_network(config), self._group_cost) / lanes

    def group_seconds(self, configs: Sequence[RunConfig]) -> float:
        """Return the seconds of a group of runs that are executed together."""
        return sum(self.seconds(config, len(configs)) for config in configs)


def _group_costs(timings: Sequence[Timing]) -> dict[Hashable, float]:
    """Fit c of ``b (1 + c / n)`` for each network, from similar runs in groups of at most 2, and of at least 8."""
    shares: dict[Hashable, dict[bool, list[tuple[int, float]]]] = defaultdict(lambda: {True: [], False: []})
    networks: dict[Hashable, Hashable] = {}
    for timing in timings:
        if timing.lanes <= SMALL_GROUP or timing.lanes >= LARGE_GROUP:
            kind = _kinds(timing.config)[0][0]
            networks[kind] = _network(timing.config)
            shares[kind][timing.lanes <= SMALL_GROUP].append((timing.lanes, timing.seconds / timing.steps))
    fits: dict[Hashable, list[float]] = defaultdict(list)
    for kind, by_size in shares.items():
        if by_size[True] and by_size[False]:
            large = median(share for _, share in by_size[False])
            fits[networks[kind]] += [max(0.0, (share / large - 1) * lanes) for lanes, share in by_size[True]]
    return {network: median(costs) for network, costs in fits.items()}
