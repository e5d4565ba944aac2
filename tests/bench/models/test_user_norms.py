"""Norms of the user in runs: by file, class, function and registered name; settings, identity, bad input."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import contnorm as cn
from contnorm import bench
from contnorm.bench.config.schema import NormConfig
from contnorm.bench.engine.trainer import Trainer
from contnorm.bench.models.user_norms import norm_code, resolve_norm_options
from contnorm.errors import UserError
from contnorm.registry import NORMS, describe_norm
from tests.testing.norms import CenteredNorm, StreamNorm

CODE = """
import torch
from torch import nn
from contnorm import current_tags

class RMS(nn.Module):
    def __init__(self, num_features: int, temperature: float = 1.0, mode: str = "soft", eps=1e-5, hook=print):
        super().__init__()
        self.num_features, self.temperature, self.mode, self.eps = num_features, temperature, mode, eps
        self.weight = nn.Parameter(torch.ones(num_features))

    def forward(self, x):
        y = x * (x.square().mean(1, keepdim=True) + self.eps).rsqrt() * self.temperature
        return y * self.weight.reshape(-1, *[1] * (x.dim() - 2))

class NoWeight(nn.Module):
    def __init__(self, num_features):
        super().__init__()
    def forward(self, x):
        return x - x.mean(1, keepdim=True)

class Only2d(nn.BatchNorm2d):
    pass

class Fails(RMS):
    def forward(self, x):
        raise KeyError("missing part")

class FailsInEvaluation(RMS):
    def forward(self, x):
        return super().forward(x) if self.training else x.nothing

class FailsLater(RMS):
    steps = 0
    def forward(self, x):
        FailsLater.steps += self.training
        return super().forward(x if FailsLater.steps < 12 else x[:, :3])

class InfiniteLoss(RMS):
    def auxiliary_loss(self):
        return self.weight.sum() / 0

class Wrapped(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.inner = nn.BatchNorm1d(num_features)
    @property
    def weight(self):
        return self.inner.weight
    def forward(self, x):
        return self.inner(x)

def half(channels):
    return RMS(channels, 0.5)

"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(CODE)
    before = set(NORMS)
    yield
    for name in set(NORMS) - before:
        cn.unregister_norm(name)


@pytest.fixture
def stream() -> Any:
    return bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=30, test_per_task=20)


def norms_of(result: Any) -> Any:
    return result.records[0].raw["norms"]


def test_norm_of_a_file_has_settings_and_a_hash(stream: Any) -> None:
    result = bench.run(stream, norm="mine.py:RMS", settings={"norm.temperature": 2}, runs="runs")
    norm = result.config.norm
    assert dict(norm.options) == {"temperature": 2.0, "mode": "soft", "eps": 1e-5}  # not hook: no record can contain it
    assert norm.code is not None and norms_of(result) == {"RMS": 2}
    again = bench.load_runs("runs").where(norm="mine.py:RMS")
    assert len(again) == 1 and again.records[0].config.norm == norm
    other = bench.run(stream, norm="mine.py:RMS", runs="runs")
    assert other.config != result.config and len(bench.load_runs("runs")) == 2


def test_function_and_class_as_objects(stream: Any) -> None:
    by_class = bench.run(stream, norm=CenteredNorm, settings={"norm.scale": 2.0})
    name = by_class.config.norm.name
    assert name.endswith("norms.py:CenteredNorm") and by_class.config.norm.options == (("scale", 2.0),)
    assert by_class.config.norm.code is not None
    by_function = bench.run(stream, norm=lambda channels: nn.GroupNorm(2, channels))
    assert norms_of(by_function) == {"GroupNorm(2)": 2}
    assert bench.run(stream, norm="mine.py:half").acc.shape == (1,)
    wide = bench.run(stream, norm=lambda channels: nn.GroupNorm(32, channels), settings={"model.width": 64})
    assert norms_of(wide) == {"GroupNorm(32)": 2}


@pytest.mark.slow
def test_registered_norm_runs_in_worker_processes(stream: Any) -> None:
    cn.register_norm("centered", CenteredNorm)
    result = bench.run(stream, norm="centered", seeds=2, lanes=2, runs="runs")
    assert result.config.norm.name == "centered" and result.config.norm.code == norm_code("centered") is not None
    alone = bench.run(stream, norm="centered", seeds=2, lanes=1)
    assert (alone.acc == result.acc).all()
    assert norms_of(result) == {"CenteredNorm": 2}


def test_built_in_norm_takes_options(stream: Any) -> None:
    plain = bench.run(stream, norm="bn")
    changed = bench.run(stream, norm="bn", settings={"norm.eps": 0.5})
    assert changed.config.norm.options == (("eps", 0.5),) and plain.config.norm.options == ()
    assert bench.run(stream, norm="bn", settings={"norm.eps": 1e-5}).config == plain.config


