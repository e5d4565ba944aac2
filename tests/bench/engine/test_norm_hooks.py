"""What layers of a network may ask of the engine: tags, task hooks, an auxiliary loss, an extra batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import PlanCache
from contnorm.errors import UserCodeError, UserError
from contnorm.tags import ReplayRequest
from tests.bench.engine.stopped_runs import finish

CPU = torch.device("cpu")
FREE = {"name": "split-mnist", "tasks": 2, "train_per_task": 24, "source": "digits", "scenario": "free"}
NETWORK = """
import torch
from torch import nn
from contnorm import BatchTags, ReplayRequest, current_tags
from contnorm.bench import Strategy, forward

class Probe(nn.BatchNorm1d):
    def __init__(self, channels):
        super().__init__(channels)
        self.calls = []

class Tagged(Probe):
    needs_tags = True
    def forward(self, x):
        tags = current_tags(len(x))
        if self.training and tags is not None:
            self.calls.append((tags.replayed.tolist(), tags.task.tolist(), tags.is_extra, tags.extra_size))
        return super().forward(x)

class Extra(Tagged):
    replay_request = ReplayRequest(size=7, balance="class")

class OnTasks(Probe):
    def on_task_start(self, task):
        self.calls.append(("start", task))
    def on_task_end(self, task):
        self.calls.append(("end", task))

class Penalized(Probe):
    def auxiliary_loss(self):
        return 3 * self.weight.square().sum()

class Truthy(Tagged):
    needs_tags = 1

def network(layer):
    def make(shape, outputs, norm):
        size = shape[0] * shape[1] * shape[2]
        return nn.Sequential(nn.Flatten(), nn.Linear(size, 6), layer(6), nn.ReLU(), nn.Linear(6, outputs))
    return make

tagged, extra, on_tasks, penalized = map(network, (Tagged, Extra, OnTasks, Penalized))
truthy, plain = map(network, (Truthy, Probe))

class Untagged(Strategy):
    def loss(self, model, head, stream):
        return head.cross_entropy(model(stream.x), stream).mean(), None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(NETWORK)
    return tmp_path / "own.py"


def settings(file: Path, network: str, strategy: str = "er", **groups: Any) -> RunConfig:
    values: dict[str, Any] = {
        "stream": {"name": "split-mnist", "tasks": 3, "train_per_task": 24, "source": "digits", "scenario": "class"},
        "model": {"name": f"{file}:{network}"},
        "norm": {"name": "bn"},
        "strategy": {"name": strategy},
        "train": {"batch": 8, "replay": 5},
        "memory": {"kind": "reservoir", "size": 20},
    }
    return resolve({**values, **groups}, Path("data"))


def trainer_of(config: RunConfig, seed: int = 0) -> Trainer:
    return Trainer(config, seed, load_source("digits", Path("data")), CPU, any_norm=True)


def layer_of(trainer: Trainer) -> Any:
    return trainer.model[2]  # type: ignore[index]


def test_passes_of_a_step_carry_the_tags_of_their_samples(file: Path) -> None:
    trainer = trainer_of(settings(file, "tagged"))
    layer_of(trainer).calls.clear()
    finish([trainer])
    task = trainer.data.sequence.train.task
    for step, call in zip(trainer.plan.steps, layer_of(trainer).calls, strict=True):  # one joint pass a step
        items = np.concatenate([step.stream, step.replay[0]])
        replayed = [False] * len(step.stream) + [True] * len(step.replay[0])
        assert call == (replayed, task[items].tolist(), False, 0)


def test_strategy_without_tags_is_refused_for_a_norm_that_needs_them(file: Path) -> None:
    trainer = trainer_of(settings(file, "tagged", f"{file}:Untagged"))
    with pytest.raises(
        UserCodeError, match=r"Untagged': its loss calls model\(x\) without .*bench.forward\(model, batch"
    ):
        trainer.step()


