"""Strategies with state and hooks: bit-exact results after kills at random places, and in several lanes."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.memories import MEMORIES
from tests.bench.engine.stopped_runs import finish, kill, same_state

CPU = torch.device("cpu")
MINE = """
import torch
from dataclasses import dataclass
from contnorm.bench import Strategy, forward

class Mine(Strategy):
    @dataclass(frozen=True)
    class Settings:
        decay: float = 0.9

    def setup(self):
        self.means = torch.nn.ParameterList(torch.zeros_like(p) for p in self.model.parameters()).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("factors", torch.zeros(3))
        self.tasks = 0

    def on_task_start(self, task):
        self.tasks += 1
        self.factors[task.number] = torch.rand(())  # seeded by the run

    def on_task_end(self, task, data):
        self.calls += len(data)
        with torch.no_grad():
            for batch in data.batches(7):
                forward(self.model.train(), batch)  # changes the running moments
            for mean in self.means:
                mean.mul_(0.5)

    def after_backward(self, grads):
        for mean, grad in zip(self.means, grads.values(), strict=True):
            mean.lerp_(grad, 1 - self.settings.decay)
            grad.add_(mean, alpha=0.5)

    def get_extra_state(self):
        return torch.tensor(self.tasks)

    def set_extra_state(self, state):
        self.tasks = int(state)

    def loss(self, model, head, stream, memory):
        factor = float(self.factors.sum()) + 0.01 * self.calls + 0.1 * self.tasks
        return head.cross_entropy(forward(model, stream), stream).mean() * factor, None
"""


def settings(strategy: dict[str, Any], scenario: str = "class", **groups: Any) -> RunConfig:
    values = {
        "stream": {"name": "split-mnist", "tasks": 3, "train_per_task": 30, "scenario": scenario, "source": "digits"},
        "strategy": strategy,
        "norm": {"name": "bn"},
        "model": {"width": 12},
        "train": {"batch": 6, "replay": 4, "lr": 0.05},
        "memory": {"kind": "reservoir", "size": 20},
        **groups,
    }
    return resolve(values, Path("data"))


def trainer_of(config: RunConfig, seed: int = 0) -> Trainer:
    return Trainer(config, seed, load_source("digits", Path("data")), CPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "scenario"),
    [("er", "task"), ("er-ace", "class"), ("derpp", "class"), ("ewc", "task"), ("lwf", "class"), ("mine", "class")],
)
def test_run_killed_at_random_places_equals_one_never_stopped(tmp_path: Path, strategy: str, scenario: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    config = settings({"name": f"{tmp_path / 'mine.py'}:Mine" if strategy == "mine" else strategy}, scenario)
    whole = trainer_of(config)
    expected = finish([whole])
    rng, places = random.Random(f"{strategy} {scenario}"), []
    for number in range(5):
        folder = tmp_path / str(number)
        for _ in range(rng.choice([1, 2])):
            places.append(kill(lambda: [trainer_of(config)], [folder], rng))
        resumed = trainer_of(config)
        assert finish([resumed], [folder]) == expected
        assert same_state(resumed, whole)
    assert len(set(places)) >= 3


@pytest.mark.parametrize("memory", MEMORIES)
def test_run_with_each_memory_killed_at_random_places_equals_one_never_stopped(tmp_path: Path, memory: str) -> None:
    config = settings({"name": "derpp"}, memory={"kind": memory, "size": 20})
    whole = trainer_of(config)
    expected, rng = finish([whole]), random.Random(memory)
    for _ in range(3):
        kill(lambda: [trainer_of(config)], [tmp_path], rng)
    resumed = trainer_of(config)
    assert finish([resumed], [tmp_path]) == expected and same_state(resumed, whole)


def test_runs_together_equal_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    configs = [
        settings({"name": "lwf", "temperature": 4.0}),
        settings({"name": "lwf"}),
        settings({"name": "ewc", "strength": 50.0}),
        settings({"name": "er-ace"}),
        settings({"name": f"{tmp_path / 'mine.py'}:Mine", "decay": 0.5}),
        settings({"name": "er"}),
    ]
    alone = [[trainer_of(config, seed)] for config in configs for seed in (0, 1)]
    expected = [finish(each)[0] for each in alone]
    together = [trainer_of(config, seed) for config in configs for seed in (0, 1)]
    assert finish(together) == expected
    assert all(same_state(a, b) for a, (b,) in zip(together, alone, strict=True))
