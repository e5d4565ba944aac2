"""ER-ACE, online EWC and LwF against plain loops in float64, whose gradients are written out by hand."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from contnorm.bench.config.resolve import resolve
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.plan import Step

CPU = torch.device("cpu")
Logits = NDArray[np.float64]
STREAMS = {
    "task": {"name": "split-mnist", "tasks": 3, "train_per_task": 48, "scenario": "task"},
    "class": {"name": "split-mnist", "tasks": 3, "train_per_task": 48, "scenario": "class"},
    "domain": {"name": "permuted-mnist", "tasks": 3, "train_per_task": 48},
}
OWN: dict[str, dict[str, Any]] = {
    "er-ace": {},
    "ewc": {"strength": 30.0, "gamma": 0.5, "fisher_samples": 20},
    "lwf": {"temperature": 3.0, "strength": 2.0},
    "adapted lwf": {"temperature": 3.0, "strength": 2.0, "teacher_moments": "batch"},
}


def trainer_of(scenario: str, strategy: str) -> Trainer:
    values = {
        "stream": {**STREAMS[scenario], "source": "digits"},
        "strategy": {"name": strategy.split()[-1], **OWN.get(strategy, {})},
        "norm": {"name": "bn"},
        "model": {"width": 20},
        "train": {"batch": 8, "replay": 6, "lr": 0.05},
        "memory": {"kind": "reservoir", "size": 30},
    }
    return Trainer(resolve(values, Path("data")), 3, load_source("digits", Path("data")), CPU)


def train(trainer: Trainer) -> dict[str, torch.Tensor]:
    for task, end in enumerate(trainer.plan.ends):
        trainer.start_task(task)
        while trainer.done < end:
            trainer.step()
        trainer.end_task(task)
    return trainer.model.state_dict()


def softmax(logits: Logits, allowed: NDArray[np.bool_]) -> Logits:
    """Over the allowed outputs of each row; 0 elsewhere."""
    exponentials = np.where(allowed, np.exp(logits - logits.max(1, keepdims=True)), 0.0)
    return exponentials / exponentials.sum(1, keepdims=True)


class PlainLoop:
    """Training in float64 on the samples of a plan, with gradients of the logits that a subclass writes out."""

    def __init__(self, trainer: Trainer) -> None:
        self.plan, self.sequence, self.data = trainer.plan, trainer.data.sequence, trainer.data
        self.lr, self.own = trainer.config.train.lr, OWN[trainer.config.strategy.name]
        self.net = copy.deepcopy(trainer.model).double()
        self.outputs = self.sequence.outputs
        self.seen: set[int] = set()

    def train(self) -> dict[str, torch.Tensor]:
        done = 0
        for task, end in enumerate(self.plan.ends):
            items: list[int] = []
            for step in self.plan.steps[done:end]:
                self.net.train().zero_grad()
                self.step(step, task)
                with torch.no_grad():
                    for p in self.net.parameters():
                        assert p.grad is not None
                        p -= self.lr * p.grad
                items += step.stream.tolist()
            done = end
            self.end_task(task, items)
        return self.net.state_dict()

    def run(self, items: Any, net: nn.Module | None = None) -> torch.Tensor:
        out: torch.Tensor = (net or self.net)(self.data.train_x(torch.as_tensor(items)).double())
        return out

    def competing(self, items: Any) -> NDArray[np.bool_]:
        return self.sequence.competing[self.sequence.train.task[items]]

    def labels(self, items: Any) -> NDArray[np.int64]:
        return self.sequence.train.label[items].astype(np.int64)

    def cross_entropy(self, logits: torch.Tensor, items: Any, allowed: NDArray[np.bool_]) -> torch.Tensor:
        """The gradient of the mean loss with respect to the logits."""
        probability = softmax(logits.detach().numpy(), allowed)
        return torch.from_numpy((probability - np.eye(self.outputs)[self.labels(items)]) / len(items))

    def step(self, step: Step, task: int) -> None:
        raise NotImplementedError

    def end_task(self, task: int, items: list[int]) -> None:
        pass


class PlainERACE(PlainLoop):
    def step(self, step: Step, task: int) -> None:
        present = set(self.labels(step.stream).tolist())
        self.seen |= present
        for items, classes in ((step.stream, present), (step.replay[0], self.seen)):
            if len(items):
                logits = self.run(items)
                allowed = self.competing(items) & np.isin(np.arange(self.outputs), list(classes))
                logits.backward(self.cross_entropy(logits, items, allowed))


class PlainEWC(PlainLoop):
    fisher: list[torch.Tensor] | None = None

    def step(self, step: Step, task: int) -> None:
        logits = self.run(step.stream)
        logits.backward(self.cross_entropy(logits, step.stream, self.competing(step.stream)))
        if self.fisher is not None:
            for p, fisher, old in zip(self.net.parameters(), self.fisher, self.old, strict=True):
                assert p.grad is not None
                p.grad += self.own["strength"] * fisher * (p.detach() - old)

    def end_task(self, task: int, items: list[int]) -> None:
        count = self.own["fisher_samples"]
        chosen = [items[i * len(items) // count] for i in range(count)]
        new = [torch.zeros_like(p) for p in self.net.parameters()]
        self.net.eval()
        for item in chosen:
            self.net.zero_grad()
            logits = self.run([item])
            logits.backward(self.cross_entropy(logits, [item], self.competing([item])))
            for total, p in zip(new, self.net.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad**2 / count
        earlier = self.fisher or [torch.zeros_like(p) for p in new]
        self.fisher = [self.own["gamma"] * a + b for a, b in zip(earlier, new, strict=True)]
        self.old = [p.detach().clone() for p in self.net.parameters()]


class PlainLwF(PlainLoop):
    old: nn.Module | None = None
    adapts = False

    def step(self, step: Step, task: int) -> None:
        logits = self.run(step.stream)
        gradient = self.cross_entropy(logits, step.stream, self.competing(step.stream))
        if self.old is not None:
            target = self.run(step.stream, self.old).detach().numpy()
            t = self.own["temperature"]
            for group in self.old_groups(task):
                allowed = np.broadcast_to(group, target.shape)
                difference = softmax(logits.detach().numpy() / t, allowed) - softmax(target / t, allowed)
                gradient += self.own["strength"] * torch.from_numpy(difference) / t / len(target)
        logits.backward(gradient)

    def old_groups(self, task: int) -> list[NDArray[np.bool_]]:
        if not self.sequence.competing.all():
            return list(self.sequence.competing[:task])
        return [np.isin(np.arange(self.outputs), list(self.seen))]

    def end_task(self, task: int, items: list[int]) -> None:
        self.old = copy.deepcopy(self.net).train(self.adapts)
        self.seen |= set(self.labels(items).tolist())


class PlainAdaptedLwF(PlainLwF):
    """The old network in training mode, which is Teacher Adaptation in a network without dropout."""

    adapts = True


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a if a[name].is_floating_point())


@pytest.mark.parametrize("scenario", STREAMS)
@pytest.mark.parametrize("plain", [PlainERACE, PlainEWC, PlainLwF, PlainAdaptedLwF])
def test_strategy_equals_a_plain_loop_in_float64(scenario: str, plain: type[PlainLoop]) -> None:
    strategy = {PlainERACE: "er-ace", PlainEWC: "ewc", PlainLwF: "lwf", PlainAdaptedLwF: "adapted lwf"}[plain]
    trainer = trainer_of(scenario, strategy)
    expected = plain(trainer).train()
    fine_tuned = train(trainer_of(scenario, "single"))
    assert distance(train(trainer), expected) < 2e-5  # sums of 18 steps in float32
    assert distance(fine_tuned, expected) > 1e-2, "the strategy makes a difference"


def test_moments_of_the_old_network_are_no_setting_at_their_default() -> None:
    """The hash of a run without Teacher Adaptation is that of before the setting."""
    plain, stated, adapted = (
        resolve({"strategy": {"name": "lwf", **own}, "stream": {"source": "digits"}}, Path("data"))
        for own in ({}, {"teacher_moments": "running"}, {"teacher_moments": "batch"})
    )
    assert dict(plain.strategy.options) == {"strength": 1.0, "temperature": 2.0}
    assert plain.hash == stated.hash != adapted.hash


def test_old_network_of_lwf_keeps_its_moments_while_it_distills() -> None:
    trainer = trainer_of("class", "lwf")
    old: nn.Module = trainer.strategy.old  # type: ignore[attr-defined]
    for task in range(2):
        trainer.start_task(task)
        while trainer.done < trainer.plan.ends[task]:
            before = copy.deepcopy(old.state_dict())
            trainer.step()
            assert all(torch.equal(before[name], tensor) for name, tensor in old.state_dict().items())
        trainer.end_task(task)
        assert all(torch.equal(tensor, trainer.model.state_dict()[name]) for name, tensor in old.state_dict().items())