def test_layers_are_called_at_task_boundaries_once(file: Path) -> None:
    trainer = trainer_of(settings(file, "on_tasks"))
    finish([trainer])
    assert layer_of(trainer).calls == [(kind, task) for task in range(3) for kind in ("start", "end")]
    with pytest.raises(UserError, match=r"no task boundaries, at which norm 'bn' has hooks"):
        trainer_of(settings(file, "on_tasks", stream=FREE))


def test_auxiliary_loss_is_added_to_the_loss(file: Path) -> None:
    with_loss, without = (trainer_of(settings(file, name, "single")) for name in ("penalized", "plain"))
    without.model.load_state_dict(with_loss.model.state_dict())
    losses, weight = [float(t.step()) for t in (with_loss, without)], layer_of(without).weight
    assert losses[0] == pytest.approx(losses[1] + 3 * 6, rel=1e-6)  # 6 weights of one
    lr = with_loss.config.train.lr
    torch.testing.assert_close(layer_of(with_loss).weight, weight - lr * 6)  # the gradient of 3 * 1**2 is 6


@pytest.mark.parametrize("strategy", ["er", "derpp", "single"])
def test_extra_batch_has_its_own_pass_and_changes_no_other_draw(file: Path, strategy: str) -> None:
    config = settings(file, "extra", strategy)
    trainer, other = trainer_of(config), trainer_of(settings(file, "plain", strategy))
    layer_of(trainer).calls.clear()
    finish([trainer])
    calls, sequence = iter(layer_of(trainer).calls), trainer.data.sequence
    stored: set[int] = set()  # what can be in the memory
    for step, plain in zip(trainer.plan.steps, other.plan.steps, strict=True):
        *draws, extra = step.replay
        for a, b in zip((step.stream, *draws), (plain.stream, *plain.replay), strict=True):
            assert np.array_equal(a, b)
        assert len(extra) == (7 if stored else 0) and set(extra.tolist()) <= stored
        if stored:
            assert next(calls) == ([True] * 7, sequence.train.task[extra].tolist(), True, 7)
        _, _, is_extra, extra_size = next(calls)
        assert not is_extra and extra_size == len(extra)
        stored |= set(step.stream.tolist())
    assert next(calls, None) is None


def memory_content(trainer: Trainer) -> list[dict[int, int]]:
    """The item in each slot before each step, from the plan's writes."""
    content: dict[int, int] = {}
    contents = []
    for step in trainer.plan.steps:
        contents.append(dict(content))
        content |= {int(slot): int(item) for slot, item in zip(step.write, step.stream, strict=True) if slot >= 0}
    return contents


@pytest.mark.parametrize(("balance", "size"), [("none", 6), ("class", 6), ("class", 11), ("task", 9), ("class", None)])
def test_extra_draw_is_balanced_and_from_the_memory(file: Path, balance: Any, size: int | None) -> None:
    trainer = trainer_of(settings(file, "plain"))
    source = load_source("digits", Path("data"))
    _, plan = PlanCache(source).of(trainer.config, 0, 1, ReplayRequest(size, balance))
    items, uneven = trainer.data.sequence.train, 0
    for step, content in zip(plan.steps, memory_content(trainer), strict=True):
        extra, slots = step.replay[-1], step.replay_slots[-1]
        assert [content[slot] for slot in slots.tolist()] == extra.tolist() and len(set(slots.tolist())) == len(slots)
        assert len(extra) == min(5 if size is None else size, len(content))
        if not content:
            continue
        groups = (items.label if balance != "task" else items.task)[list(content.values())]
        of_extra = (items.label if balance != "task" else items.task)[extra]
        drawn = {group: int((of_extra == group).sum()) for group in set(groups.tolist())}
        full = [count for group, count in drawn.items() if count < (groups == group).sum()]  # could give more
        uneven += bool(full) and max(drawn.values()) - min(full) > 1
    assert (uneven == 0) == (balance != "none")
