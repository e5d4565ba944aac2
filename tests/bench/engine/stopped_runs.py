"""Runs without records: train them, and kill and resume them at random places; for the CPU and for a GPU."""

import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from contnorm.bench.engine import evaluate, loop
from contnorm.bench.engine.loop import Lane, train_lanes
from contnorm.bench.engine.run import Event, Run
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.signals import StopSignals


def lanes_of(trainers: Sequence[Trainer], folders: Sequence[Path] | None = None) -> list[Lane]:
    """Lanes of trainers, which resume from the checkpoints in their folders."""
    files = [None if folders is None else folders[i] / "checkpoint.safetensors" for i in range(len(trainers))]
    lanes = [Lane(Run(t.config, t.seed), t, file) for t, file in zip(trainers, files, strict=True)]
    for lane in lanes:
        lane.resume()
    return lanes


def train(trainers: Sequence[Trainer], folders: Sequence[Path] | None = None, **options: Any) -> list[Event]:
    """Train to the end, or until a stop; gives the events."""
    return list(train_lanes(lanes_of(trainers, folders), **options))


def results(trainers: Sequence[Trainer], folders: Sequence[Path] | None = None, **options: Any) -> list[dict[str, Any]]:
    """Train to the end; gives the content of the records."""
    return [dict(event.results) for event in train(trainers, folders, **options) if event.kind == "finished"]


def finish(trainers: Sequence[Trainer], folders: Sequence[Path] | None = None) -> list[dict[str, Any]]:
    """Train to the end; gives the accuracy matrices."""
    return [found["matrix"] for found in results(trainers, folders)]


def same_state(a: Trainer, b: Trainer) -> bool:
    """Whether two trainers have the same state, bit for bit."""
    first, second = a.state(), b.state()
    return (a.progress(), first.keys()) == (b.progress(), second.keys()) and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def kill(make: Callable[[], list[Trainer]], folders: list[Path], rng: random.Random) -> int:
    """Resume a run and end it at a random place: stopped with a checkpoint, or killed with those written before.

    Signals arrive anywhere, also in an evaluation and at the end of a task. Gives the steps done.
    """
    trainers = make()
    lanes, ends = lanes_of(trainers, folders), trainers[0].plan.ends
    how = rng.choice(["kill", "stop", "stop in evaluation"])
    target = rng.choice(ends) if how == "stop in evaluation" else rng.randrange(1, ends[-1])
    logits = evaluate._logits

    def interrupted(trainer: Trainer, items: torch.Tensor) -> torch.Tensor:
        found = logits(trainer, items)
        if how == "stop in evaluation" and trainer.done >= target:
            signal.raise_signal(signal.SIGTERM)
        return found

    with (
        StopSignals(announce=False) as signals,
        mock.patch.object(loop, "GPU_SAVE_SECONDS", 0.0),  # or a killed run on a GPU would start again
        mock.patch.object(loop, "REPORT_EVERY", rng.choice([1, 2])),
        mock.patch.object(evaluate, "_logits", interrupted),
    ):
        stopped = lambda: bool(signals) or (how == "stop" and trainers[0].done >= target)  # noqa: E731
        events = train_lanes(lanes, stopped, every=rng.choice([1, 3, 5]))
        for event in events:
            if event.kind == "finished" or (how == "kill" and trainers[0].done >= target):
                break
        events.close()  # type: ignore[attr-defined]
    return trainers[0].done
