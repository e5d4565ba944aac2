"""Several updates per stream batch: a loop in plain torch, a kill between two updates, and the draws of each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm import bench
from contnorm.bench.config.schema import from_dict
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import Step
from tests.bench.engine.stopped_runs import finish, same_state, train

CPU, SEED, LR, ALPHA, BETA = torch.device("cpu"), 3, 0.05, 0.3, 0.7
RNG = np.random.default_rng(0)
MEANS = RNG.normal(size=(6, 12))
LABELS, TEST_LABELS = np.repeat(np.arange(6), 40), np.repeat(np.arange(6), 20)
X, X_TEST = (MEANS[y] + RNG.normal(size=(len(y), 12)) for y in (LABELS, TEST_LABELS))
COMMON = {"train.updates": 2, "train.lr": LR, "train.replay": 6, "model.name": "mlp", "model.width": 16}
RESERVOIR = {"memory.kind": "reservoir", "memory.size": 30, "strategy.replay_from": "all"}
DERPP = {"strategy.name": "derpp", "strategy.alpha": ALPHA, "strategy.beta": BETA}
READINGS: dict[str, dict[str, Any]] = {
    "er": {"strategy.name": "er"},
    "er, separate and sum": {"strategy.name": "er", "strategy.forward": "separate", "strategy.loss": "sum"},
    "derpp": {**DERPP, **RESERVOIR},
    "derpp, separate and all outputs": {
        **DERPP,
        **RESERVOIR,
        "strategy.forward": "separate",
        "strategy.distance": "all",
    },
}


@pytest.fixture
def stream() -> bench.Stream:
    return bench.Stream.from_arrays(X, LABELS, X_TEST, TEST_LABELS, tasks=3, scenario="task")


def trainer_of(stream: bench.Stream, settings: dict[str, Any]) -> Trainer:
    config = bench.run(stream, norm="bn", settings={**COMMON, **settings, "train.max_steps": 1}, seeds=1).config
    values = config.as_dict()
    values["train"]["max_steps"] = None
    return Trainer(from_dict(values), SEED, stream.source, CPU)


def own_outputs(logits: Tensor, task: Tensor) -> Tensor:
    """The two outputs of each sample's task."""
    return logits.gather(1, 2 * task[:, None] + torch.arange(2))


