"""Which steps are captured and replayed, without a GPU: a stand-in for a CUDA graph repeats the captured step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.cuda_graph import SHORT, GraphStepper
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams import device as image_store
from tests.datasets import small_cifar100


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=26)  # 130 a task


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return load_source("cifar100", root)


def settings(root: Path, strategy: str = "er", batch: int = 4, **norm: Any) -> RunConfig:
    values: dict[str, Any] = {
        "stream": {"name": "split-cifar100", "tasks": 4},
        "strategy": {"name": strategy},
        "norm": {"name": "bn", **norm},
        "model": {"width": 2, "stem": "pool"},
        "train": {"lr": 0.01, "batch": batch, "replay": batch},
        "evaluate": {"drift": False},
    }
    return resolve(values, root)


@pytest.fixture
def stepper_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Trainer]], Any]:
    """Steppers that record the steps of their captures. A graph repeats the step, with the rows of its capture."""

    class Stepper(GraphStepper):
        def __init__(self, trainers: list[Trainer]) -> None:
            super().__init__(trainers)
            self.captures: list[int] = []
            self.replays = 0

        def _step_all_lanes(self) -> None:
            self._step_with(self.rows)

        def _step_with(self, rows: Any) -> None:
            for number, trainer in enumerate(self.trainers):
                self.losses[number].copy_(trainer.learn(rows[number].at(self.cursor)).detach())
            self.cursor.add_(1)

        def _capture(self) -> Any:
            self.captures.append(self.trainers[0].done)
            tables = list(self.rows)

            def replay() -> None:
                self.replays += 1
                self._step_with(tables)

            return SimpleNamespace(replay=replay)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    return Stepper


def train_eagerly(config: RunConfig, source: Source, steps: int) -> Trainer:
    trainer = Trainer(config, 0, source, torch.device("cpu"))
    for _ in range(steps):
        trainer.step()
    return trainer


def assert_equal(trainer: Trainer, expected: Trainer) -> None:
    state, other = trainer.state(), expected.state()
    assert state.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def test_later_tasks_replay_the_graph_of_the_second(root: Path, source: Source, stepper_of: Any) -> None:
    """Each task has 32 batches of 4 and a last one of 2, which runs without a graph; the first task has no replay."""
    config = settings(root)
    trainer = Trainer(config, 0, source, torch.device("cpu"))
    ends, steps = trainer.plan.ends, len(trainer.plan.steps)
    stepper = stepper_of([trainer])
    stepper.advance(steps)
    assert ends == (33, 66, 99, 132)
    assert stepper.captures == [1, 34]
    assert stepper.replays == steps - 4 - 2  # four last batches, and one step before each capture
    assert_equal(trainer, train_eagerly(config, source, steps))


@pytest.mark.parametrize("window", [None, 11])
def test_later_tasks_may_have_more_steps_than_the_rows_of_the_graph(
    root: Path, source: Source, stepper_of: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stepper begins in the second task, as after a resume, or the feed has the images of eleven steps only."""
    if window is not None:
        monkeypatch.setattr(image_store.ImageFeed, "reach", lambda feed, start, end: min(end, start + window))
    config = settings(root)
    trainer = train_eagerly(config, source, 38)
    steps = len(trainer.plan.steps)
    stepper = stepper_of([trainer])
    stepper.advance(steps - trainer.done)
    assert stepper.captures == [39]
    assert len(stepper.last_captured.rows[0].table) == min(65 - 38, window or steps)
    assert_equal(trainer, train_eagerly(config, source, steps))


def test_frozen_moments_need_a_graph_of_their_own(root: Path, source: Source, stepper_of: Any) -> None:
    """Without replay, with full batches only, all steps have the same sizes."""
    config = settings(root, "single", freeze_after=2)
    config = replace(config, train=replace(config.train, partial="drop"))
    trainer = Trainer(config, 0, source, torch.device("cpu"))
    stepper = stepper_of([trainer])
    stepper.advance(len(trainer.plan.steps))
    assert stepper.captures == [1, trainer.plan.ends[1] + 1]
    assert_equal(trainer, train_eagerly(config, source, trainer.done))


def test_a_reset_forgets_the_graph(root: Path, source: Source, stepper_of: Any) -> None:
    config = settings(root)
    trainer = Trainer(config, 0, source, torch.device("cpu"))
    stepper = stepper_of([trainer])
    for end in trainer.plan.ends:
        stepper.advance(end - trainer.done)
        stepper.reset()
    assert stepper.captures == [1, 34, 67, 100]


def test_steps_of_user_code_are_captured_and_checked_in_every_stretch(
    root: Path, source: Source, stepper_of: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        """
from contnorm.bench import Strategy

class Mine(Strategy):
    def loss(self, model, head, stream):
        return head.cross_entropy(model(stream.x), stream).mean(), None
"""
    )
    config = settings(root, f"{tmp_path / 'mine.py'}:Mine")
    trainer = Trainer(config, 0, source, torch.device("cpu"))
    stepper = stepper_of([trainer])
    stepper.advance(len(trainer.plan.steps))
    assert stepper.captures == [3, 36, 69, 102]


def test_short_stretches_are_not_captured(root: Path, source: Source, stepper_of: Any) -> None:
    """With batches of 6, a task has 21 full ones, which are too few for a graph."""
    config = settings(root, "single", batch=6)
    trainer = Trainer(config, 0, source, torch.device("cpu"))
    assert trainer.plan.ends[0] - 1 < SHORT
    stepper = stepper_of([trainer])
    stepper.advance(len(trainer.plan.steps))
    assert stepper.captures == []