def test_user_network_is_converted_to_a_user_norm(stream: Any) -> None:
    def make(shape: Any, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))

    assert norms_of(bench.run(stream, norm="mine.py:RMS", model=make)) == {"RMS": 1}
    assert norms_of(bench.run(stream, norm="mine.py:half", model=make)) == {"RMS": 1}
    assert norms_of(bench.run(stream, norm="mine.py:Wrapped", model=make)) == {"Wrapped": 1}
    assert norms_of(bench.run(stream, norm="mine.py:RMS", model=make(None, stream.num_outputs))) == {"RMS": 1}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"norm": "mine.py:Only2d"}, "'mine.py:Only2d' has no layer for 1d input"),
    ({"norm": "mine.py:Fails"}, "mine.py, line 27: KeyError: 'missing part'"),
    ({"norm": "mine.py:FailsInEvaluation"}, "AttributeError"),
    ({"norm": "mine.py:nothing"}, "mine.py has no nothing"),
    ({"norm": nn.GroupNorm}, "'num_channels'"),
    ({"norm": nn.BatchNorm1d(8)}, "use a name, or a function or class"),
    ({"norm": cn.ContinualNorm2d}, "is a norm of contnorm. Use its name, norm='cn'"),
    ({"norm": "mine.py:RMS", "settings": {"norm.temprature": 1}}, "Did you mean 'norm.temperature'?"),
    ({"norm": "mine.py:RMS", "settings": {"norm.temperature": "hot"}}, "norm.temperature='hot': input should be"),
    ({"norm": "mine.py:RMS", "settings": {"norm.momentum": 0.5}}, "has no argument momentum"),
    ({"norm": "bn", "settings": {"norm.epsilon": 0.5}}, "unknown key 'norm.epsilon'"),
    ({"norm": "bn", "settings": {"norm.num_groups": 4}}, "norm.num_groups: is set with norm.groups"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[words[:40] for _, words in BAD])
def test_bad_norm_gets_one_line_and_nothing_is_written(stream: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        bench.run(stream, runs="runs", **arguments)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize("registered", [False, True])
def test_norm_that_fails_in_a_later_step_is_one_line(
    stream: Any, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mine.py:FailsLater"
    if registered:
        spec = importlib.util.spec_from_file_location("mine_registered", "mine.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mine_registered", module)
        spec.loader.exec_module(module)
        cn.register_norm("fails-later", module.FailsLater)
        name = "fails-later"
    with pytest.raises(UserError, match=rf"norm '{name}': after \d+ of \d+ steps: .*mine.py, line \d+: RuntimeError"):
        bench.run(stream, norm=name, lanes=1)


def test_auxiliary_loss_that_is_not_finite_is_named(stream: Any) -> None:
    with pytest.raises(UserError, match=r"or an auxiliary_loss\(\) of its layers is not finite"):
        bench.run(stream, norm="mine.py:InfiniteLoss", lanes=1)


def test_norm_without_weight_runs(stream: Any) -> None:
    assert norms_of(bench.run(stream, norm="mine.py:NoWeight")) == {"NoWeight": 2}


@pytest.mark.parametrize("place", [1, 4])
def test_stopped_run_with_a_stateful_norm_resumes_to_the_same_numbers(
    stream: Any, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm has tags, task hooks, an auxiliary loss, an extra batch, and buffers of its own."""
    arguments: dict[str, Any] = {"norm": StreamNorm, "model": small_network, "strategy": "er", "keep_weights": True}
    whole = bench.run(stream, runs="whole", **arguments)
    step = Trainer.step

    def stopped_step(trainer: Trainer) -> Any:
        if trainer.done == place:
            raise RuntimeError("stop")
        return step(trainer)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "step", stopped_step)
        with pytest.raises(UserError, match=f"after {place} of 6 steps"):
            bench.run(stream, runs="stopped", **arguments)
    resumed = bench.run(stream, runs="stopped", **arguments)
    np.testing.assert_array_equal(resumed.accuracy, whole.accuracy)
    for (name, a), b in zip(
        whole.models()[0].state_dict().items(), resumed.models()[0].state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    assert whole.models()[0].state_dict()["1.tasks"].item() == 2


def small_network(shape: Any, outputs: int, norm: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 5, 4), norm(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, outputs))


def test_code_of_a_registered_norm_is_that_of_its_file() -> None:
    cn.register_norm("centered", CenteredNorm)
    code = norm_code("centered")
    assert code is not None and re.fullmatch("[0-9a-f]{12}", code)
    cn.register_norm("both", {1: CenteredNorm, 2: nn.BatchNorm2d})
    assert norm_code("both") not in (None, code)
    assert norm_code("bn") is None


def test_options_of_any_keyword() -> None:
    def make(channels: int, scale: float = 1.0, **rest: Any) -> nn.Module:
        return CenteredNorm(channels, scale)

    spec = describe_norm(make)
    config = NormConfig("python:make", options=(("other", 3),))
    assert resolve_norm_options(config, spec) == (("other", 3), ("scale", 1.0))
