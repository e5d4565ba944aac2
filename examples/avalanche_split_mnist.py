"""Replay on Split MNIST in Avalanche's training loop, with BN, with CN, and with BN and moments of the replay buffer.

Five tasks of two digits each are learned in one pass by a small convolutional network (class-incremental). The third
network is trained as the first: only its evaluations use exact moments of the samples in the buffer. After the last
task, accuracy is measured on the test images of all tasks, and NormEffect is what exact moments of all training data
would add to it.

With `--bench` it trains the same network with ER of this package instead, with BN and CN and three memories: that of
Avalanche's Replay, which is `ExperienceBalanced` here, and two of this package.

Without MNIST under `--data-root` it uses the 5,000 included digits. It needs `pip install contnorm[avalanche]`.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from avalanche.evaluation.metrics import accuracy_metrics
from avalanche.training import Replay
from avalanche.training.plugins import EvaluationPlugin
from torch import nn

import contnorm
from contnorm import bench
from contnorm.integrations.avalanche import NormEffect, NormPlugin, to_avalanche

SETTINGS: dict[str, Any] = {"lr": 0.05, "batch": 10, "memory": 200, "groups": 8}
NETWORK = "conv 3x3 (32, stride 2), norm, ReLU, conv 3x3 (64, stride 2), norm, ReLU, linear"
VARIANTS = {"BN": "norm of torch", "CN": "NormPlugin('cn')", "BN, buffer moments": "reestimate_from='buffer'"}


class ExperienceBalanced(bench.Memory):
    """Avalanche's default: a uniform sample of each task so far, with equal shares, which change at the end of a task.

    A task in progress is sampled into slots that are not replayed, so there are twice as many slots.
    """

    def setup(self) -> None:
        self.capacity = 2 * self.size
        self.kept: dict[int, Any] = {}  # the slots of each earlier task
        self.task, self.seen, self.own = 0, 0, np.arange(self.size)  # the task in progress, its samples and its slots

    def offer(self, labels: Any, task: int) -> Any:
        if task != self.task:
            self.kept[self.task] = self.own[: self.seen]
            share = self.size // len(self.kept)
            for key, slots in self.kept.items():
                if len(slots) > share:
                    self.kept[key] = self.generator.choice(slots, share, replace=False)
            free = np.setdiff1d(np.arange(self.capacity), np.concatenate(list(self.kept.values())))
            self.task, self.seen, self.own = task, 0, free[: self.size]
        slots = np.full(len(labels), -1)
        for i in range(len(labels)):
            place = self.seen if self.seen < self.size else int(self.generator.integers(0, self.seen + 1))
            slots[i] = self.own[place] if place < self.size else -1
            self.seen += 1
        return slots

    def readable(self, before_task: int | None = None) -> Any:
        kept = np.concatenate([np.empty(0, dtype=np.int64), *self.kept.values()])
        return np.intersect1d(super().readable(before_task), kept)


def memories() -> dict[str, bench.Memory]:
    """Memories of 200 samples."""
    size = SETTINGS["memory"]
    return {
        "200 shared by earlier tasks (Avalanche)": ExperienceBalanced(size),
        "reservoir of 200": bench.Reservoir(size),
        "ring of 40 per task": bench.Ring(size // 5),
    }


def train_in_bench(stream: bench.Stream, memory: bench.Memory, norm: str, seeds: int, runs: Path | None) -> list[float]:
    """Train with ER of the bench; returns the accuracy at the end of each seed, in percent."""
    result = bench.run(
        stream,
        norm=norm,
        strategy="er",
        memory=memory,
        model=lambda shape, outputs: network(),
        lr=SETTINGS["lr"],
        batch_size=SETTINGS["batch"],
        replay=SETTINGS["batch"],
        seeds=seeds,
        lanes=1,
        runs=runs,
    )
    return [round(float(value), 4) for value in result.acc]


def plugins(variant: str) -> list[NormPlugin]:
    """Return the plugins of a variant; batch norm needs none."""
    if variant == "CN":
        return [NormPlugin("cn", num_groups=SETTINGS["groups"])]
    return [NormPlugin(None, reestimate_from="buffer")] if variant == "BN, buffer moments" else []


def network() -> nn.Module:
    """Return the network, with batch norm."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 6 * 6, 10)),
    )


