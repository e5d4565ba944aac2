"""Runs with norms whose running moments follow rules of their own: results, resuming, lanes and settings."""

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import Trainer
from contnorm.convert import convert_norm
from contnorm.moments.freeze import frozen_stats
from tests.bench.engine.stopped_runs import finish, kill, same_state

CPU = torch.device("cpu")
RIVALS = ("bnt", "iabn", "rbn")
TAGGED = ("adab2n", "tbbn")  # not defined for separate forward passes


NETWORK = """
from torch import nn

def make(shape, outputs, norm):
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, stride=4), norm(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2), norm(8), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(outputs),
    )
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)


def settings(norm: str, strategy: str = "er", forward: str = "joint", **options: Any) -> RunConfig:
    values: dict[str, Any] = {
        "stream": {"name": "split-mnist", "tasks": 3, "train_per_task": 30, "scenario": "class", "source": "digits"},
        "strategy": {"name": strategy, **({} if strategy == "single" else {"forward": forward})},
        "norm": {"name": norm, **options},
        "model": {"name": "small.py:make"},
        "train": {"batch": 6, "replay": 4, "lr": 0.05},
        "memory": {"kind": "reservoir", "size": 20},
    }
    return resolve(values, Path("data"))


def trainer_of(config: RunConfig, seed: int = 0) -> Trainer:
    return Trainer(config, seed, load_source("digits", Path("data")), CPU)


@pytest.mark.parametrize("norm", RIVALS)
@pytest.mark.parametrize(("strategy", "forward"), [("er", "joint"), ("er", "separate"), ("derpp", "separate")])
def test_run_updates_all_moments(norm: str, strategy: str, forward: str) -> None:
    trainer = trainer_of(settings(norm, strategy, forward))
    before = copy.deepcopy(trainer.model.state_dict())
    finish([trainer])
    for name, value in trainer.model.state_dict().items():
        assert value.isfinite().all()
        assert not name.endswith(("running_mean", "running_var")) or not torch.equal(value, before[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "strategy", "forward"),
    [*((norm, "er", "joint") for norm in (*RIVALS, *TAGGED)), *((norm, "derpp", "separate") for norm in RIVALS)],
)
def test_killed_run_equals_one_never_stopped(tmp_path: Path, norm: str, strategy: str, forward: str) -> None:
    config = settings(norm, strategy, forward)
    whole = trainer_of(config)
    expected = finish([whole])
    rng = random.Random(f"{norm} {strategy}")
    for number in range(3):
        kill(lambda: [trainer_of(config)], [tmp_path / str(number)], rng)
        resumed = trainer_of(config)
        assert finish([resumed], [tmp_path / str(number)]) == expected
        assert same_state(resumed, whole)


@pytest.mark.slow
def test_runs_together_equal_runs_alone() -> None:
    configs = [settings(norm, *rest) for norm in (*RIVALS, *TAGGED) for rest in (("er", "joint"), ("derpp", "joint"))]
    alone = [[trainer_of(config, seed)] for config in configs for seed in (0, 1)]
    expected = [finish(each)[0] for each in alone]
    together = [trainer_of(config, seed) for config in configs for seed in (0, 1)]
    assert finish(together) == expected
    assert all(same_state(a, b) for a, (b,) in zip(together, alone, strict=True))


@pytest.mark.parametrize("forward", ["joint", "separate"])
def test_balanced_moments_equal_a_plain_loop(forward: str) -> None:
    """The same training with batch norms: frozen moments in the training passes, and one pass of the balanced batch."""
    config = settings("bnt", forward=forward)
    trainer = trainer_of(config)
    model: Any = convert_norm(copy.deepcopy(trainer.model), "bn").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr)
    data, items = trainer.data, trainer.data.sequence.train
    pixels = data.train_x(torch.arange(len(items.label)))
    for number, step in enumerate(trainer.plan.steps):
        replay, extra = (torch.from_numpy(np.asarray(each)) for each in step.replay)
        stream = torch.from_numpy(np.asarray(step.stream))
        assert len(extra) == (0 if number == 0 else min(config.train.replay, 20))
        if number == 0:  # no sample is stored yet, so the batch of the stream updates the moments
            loss = F.cross_entropy(model(pixels[stream]), torch.from_numpy(items.label[stream]))
        else:
            with torch.no_grad():
                model(pixels[extra])
            parts = [torch.cat([stream, replay])] if forward == "joint" else [stream, replay]
            with frozen_stats(model):
                logits = torch.cat([model(pixels[part]) for part in parts])
            label = torch.from_numpy(items.label[torch.cat([stream, replay])])
            sizes = [len(stream), len(replay)]
            losses = [F.cross_entropy(*pair) for pair in zip(logits.split(sizes), label.split(sizes), strict=True)]
            loss = F.cross_entropy(logits, label) if forward == "joint" else losses[0] + losses[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trainer.step()
        if number == 4:
            break
    for (name, actual), expected in zip(trainer.model.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    counters = [v for name, v in trainer.model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert counters and all(counter == 5 for counter in counters)


def test_run_without_replay_gets_balanced_batches_too() -> None:
    """The memory then serves the moments alone: the batches of the stream count once, in the first step."""
    trainer = trainer_of(settings("bnt", "single"))
    finish([trainer])
    layer: Any = next(module for module in trainer.model.modules() if hasattr(module, "replay_request"))
    assert layer.num_batches_tracked == len(trainer.plan.steps)
    assert all(len(step.replay[-1]) == 4 for step in trainer.plan.steps[1:])