class PlainLoop:
    """The run as a loop over the public plan, with nothing else of the package."""

    def __init__(self, stream: bench.Stream, settings: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.plan = stream.plan(SEED, settings={**COMMON, **settings})
        sequence = stream.sequence(SEED)
        self.x, self.label, self.task = self._samples(sequence.train, X)
        self.test_x, self.test_label, self.test_task = self._samples(sequence.test, X_TEST)
        self.separate = settings.get("strategy.forward") == "separate"
        self.dark = settings["strategy.name"] == "derpp"
        self.summed, self.all_outputs = "strategy.loss" in settings, "strategy.distance" in settings
        hidden = [layer for n in (12, 16) for layer in (nn.Linear(n, 16), nn.BatchNorm1d(16), nn.ReLU())]
        self.net = nn.Sequential(*hidden, nn.Linear(16, 6))
        self.net.load_state_dict(dict(zip(self.net.state_dict(), weights.values(), strict=True)))
        self.memory: dict[int, tuple[int, Tensor]] = {}  # the item and the logits in each slot

    @staticmethod
    def _samples(items: Any, x: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor(x[items.image]).float(), torch.tensor(items.label).long(), torch.tensor(items.task)

    def train(self) -> list[list[int]]:
        """Gives the correct test samples of each task so far, after each task."""
        optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
        rows: list[list[int]] = []
        for number, step in enumerate(self.plan.steps, 1):
            self.net.train()
            optimizer.zero_grad()
            for items, slots in zip(step.replay, step.replay_slots, strict=True):
                assert items.tolist() == [self.memory[slot][0] for slot in slots.tolist()]
            loss, logits = self.loss(step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            for item, slot, row in zip(step.stream.tolist(), step.write.tolist(), logits.detach(), strict=True):
                if slot >= 0:
                    self.memory[slot] = item, row
            if number in self.plan.ends:
                rows.append([self.correct(task) for task in range(len(rows) + 1)])
        return rows

    def loss(self, step: Step) -> tuple[Tensor, Tensor]:
        parts = [step.stream, *(draw for draw in step.replay if len(draw))]
        if self.separate:
            outputs = [self.net(self.x[items]) for items in parts]
        else:
            outputs = list(torch.split(self.net(self.x[np.concatenate(parts)]), [len(items) for items in parts]))
        losses = [self.cross_entropy(logits, items) for logits, items in zip(outputs, parts, strict=True)]
        if len(parts) == 1:
            return losses[0].mean(), outputs[0]
        if not self.dark:
            loss = losses[0].mean() + losses[1].mean() if self.summed else torch.cat(losses).mean()
            return loss, outputs[0]
        stored = torch.stack([self.memory[slot][1] for slot in step.replay_slots[0].tolist()])
        error = (outputs[1] - stored) ** 2
        error = error if self.all_outputs else own_outputs(error, self.task[parts[1]])
        return losses[0].mean() + ALPHA * error.mean() + BETA * losses[2].mean(), outputs[0]

    def cross_entropy(self, logits: Tensor, items: np.ndarray) -> Tensor:
        task = self.task[items]
        return F.cross_entropy(own_outputs(logits, task), self.label[items] - 2 * task, reduction="none")

    def correct(self, task: int) -> int:
        of_task = self.test_task == task
        self.net.eval()
        with torch.no_grad():
            chosen = own_outputs(self.net(self.test_x[of_task]), self.test_task[of_task]).argmax(1) + 2 * task
        return int((chosen == self.test_label[of_task]).sum())


@pytest.mark.parametrize("settings", READINGS.values(), ids=READINGS)
def test_run_equals_a_loop_in_plain_torch(stream: bench.Stream, settings: dict[str, Any]) -> None:
    trainer = trainer_of(stream, settings)
    start = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    loop = PlainLoop(stream, settings, start)
    assert len(loop.plan.steps) == 48 and loop.plan.ends == (16, 32, 48)
    rows = loop.train()
    (matrix,) = finish([trainer])
    assert [row[: i + 1] for i, row in enumerate(matrix["correct"])] == rows
    found = dict(zip(loop.net.state_dict(), trainer.model.state_dict().values(), strict=True))
    torch.testing.assert_close(found, dict(loop.net.state_dict()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", READINGS.values(), ids=READINGS)
def test_run_killed_between_two_updates_equals_one_never_stopped(
    stream: bench.Stream, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = trainer_of(stream, settings)
    expected = finish([whole])
    killed = trainer_of(stream, settings)
    assert (whole.plan.steps[18].stream == whole.plan.steps[19].stream).all()
    train([killed], [tmp_path], log_every=1, stop=lambda: killed.done == 19)
    assert killed.done == 19
    resumed = trainer_of(stream, settings)
    assert finish([resumed], [tmp_path]) == expected and same_state(resumed, whole)


def test_each_update_has_its_own_augmentation_and_replay() -> None:
    images, labels = np.zeros((240, 3, 8, 8), dtype=np.uint8), np.arange(240) % 6
    stream = bench.Stream.from_arrays(images, labels, images, labels, tasks=3, augment=True)
    settings = {**COMMON, **READINGS["derpp"], "model.name": "mlp"}
    steps = stream.plan(SEED, settings=settings).steps
    pairs = list(zip(steps[::2], steps[1::2], strict=True))
    assert len(pairs) == 24
    for first, second in pairs:
        assert (first.stream == second.stream).all()
        assert first.stream_views is not None and second.stream_views is not None
        assert not np.array_equal(first.stream_views, second.stream_views)
    for first, second in pairs[3:]:  # the reservoir is full
        for a, b in zip(first.replay_slots, second.replay_slots, strict=True):
            assert len(a) == len(b) == 6 and set(a.tolist()) != set(b.tolist())
