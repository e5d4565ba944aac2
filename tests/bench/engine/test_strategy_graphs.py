"""On a GPU: strategies with state and hooks in captured steps, in several lanes, after a kill; and what is refused."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.resolve import resolve
from contnorm.bench.config.schema import RunConfig
from contnorm.bench.data.dataset import Source
from contnorm.bench.data.registry import load_source
from contnorm.bench.engine.cuda_graph import SHORT, GraphStepper
from contnorm.bench.engine.provenance import numerics
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.streams import device as image_store
from contnorm.errors import UserCodeError
from tests.bench.engine.stopped_runs import finish, kill, same_state
from tests.datasets import small_cifar100

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
MINE = """
import copy
import torch
from torch import nn
from dataclasses import dataclass
from contnorm import ReplayRequest, current_tags
from contnorm.bench import Strategy, forward

class Base(Strategy):
    def loss(self, model, head, stream, memory):
        return head.cross_entropy(forward(model, stream), stream).mean(), None

class Momentum(Base):
    @dataclass(frozen=True)
    class Settings:
        decay: float = 0.9

    def setup(self):
        self.means = [torch.zeros_like(p) for p in self.model.parameters()]
        for number, mean in enumerate(self.means):
            self.register_buffer(f"mean_{number}", mean)
        self.old, self.tasks = copy.deepcopy(self.model).eval(), 0

    def get_extra_state(self):
        return torch.tensor(self.tasks)

    def set_extra_state(self, state):
        self.tasks = int(state)

    def on_task_start(self, task):
        self.tasks += 1  # read by captured steps, which are captured again

    def on_task_end(self, task, data):
        self.old.load_state_dict(self.model.state_dict())
        for mean in self.means:
            mean.mul_(0.5)

    def after_backward(self, grads):
        for mean, grad in zip(self.means, grads.values(), strict=True):
            mean.lerp_(grad, 1 - self.settings.decay)
            grad.add_(mean, alpha=0.5)

    def loss(self, model, head, stream, memory):
        loss, _ = super().loss(model, head, stream, memory)
        if self.tasks > 1:
            with torch.no_grad():
                old = self.old(stream.x)
            loss = loss + 0.1 * (forward(model, stream) - old).square().mean()
        return loss / self.tasks, None

class Item(Base):
    def loss(self, *given):
        loss, _ = super().loss(*given)
        return loss / (1 + loss.item()), None

class Branch(Base):
    def loss(self, *given):
        loss, _ = super().loss(*given)
        return (loss if loss > 1 else loss * 2), None

class Shapes(Base):
    def loss(self, model, head, stream, memory):
        logits = forward(model, stream)
        wrong = logits.argmax(1) != stream.label
        return logits[wrong].square().sum() / 100 + logits.square().mean(), None

class Drawing(Base):
    def loss(self, *given):
        loss, _ = super().loss(*given)
        return loss * torch.rand((), device=self.device), None

class Extra(nn.BatchNorm2d):
    needs_tags, replay_request = True, ReplayRequest(size=12, balance="class")
    def __init__(self, channels):
        super().__init__(channels)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        tags = current_tags(len(x)) if self.training else None
        if tags is not None:
            self.seen += tags.replayed.sum() * (3 if tags.is_extra else 1) + tags.task.sum()
        return super().forward(x) * (1 + self.seen * 1e-5)
    def on_task_end(self, task):
        self.seen.zero_()
    def auxiliary_loss(self):
        return 0.01 * self.weight.square().sum()

def network(shape, outputs, norm):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), Extra(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs)
    )
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_cifar100(tmp_path_factory.mktemp("data"), per_class=61)  # 305 a task: a last batch of 5


@pytest.fixture(scope="module")
def source(root: Path) -> Source:
    return load_source("cifar100", root)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("code") / "mine.py"
    file.write_text(MINE)
    return file


def settings(root: Path, strategy: dict[str, Any], **groups: Any) -> RunConfig:
    values: dict[str, Any] = {
        "stream": {"name": "split-cifar100", "tasks": 2, "scenario": "class"},
        "strategy": strategy,
        "norm": {"name": "bn"},
        "model": {"width": 16},
        "train": {"lr": 0.01},
        "memory": {"kind": "reservoir", "size": 60},
        "evaluate": {"drift": False},
    }
    return resolve({**values, **groups}, root)


def without_graph(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, graph="off"))


def strategies(file: Path) -> list[dict[str, Any]]:
    return [
        {"name": "er-ace"},
        {"name": "ewc", "strength": 30.0, "fisher_samples": 10},
        {"name": "lwf"},
        {"name": f"{file}:Momentum"},
        {"name": "derpp", "distance": "all"},
    ]


