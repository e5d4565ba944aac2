"""Kill and resume a run at random places, for the CPU and for a GPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from contnorm.bench.engine.events import Finished

from contnorm.bench.engine import loop
from contnorm.bench.engine.checkpoint import Checkpoints
from contnorm.bench.engine.loop import train_together
from contnorm.bench.engine.trainer import Trainer


def finish(trainers: list[Trainer], folders: list[Path] | None = None) -> list[dict[str, Any]]:
    """Train to the end; gives the accuracy matrices."""
    checkpoints = None if folders is None else [Checkpoints(folder) for folder in folders]
    ends = {
        t: what.results["matrix"] for t, what in train_together(trainers, checkpoints) if isinstance(what, Finished)
    }
    return [ends[trainer] for trainer in trainers]


def same_state(a: Trainer, b: Trainer) -> bool:
    """Whether two trainers have the same state, bit for bit."""
    first, second = a.state(), b.state()
    return (a.progress(), first.keys()) == (b.progress(), second.keys()) and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def kill(make: Callable[[], list[Trainer]], folders: list[Path], rng: random.Random) -> int:
    """Resume a run and end it at a random place: stopped with a checkpoint, or killed with those written before.

    Stops are requested anywhere, also in an evaluation and at the end of a task. Gives the steps done.
    """
    trainers, checkpoints = make(), [Checkpoints(folder) for folder in folders]
    ends = trainers[0].plan.ends
    how = rng.choice(["kill", "stop", "stop in evaluation"])
    target = rng.choice(ends) if how == "stop in evaluation" else rng.randrange(1, ends[-1])
    calls, wait = itertools.count(), rng.randrange(2, 6) if how == "stop in evaluation" else 0

    def stop() -> bool:
        return how != "kill" and trainers[0].done >= target and next(calls) >= wait

    every, report_every = rng.choice([1, 3, 5]), rng.choice([1, 2])
    events = train_together(trainers, checkpoints, every=every, report_every=report_every, stop=stop)
    with mock.patch.object(loop, "GPU_SAVE_SECONDS", 0.0):  # or a killed run on a GPU would start again
        for _, what in events:
            if isinstance(what, Finished) or (how == "kill" and trainers[0].done >= target):
                break
    events.close()  # type: ignore[attr-defined]
    return trainers[0].done