def train(stream: bench.Stream, variant: str, seed: int, effect_samples: int | None) -> dict[str, Any]:
    """Train on all tasks, and return the accuracy on each and the norm effect, in percent."""
    benchmark = to_avalanche(stream, seed)
    torch.manual_seed(seed)
    model = network()
    evaluator = EvaluationPlugin(accuracy_metrics(experience=True), NormEffect(samples=effect_samples), loggers=[])
    strategy = Replay(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=SETTINGS["lr"]),
        criterion=nn.CrossEntropyLoss(),
        mem_size=SETTINGS["memory"],
        train_mb_size=SETTINGS["batch"],
        eval_mb_size=256,
        plugins=plugins(variant),
        evaluator=evaluator,
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
    logged = strategy.eval(benchmark.test_stream)
    tasks = [logged[f"Top1_Acc_Exp/eval_phase/test_stream/Task000/Exp{task:03}"] for task in range(stream.num_tasks)]
    effects = [logged[f"NormEffect_Exp/eval_phase/test_stream/Task000/Exp{task:03}"] for task in range(len(tasks))]
    return {"seed": seed, "accuracy": [100 * value for value in tasks], "effect": [100 * value for value in effects]}


def summary(values: list[float]) -> dict[str, float]:
    """Mean and standard deviation over seeds."""
    return {"mean": round(fmean(values), 2), "std": round(stdev(values) if len(values) > 1 else 0.0, 2)}


def main() -> None:
    """Run all variants, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="folder of data sets, with MNIST")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train-per-task", type=int, help="training samples per task; default: all")
    parser.add_argument("--test-per-task", type=int, help="test samples per task; default: all")
    parser.add_argument("--effect-samples", type=int, default=1000, help="training samples per task for NormEffect")
    parser.add_argument("--bench", action="store_true", help="train with this package, and several memories")
    parser.add_argument("--runs", type=Path, help="folder of records, with --bench")
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    arguments = parser.parse_args()
    # Avalanche 0.6 calls functions that it deprecates itself, and EvaluationPlugin warns about missing loggers.
    warnings.filterwarnings("ignore", module="avalanche")
    source: dict[str, Any] = {} if arguments.data_root else {"source": "digits"}
    sizes = {"train_per_task": arguments.train_per_task, "test_per_task": arguments.test_per_task}
    stream = bench.load_stream("split-mnist", root=arguments.data_root, scenario="class", **source, **sizes)
    record: dict[str, Any] = {
        "versions": {
            "contnorm": contnorm.__version__,
            **{package: version(package) for package in ("avalanche-lib", "torch")},
            "python": platform.python_version(),
        },
        "stream": {"name": "split-mnist", "source": stream.source.name, "scenario": "class", **sizes},
        "strategy": "er" if arguments.bench else "avalanche.training.Replay",
        "network": NETWORK,
        "settings": SETTINGS,
        "effect_samples": arguments.effect_samples,
        "variants": {},
    }
    for name, memory in memories().items() if arguments.bench else ():
        record["variants"][name] = {}
        for norm, label in (("bn", "BN"), (f"cn{SETTINGS['groups']}", "CN")):
            values = train_in_bench(stream, memory, norm, arguments.seeds, arguments.runs)
            record["variants"][name][label] = {**summary(values), "accuracy": values}
            print(name, label, summary(values), flush=True)
    for variant in () if arguments.bench else VARIANTS:
        runs = [train(stream, variant, seed, arguments.effect_samples) for seed in range(arguments.seeds)]
        totals = {key: summary([fmean(run[key]) for run in runs]) for key in ("accuracy", "effect")}
        record["variants"][variant] = {**totals, "runs": runs}
        accuracy, effect = totals["accuracy"], totals["effect"]
        print(f"{variant:20} accuracy {accuracy['mean']:.2f} ± {accuracy['std']:.2f}, ", end="")
        print(f"norm effect {effect['mean']:+.2f} ± {effect['std']:.2f} points", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
