"""Settings, state and hooks of a user's strategy, on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.execute import execute
from contnorm.bench.engine.hooks import task_items
from contnorm.bench.engine.run import Run, RunOptions
from contnorm.bench.engine.trainer import Trainer
from contnorm.errors import UserCodeError, UserError
from tests.bench.engine.stopped_runs import finish, same_state

CPU = torch.device("cpu")
HEAD = """
import copy
from dataclasses import dataclass
import torch
from contnorm.bench import Strategy, forward

CALLS = []

class Base(Strategy):
    def loss(self, model, head, stream):
        return head.cross_entropy(forward(model, stream), stream).mean(), None
"""
SETTINGS = """
class Mine(Base):
    @dataclass(frozen=True)
    class Settings:
        temperature: float = 2.0
        layers: int = 1
        kind: str = "soft"
        limit: float | None = 1.0

    def loss(self, model, head, stream):
        loss, _ = super().loss(model, head, stream)
        return loss / self.settings.temperature, None
"""


def user_strategy(folder: Path, body: str, name: str = "Mine") -> str:
    (folder / "mine.py").write_text(HEAD + body)
    return f"{folder / 'mine.py'}:{name}"


def settings(name: str, stream: dict[str, Any] | None = None, own: Any = None, **groups: Any) -> RunConfig:
    short = {"name": "split-mnist", "tasks": 3, "train_per_task": 20, "source": "digits"}
    strategy = {"name": name, **(own or {})}
    return resolve({"stream": {**short, **(stream or {})}, "strategy": strategy, **groups}, Path("data"))


def trainer_of(config: RunConfig) -> Trainer:
    return Trainer(config, 0, load_source("digits", Path("data")), CPU)


def last_event(config: RunConfig, runs: Path | None) -> object:
    *_, last = execute([Run(config, 0)], RunOptions(runs=runs, data_root=Path("data")))
    return last


def test_own_settings_reach_the_strategy_and_the_record(tmp_path: Path) -> None:
    config = settings(user_strategy(tmp_path, SETTINGS), own={"temperature": 4, "limit": None})
    assert trainer_of(config).strategy.settings.temperature == 4.0
    assert dict(config.strategy.options) == {"temperature": 4.0, "layers": 1, "kind": "soft", "limit": None}
    assert config.hash != settings(user_strategy(tmp_path, SETTINGS)).hash


@pytest.mark.parametrize(
    ("own", "expected"), [({}, ("separate", "all")), ({"forward": "joint"}, ("joint", "all"))], ids=["defaults", "set"]
)
def test_subclass_of_a_built_in_strategy_has_its_defaults(
    tmp_path: Path, own: dict[str, str], expected: tuple[str, str]
) -> None:
    body = "from contnorm.bench import ERACE\nclass Mine(ERACE):\n    name = 'mine'\n"
    config = settings(user_strategy(tmp_path, body), own=own)
    assert (config.strategy.forward, config.strategy.replay_from) == expected
    assert config.strategy == trainer_of(config).strategy.config


HOOKS = """
class Mine(Base):
    def setup(self):
        CALLS.append(("setup", self.model.training, str(self.device), len(self.head.competing)))

    def on_task_start(self, task):
        CALLS.append(("start", task.number, task.classes, task.tasks, self.model.training))

    def on_task_end(self, task, data):
        batches = list(data.batches(8))
        CALLS.append(("end", task.number, len(data), [len(batch) for batch in batches], self.model.training))
        for batch in batches:
            assert not batch.replayed.any() and set(batch.task.tolist()) == {task.number}
            forward(self.model, batch).sum().backward()  # gradients are dropped

    def after_backward(self, grads):
        assert all(grads[name] is p.grad for name, p in self.model.named_parameters())
        CALLS.append(("backward", torch.is_grad_enabled()))
        for grad in grads.values():
            grad.zero_()