@pytest.mark.parametrize("number", range(5), ids=["er-ace", "ewc", "lwf", "user", "derpp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_equal_steps_in_python(
    root: Path, source: Source, file: Path, number: int, precision: str
) -> None:
    train = {"lr": 0.01, "precision": precision, "updates": 1 + number % 2}
    config = settings(root, strategies(file)[number], train=train)
    with numerics(config.train):
        captured, stepped = (Trainer(c, 0, source, CUDA) for c in (config, without_graph(config)))
        assert captured.plan.ends[0] > SHORT
        assert finish([captured]) == finish([stepped])
        assert same_state(captured, stepped)


def test_lanes_of_several_strategies_equal_runs_alone(root: Path, source: Source, file: Path) -> None:
    configs = [settings(root, strategy) for strategy in (*strategies(file), {"name": "er"})]
    with numerics(configs[0].train):
        together = [Trainer(config, seed, source, CUDA) for config in configs for seed in (0, 1)]
        found = finish(together)
        for trainer, matrix in zip(together, found, strict=True):
            alone = Trainer(trainer.config, trainer.seed, source, CUDA)
            assert finish([alone]) == [matrix] and same_state(alone, trainer)


@pytest.mark.parametrize("number", range(5), ids=["er-ace", "ewc", "lwf", "user", "derpp"])
def test_run_killed_on_a_gpu_equals_one_never_stopped(
    root: Path, source: Source, file: Path, tmp_path: Path, number: int
) -> None:
    config = settings(root, strategies(file)[number], model={"name": "mlp", "width": 32})
    rng = random.Random(number)
    with numerics(config.train):
        whole = Trainer(config, 0, source, CUDA)
        expected = finish([whole])
        for place in range(10):
            kill(lambda: [Trainer(config, 0, source, CUDA)], [tmp_path / str(place)], rng)
            resumed = Trainer(config, 0, source, CUDA)
            assert finish([resumed], [tmp_path / str(place)]) == expected
            assert same_state(resumed, whole)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Item", "its training step can't be captured as a CUDA graph"),
        ("Branch", "its training step can't be captured as a CUDA graph"),
        ("Shapes", "its training step can't be captured as a CUDA graph"),
        ("Drawing", "draws random numbers in a training step"),
    ],
)
def test_step_that_cannot_be_captured_is_refused_in_one_line(
    root: Path, source: Source, file: Path, name: str, message: str
) -> None:
    config = settings(root, {"name": f"{file}:{name}"})
    with numerics(config.train):
        with pytest.raises(UserCodeError) as error:
            finish([Trainer(config, 0, source, CUDA)])
        assert torch.rand(4, device=CUDA).unique().numel() == 4, "the process can draw random numbers on"
        text = str(error.value)
        assert message in text and f":{name}'" in text and "train.graph=off" in text and "\n" not in text
        first, second = (Trainer(without_graph(config), 0, source, CUDA) for _ in range(2))
        assert finish([first]) == finish([second])
        assert same_state(first, second)


def test_norm_hooks_in_captured_steps_equal_steps_in_python(root: Path, source: Source, file: Path) -> None:
    config = settings(root, {"name": "er"}, model={"name": f"{file}:network"})
    with numerics(config.train):
        captured, stepped = (Trainer(c, 0, source, CUDA, any_norm=True) for c in (config, without_graph(config)))
        assert finish([captured]) == finish([stepped])
        assert same_state(captured, stepped)
        assert float(captured.model[1].seen) == 0.0  # type: ignore[index]


@pytest.mark.parametrize("norm", ["bnt", "iabn", "rbn"])
@pytest.mark.parametrize("forward", ["joint", "separate"])
def test_norms_in_captured_steps_equal_steps_in_python(root: Path, source: Source, norm: str, forward: str) -> None:
    config = settings(root, {"name": "er", "forward": forward}, norm={"name": norm})
    with numerics(config.train):
        captured, stepped = (Trainer(c, 0, source, CUDA) for c in (config, without_graph(config)))
        assert finish([captured]) == finish([stepped])
        assert same_state(captured, stepped)


def test_prefetched_images_without_graphs_give_the_same_bits(
    root: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_store, "WINDOW_BYTES", 2 * 11 * 30 * 3072)
    config = without_graph(settings(root, {"name": "lwf"}))
    with numerics(config.train):
        whole, prefetched = (
            Trainer(config, 0, source, CUDA, image_store.DeviceImages.of(source, CUDA, whole))
            for whole in (True, False)
        )
        assert finish([whole]) == finish([prefetched])
        assert same_state(whole, prefetched)


def test_refused_code_leaves_the_process_usable(root: Path, source: Source, file: Path) -> None:
    bad, good = (settings(root, {"name": name}) for name in (f"{file}:Item", "er"))
    with numerics(good.train):
        main = torch.cuda.current_stream()
        with pytest.raises(UserCodeError):
            finish([Trainer(bad, 0, source, CUDA)])
        assert torch.cuda.current_stream() == main
        GraphStepper([Trainer(good, 0, source, CUDA)]).advance(2 * SHORT)