"""


def test_hooks_are_called_in_order(tmp_path: Path) -> None:
    config = settings(user_strategy(tmp_path, HOOKS), stream={"tasks": 2}, train={"batch": 10})
    trainer = trainer_of(config)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    finish([trainer])
    calls = type(trainer.strategy).loss.__globals__["CALLS"]
    assert calls[0][2:] == ("cpu", 2)
    steps = [("backward", False)] * 2
    assert calls[1:] == [
        ("start", 0, (0, 1), 2, True),
        *steps,
        ("end", 0, 20, [8, 8, 4], True),
        ("start", 1, (2, 3), 2, True),
        *steps,
        ("end", 1, 20, [8, 8, 4], True),
    ]
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters()), "gradients were zero"


def test_replaced_gradients_are_used(tmp_path: Path) -> None:
    body = "class Mine(Base):\n    def after_backward(self, grads):\n        "
    halved, replaced = (
        trainer_of(settings(user_strategy(tmp_path, body + change)))
        for change in ("for grad in grads.values(): grad.mul_(0.5)", "grads |= {n: 0.5 * g for n, g in grads.items()}")
    )
    for trainer in (halved, replaced):
        trainer.step()
    assert same_state(halved, replaced)


def test_data_of_a_task_is_the_unaugmented_plan(tmp_path: Path) -> None:
    config = settings(user_strategy(tmp_path, HOOKS), train={"batch": 10, "passes": 2})
    trainer = trainer_of(config)
    items = task_items(trainer.plan, 1)
    first_pass = [step.stream for step in trainer.plan.steps[trainer.plan.ends[0] :][:2]]
    assert items.tolist() == [item for part in first_pass for item in part]
    (step,) = [s for s in trainer.plan.steps if s.stream.tolist() == items[:10].tolist()]
    assert step.task == 1


STEP_HOOKS = """
class Mine(Base):
    def setup(self):
        self.losses = []
    def on_step_start(self, step):
        assert len(self.losses) == step
    def on_step_end(self, step, loss):
        self.losses.append(float(loss))
"""


def test_step_hooks_need_a_run_without_graphs(tmp_path: Path) -> None:
    name = user_strategy(tmp_path, STEP_HOOKS)
    with pytest.raises(UserError, match=r"run on the host at every step.*Set train.graph=off"):
        last_event(settings(name), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    trainer = trainer_of(settings(name, train={"graph": "off"}))
    finish([trainer])
    assert len(trainer.strategy.losses) == len(trainer.plan.steps) == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["ewc", "lwf", "mine"])
def test_task_hooks_on_a_task_free_stream_are_refused(tmp_path: Path, strategy: str) -> None:
    name = user_strategy(tmp_path, HOOKS) if strategy == "mine" else strategy
    with pytest.raises(UserError, match=r"stream.scenario=free: .* no task boundaries, at which strategy .* has hooks"):
        trainer_of(settings(name, stream={"scenario": "free"}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("class Mine(Base):\n    def setup(self): self.missing", "in setup()"),
        (
            "class Mine(Base):\n    Settings = 3",
            "Settings must be a dataclass",
        ),
        (
            "class Mine(Base):\n    def loss(self, *args): return next(iter([])), None",
            "StopIteration",
        ),
    ],
)
def test_mistake_in_a_strategy_is_one_line_and_writes_nothing(tmp_path: Path, body: str, message: str) -> None:
    name = user_strategy(tmp_path, body)
    with pytest.raises(UserError) as error:
        last_event(settings(name), tmp_path / "runs")
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "runs").rglob("*.json"))


@pytest.mark.parametrize("hook", ["on_task_start", "on_task_end", "after_backward", "on_step_end"])
def test_error_in_a_hook_names_file_and_line(tmp_path: Path, hook: str) -> None:
    name = user_strategy(tmp_path, f"class Mine(Base):\n    def {hook}(self, *given):\n        self.missing\n")
    with pytest.raises(UserCodeError) as error:
        last_event(settings(name, train={"graph": "off"}), tmp_path / "runs")
    line = (HEAD + "class\ndef\n").count("\n") + 1
    assert f"mine.py, line {line}: AttributeError" in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "runs").rglob("*.json"))


def test_later_divergence_names_the_strategy(tmp_path: Path) -> None:
    body = (
        "class Mine(Base):\n    def on_task_start(self, task): self.factor = float('nan') if task.number else 1\n"
        "    def loss(self, *given):\n        loss, _ = super().loss(*given)\n        return loss * self.factor, None\n"
    )
    event = last_event(settings(user_strategy(tmp_path, body)), tmp_path / "runs")
    assert "the loss is nan at step" in getattr(event, "why", "")
    assert "or the loss of strategy" in getattr(event, "why", "")
